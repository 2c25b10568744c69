"""FoldBatchNorm: what is folded, what must not be, and that numbers stay."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from optifx_tvm.passes import FoldBatchNorm
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    batch_norm,
    calls,
    const,
    module,
    nn,
    op,
    ops,
)

IMAGE = (2, 4, 6, 5)


def conv(x, channels=6, groups=1, transposed=False, **options):
    if transposed:
        return nn.conv2d_transpose(x, const(4, channels // groups, 3, 2), groups=groups, **options)
    return nn.conv2d(x, const(channels, 4 // groups, 3, 2), groups=groups, **options)


def norm(emit, x, channels, axis=1):
    return emit(relax.TupleGetItem(emit(batch_norm(x, channels, axis)), 0))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_after_conv(transposed, groups, bias):
    def build(emit, x):
        y = emit(conv(x, 8, groups, transposed, padding=(1, 0, 2, 1), strides=2))
        y = emit(op.add(y, const(1, 8, 1, 1))) if bias else y
        return nn.relu(norm(emit, y, 8))

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    kind = "nn.conv2d_transpose" if transposed else "nn.conv2d"
    assert ops(after) == {kind: 1, "add": 1, "nn.relu": 1}
    assert_same_numbers(after, before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_scale_before_conv(transposed, groups):
    """Legal with padding too: scaled zeros are zeros."""

    def build(emit, x):
        y = emit(op.multiply(x, const(1, 4, 1, 1)))
        return conv(y, 6, groups, transposed, padding=1)

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert "multiply" not in ops(after)
    assert_same_numbers(after, before)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_norm_before_unpadded_conv(groups):
    before = module(lambda emit, x: conv(norm(emit, x, 4), 8, groups, dilation=(2, 1)), IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"nn.conv2d": 1, "add": 1}
    assert_same_numbers(after, before)


def test_shift_before_padded_conv_stays():
    """The padding is zero, not the shift."""
    before = module(lambda emit, x: conv(norm(emit, x, 4), padding=1), IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert [c.op.name for c in calls(after)] == ["relax.multiply", "relax.add", "relax.nn.conv2d"]
    assert_same_numbers(after, before)


def test_shift_before_transposed_conv_stays():
    """Positions near the border see fewer taps."""
    before = module(
        lambda emit, x: conv(emit(op.add(x, const(1, 4, 1, 1))), transposed=True), IMAGE
    )
    assert_left_alone(FoldBatchNorm(), before)


def test_conv_with_two_readers_keeps_its_weights():
    def build(emit, x):
        y = emit(conv(x))
        return op.add(norm(emit, y, 6), y)

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"nn.conv2d": 1, "multiply": 1, "add": 2}
    assert_same_numbers(after, before)


def test_conv_that_is_an_output_keeps_its_weights():
    def build(emit, x):
        y = emit(conv(x))
        return [y, norm(emit, y, 6)]

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert_same_numbers(after, before)


def test_prologue_after_concat_is_one_scale_and_shift():
    """DenseNet's layers, and the ONNX form in which a scale and shift follow the norm."""

    def build(emit, x):
        y = norm(emit, emit(op.concat([x, x], 1)), 8)
        y = emit(op.add(emit(op.multiply(y, const(8, 1, 1))), const(8, 1, 1, seed=3)))
        return nn.conv2d(emit(nn.relu(y)), const(3, 8, 1, 1))

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"concat": 1, "multiply": 1, "add": 1, "nn.relu": 1, "nn.conv2d": 1}
    assert_same_numbers(after, before)


def test_scales_divisions_and_shifts_after_conv():
    def build(emit, x):
        y = emit(op.add(emit(conv(x)), const(1, 6, 1, 1)))
        y = emit(op.divide(y, const(1, 6, 1, 1, low=1.0)))
        y = emit(op.subtract(y, const(6, 1, 1)))
        return op.multiply(y, relax.const(np.float32(-1.5)))

    before = module(build, IMAGE)
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"nn.conv2d": 1, "add": 1}
    assert_same_numbers(after, before)


def test_nhwc():
    def build(emit, x):
        weight = const(6, 3, 3, 4)
        y = emit(nn.conv2d(x, weight, padding=1, data_layout="NHWC", kernel_layout="OHWI"))
        return norm(emit, y, 6, axis=3)

    before = module(build, (1, 5, 6, 4))
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"nn.conv2d": 1, "add": 1}
    assert_same_numbers(after, before)


def test_constants_along_other_axes_stay():
    def build(emit, x):
        y = emit(op.multiply(emit(conv(x)), const(1, 1, 4, 1)))
        full = emit(op.add(y, const(1, 6, 4, 4)))
        return op.multiply(full, const(1, 6, 1, 1))

    before = module(build, IMAGE)
    assert_left_alone(FoldBatchNorm(), before)


def test_training_mode_and_variable_parameters_stay():
    before = module(
        lambda emit, x: relax.TupleGetItem(emit(batch_norm(x, 4, training=True)), 0), IMAGE
    )
    assert_left_alone(FoldBatchNorm(), before)
    variable = module(
        lambda emit, x, p: relax.TupleGetItem(
            emit(nn.batch_norm(x, p, p, p, p, 1, training=False)), 0
        ),
        IMAGE,
        (4,),
    )
    assert_left_alone(FoldBatchNorm(), variable)


def test_matrix_norm():
    before = module(lambda emit, x: nn.relu(norm(emit, x, 7)), (3, 7))
    after = apply(FoldBatchNorm(), before)
    assert ops(after) == {"multiply": 1, "add": 1, "nn.relu": 1}
    assert_same_numbers(after, before)
