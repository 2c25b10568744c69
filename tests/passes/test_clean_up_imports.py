"""CleanUpImports, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from optifx_tvm.passes import CleanUpImports
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    const,
    module,
    nn,
    op,
    ops,
)

IMAGE = (1, 3, 4, 5)


def test_sum_of_stack_becomes_add():
    @I.ir_module
    class Before:
        @R.function
        def main(a: R.Tensor((1, 3, 4, 5), "float32"), b: R.Tensor((3, 1, 1), "float32")):
            with R.dataflow():
                p = R.broadcast_to(a, (1, 3, 4, 5))
                q = R.broadcast_to(b, (1, 3, 4, 5))
                s = R.stack((p, q), axis=0)
                gv = R.sum(s, axis=[0])
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(a: R.Tensor((1, 3, 4, 5), "float32"), b: R.Tensor((3, 1, 1), "float32")):
            with R.dataflow():
                gv: R.Tensor((1, 3, 4, 5), "float32") = R.add(a, b)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(apply(CleanUpImports(), Before), Expected)


@pytest.mark.parametrize("reduce", ["max", "min", "mean"])
def test_other_reductions_of_stack(reduce):
    def build(emit, a, b, c):
        stacked = emit(op.stack([a, b, c], 0))
        return getattr(op, reduce)(stacked, 0)

    before = module(build, IMAGE, IMAGE, IMAGE)
    after = apply(CleanUpImports(), before)
    assert "stack" not in ops(after)
    assert_same_numbers(after, before)


def test_stack_over_another_axis_stays():
    assert_left_alone(
        CleanUpImports(), module(lambda emit, a: op.sum(emit(op.stack([a, a], 1)), 1), IMAGE)
    )


def test_dropout_and_reshape_chains_disappear():
    def build(emit, x):
        x = emit(relax.TupleGetItem(emit(nn.dropout(x)), 0))
        x = emit(op.squeeze(emit(op.expand_dims(x, 1)), 1))
        x = emit(op.reshape(emit(op.reshape(x, (3, 20))), (1, 60)))
        x = emit(op.permute_dims(emit(op.permute_dims(x, [1, 0])), [1, 0]))
        return nn.relu(emit(op.astype(x, "float32")))

    before = module(build, IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after) == {"reshape": 1, "nn.relu": 1}
    assert_same_numbers(after, before)


def test_dropout_mask_stays():
    def build(emit, x):
        dropped = emit(nn.dropout(x))
        return [emit(relax.TupleGetItem(dropped, 0)), emit(relax.TupleGetItem(dropped, 1))]

    assert ops(CleanUpImports()(module(build, IMAGE)))["nn.dropout"] == 1


def test_permutes_compose():
    def build(emit, x):
        return op.permute_dims(emit(op.permute_dims(x, [0, 2, 3, 1])), [0, 2, 1, 3])

    before = module(build, IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after) == {"permute_dims": 1}
    assert_same_numbers(after, before)


@pytest.mark.parametrize(
    ("slopes", "axis", "expected"),
    [
        ([0.25] * 3, 1, {"nn.leakyrelu": 1}),
        ([0.1, -0.2, 0.3], 1, {"nn.relu": 1, "minimum": 1, "multiply": 1, "add": 1}),
        ([0.1, -0.2, 0.3, 0.4, 2.0], 3, {"nn.relu": 1, "minimum": 1, "multiply": 1, "add": 1}),
    ],
)
def test_prelu(slopes, axis, expected):
    slope = relax.const(np.array(slopes, "float32"))
    before = module(lambda emit, x: nn.prelu(x, slope, axis), IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after) == expected
    assert_same_numbers(after, before)


@pytest.mark.parametrize(
    ("slope", "kind"), [(const(3, 1, 1), "minimum"), (const(1), "nn.leakyrelu")]
)
def test_where_of_a_slope(slope, kind):
    """As torch writes PReLU."""
    zero = relax.const(np.float32(0))

    def build(emit, x):
        scaled = emit(op.multiply(slope, x))
        return op.where(emit(op.greater(x, zero)), x, scaled)

    before = module(build, IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after)[kind] == 1 and "where" not in ops(after)
    assert_same_numbers(after, before)


def test_other_conditions_stay():
    one = relax.const(np.float32(1))
    before = module(
        lambda emit, x: op.where(emit(op.greater(x, one)), x, emit(op.multiply(x, const(3, 1, 1)))),
        IMAGE,
    )
    assert_left_alone(CleanUpImports(), before)


def test_maximum_and_minimum_become_relu_and_clip():
    zero, six, low = (relax.const(np.float32(v)) for v in (0, 6, -2))

    def build(emit, x):
        relu = emit(op.maximum(zero, x))
        relu6 = emit(op.minimum(relu, six))
        clip = emit(op.minimum(emit(op.maximum(x, low)), six))
        return [relu, relu6, clip]

    before = module(build, IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after) == {"nn.relu": 1, "clip": 2}
    assert_same_numbers(after, before)


def test_bounds_that_cross_stay():
    """minimum(maximum(x, 2), 1) is 1 everywhere, which clip does not promise."""
    one, two = relax.const(np.float32(1)), relax.const(np.float32(2))
    before = module(lambda emit, x: op.minimum(emit(op.maximum(x, two)), one), IMAGE)
    assert_left_alone(CleanUpImports(), before)


def test_constants_fold_and_move_right():
    def build(emit, x):
        bias = emit(op.reshape(const(3), (1, 3, 1, 1)))
        scale = emit(op.sqrt(emit(op.add(const(3, 1, 1, low=1.0), relax.const(np.float32(1))))))
        return op.add(bias, emit(op.multiply(scale, x)))

    before = module(build, IMAGE)
    after = apply(CleanUpImports(), before)
    assert ops(after) == {"multiply": 1, "add": 1}
    assert_same_numbers(after, before)


@pytest.mark.parametrize("size", [3, 5])
def test_local_response_pool_becomes_slices(size):
    def build(emit, x):
        spread = emit(op.expand_dims(emit(op.multiply(x, x)), 1))
        pads = (size // 2, 0, 0, size // 2, 0, 0)
        pool = nn.avg_pool3d(spread, (size, 1, 1), (1, 1, 1), pads, count_include_pad=True)
        return op.squeeze(emit(pool), 1)

    before = module(build, (2, 7, 4, 3))
    after = apply(CleanUpImports(), before)
    assert ops(after)["strided_slice"] == size
    assert not {"nn.avg_pool3d", "reshape", "expand_dims", "squeeze"} & set(ops(after))
    assert_same_numbers(after, before)


def test_real_3d_pooling_stays():
    before = module(lambda emit, x: nn.avg_pool3d(x, (2, 2, 2), (1, 1, 1)), (1, 2, 4, 4, 4))
    assert_left_alone(CleanUpImports(), before)


def test_integer_division_of_constants_is_left_to_tvm():
    seven, two = (relax.const(np.array([v], "int32")) for v in (-7, 2))
    before = module(lambda emit, x: op.add(x, emit(op.divide(seven, two))), (1,), dtype="int32")
    assert_left_alone(CleanUpImports(), before)


def test_dynamic_shapes_stay():
    batch = tvm.tirx.Var("n", "int64")
    before = module(
        lambda emit, x: op.reshape(emit(op.reshape(x, (batch, 6))), (batch, 3, 2)), (batch, 2, 3)
    )
    after = CleanUpImports()(before)
    assert ops(after) == ops(before)
