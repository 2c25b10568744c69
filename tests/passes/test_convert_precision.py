"""ConvertPrecision: which values are float16, which float32."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from optifx_tvm.errors import OptionError
from optifx_tvm.frontend import import_model
from optifx_tvm.passes import CanonicalizeConv, ConvertPrecision
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    calls,
    const,
    module,
    nn,
    op,
    ops,
)

IMAGE = (1, 6, 7, 4)
HALF = ConvertPrecision("float16")


def conv(emit, x, channels=4, seed=0):
    weight = const(channels, 3, 3, int(x.ty.shape[3]), seed=seed)
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    y = emit(nn.conv2d(x, weight, padding=1, **layouts))
    return emit(op.add(y, const(1, 1, 1, channels)))


def dtypes(mod, name):
    return [(str(c.args[0].ty.dtype), str(c.ty.dtype)) for c in calls(mod, name)]


def test_chain_is_float32_and_ends_in_float16():
    before = module(lambda emit, x: conv(emit, emit(nn.relu(conv(emit, x)))), IMAGE)
    after = apply(HALF, before)
    names = [c.op.name.removeprefix("relax.") for c in calls(after)]
    assert names == ["astype", "nn.conv2d", "add", "nn.relu", "astype", "nn.conv2d", "add"]
    assert dtypes(after, "nn.conv2d") == [("float16", "float32")] * 2
    assert dtypes(after, "add") == [("float32", "float32")] * 2
    for call in calls(after, "nn.conv2d"):
        assert str(call.args[1].ty.dtype) == "float16"
    assert_same_numbers(after, before, 5e-3)


def test_shortcut_is_stored_in_float16_alone():
    """The residual reads what the convolution reads: the value is in memory once."""

    def build(emit, x):
        y = emit(nn.relu(conv(emit, x)))
        return conv(emit, emit(nn.relu(emit(op.add(conv(emit, y, seed=1), y)))))

    before = module(build, IMAGE)
    after = apply(HALF, before)
    residual = calls(after, "add")[2]
    bound = {b.var: b.value for block in after["main"].body.blocks for b in block.bindings}
    shortcut = bound[residual.args[1]]
    assert shortcut.op.name == "relax.astype" and str(shortcut.args[0].ty.dtype) == "float16"
    assert_same_numbers(after, before, 5e-3)


def test_chain_that_meets_itself_is_not_rounded():
    """x * sigmoid(x) reads x twice, in one chain."""

    def build(emit, x):
        y = conv(emit, x)
        return conv(emit, emit(op.multiply(y, emit(op.sigmoid(y)))))

    before = module(build, IMAGE)
    after = apply(HALF, before)
    assert ops(after)["astype"] == 2
    assert_same_numbers(after, before, 5e-3)


def test_value_of_two_chains_is_rounded_once():
    def build(emit, x):
        y = conv(emit, x)
        return op.concat([conv(emit, emit(nn.relu(y))), conv(emit, emit(op.tanh(y)))], 3)

    before = module(build, IMAGE)
    after = apply(HALF, before)
    for name in ("nn.relu", "tanh"):
        (call,) = calls(after, name)
        bound = {b.var: b.value for block in after["main"].body.blocks for b in block.bindings}
        assert bound[call.args[0]].op.name == "relax.astype"
    assert dtypes(after, "nn.relu") == [("float32", "float32")]
    assert str(calls(after, "concat")[0].ty.dtype) == "float16"
    assert_same_numbers(after, before, 5e-3)


def test_pooling():
    def build(emit, x):
        y = emit(nn.max_pool2d(emit(nn.relu(conv(emit, x))), 2, layout="NHWC"))
        y = emit(nn.avg_pool2d(y, 3, layout="NHWC"))
        return conv(emit, y)

    before = module(build, IMAGE)
    after = apply(HALF, before)
    assert dtypes(after, "nn.max_pool2d") == dtypes(after, "nn.avg_pool2d") == [("float16",) * 2]
    assert_same_numbers(after, before, 5e-3)


def test_large_windows_are_averaged_in_float32():
    def build(emit, x):
        y = emit(nn.relu(conv(emit, x)))
        return conv(emit, emit(nn.avg_pool2d(y, 9, 9, layout="NHWC")))

    before = module(build, (1, 9, 18, 4))
    after = apply(HALF, before)
    assert dtypes(after, "nn.avg_pool2d") == [("float32", "float32")]
    assert dtypes(after, "nn.conv2d") == [("float16", "float32")] * 2
    assert_same_numbers(after, before, 5e-3)


def test_movers_keep_float16():
    def build(emit, x):
        y = emit(nn.relu(conv(emit, x)))
        parts = emit(op.split(y, 2, 3))
        first, last = (emit(relax.TupleGetItem(parts, i)) for i in range(2))
        y = emit(op.concat([last, first, emit(op.strided_slice(y, [3], [0], [2]))], 3))
        return conv(emit, emit(nn.pad(y, [0, 0, 1, 1, 0, 0, 0, 0])))

    before = module(build, IMAGE)
    after = apply(HALF, before)
    for name in ("split", "concat", "strided_slice", "nn.pad"):
        assert "float16" in str(calls(after, name)[0].ty)
        assert "float32" not in str(calls(after, name)[0].ty)
    assert_same_numbers(after, before, 5e-3)


def test_logits_are_not_rounded():
    def build(emit, x):
        y = emit(op.reshape(conv(emit, x), (1, 168)))
        return nn.softmax(y)

    before = module(build, IMAGE)
    after = apply(HALF, before)
    assert ops(after)["astype"] == 1
    assert_same_numbers(after, before, 5e-3)


@pytest.mark.parametrize("keep", [True, False])
def test_outputs(keep):
    def build(emit, x):
        y = emit(nn.relu(conv(emit, x)))
        return [y, emit(op.concat([y, conv(emit, y)], 3))]

    before = module(build, IMAGE)
    after = apply(ConvertPrecision("float16", keep_fp32_outputs=keep), before)
    expected = "float32" if keep else "float16"
    assert [str(f.dtype) for f in after["main"].ret_ty.fields] == [expected] * 2
    assert str(after["main"].params[0].ty.dtype) == "float32"
    assert_same_numbers(after, before, 5e-3)


def test_transposed():
    def build(emit, x):
        weight = const(4, 3, 3, 5)
        layouts = {"data_layout": "NHWC", "kernel_layout": "IHWO"}
        return nn.conv2d_transpose(emit(nn.relu(x)), weight, strides=2, **layouts)

    before = module(build, IMAGE)
    after = apply(HALF, before)
    assert dtypes(after, "nn.conv2d_transpose") == [("float16", "float32")]
    assert_same_numbers(after, before, 5e-3)


def test_left_alone():
    network = module(lambda emit, x: conv(emit, x), IMAGE)
    assert_left_alone(ConvertPrecision("float32"), network)
    assert_left_alone(HALF, module(lambda emit, x: op.multiply(emit(op.matmul(x, x)), x), (8, 8)))
    half = module(
        lambda emit, x: nn.conv2d(
            x, const(3, 3, 3, 4, dtype="float16"), data_layout="NHWC", kernel_layout="OHWI"
        ),
        IMAGE,
        dtype="float16",
    )
    assert_left_alone(HALF, half)
    integers = module(lambda emit, x: op.concat([x, x], 0), (2, 3), dtype="int64")
    assert_left_alone(HALF, integers)


def test_unknown_type():
    with pytest.raises(OptionError, match="bfloat16.*float16"):
        ConvertPrecision("bfloat16")


def test_weights_are_rounded_once():
    before = module(lambda emit, x: conv(emit, x), IMAGE)
    (conv_before,), (conv_after,) = calls(before, "nn.conv2d"), calls(HALF(before), "nn.conv2d")
    want = conv_before.args[1].value.numpy().astype("float16")
    np.testing.assert_array_equal(conv_after.args[1].value.numpy(), want)


def test_the_type_asked_for_at_import_is_carried_out_by_canonicalisation():
    imported = import_model("zoo:unet", "data:[1,3,16,16]", dtype="float16")
    asked = apply(CanonicalizeConv(), imported)
    given = apply(CanonicalizeConv(dtype="float16"), import_model("zoo:unet", "data:[1,3,16,16]"))
    assert ops(asked) != ops(apply(CanonicalizeConv(dtype="float32"), imported))
    assert ops(asked) == ops(given)
