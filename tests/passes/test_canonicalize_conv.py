"""CanonicalizeConv: the form that the rest relies on, on whole networks."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from optifx_tvm.frontend import import_model
from optifx_tvm.passes import CanonicalizeConv
from tests.support import light_models
from tests.support.rewriting import (
    apply,
    assert_same_numbers,
    batch_norm,
    calls,
    const,
    module,
    nn,
    op,
    ops,
    random_inputs,
    run,
)

ZOO = {
    "resnet18": 64,
    "densenet121": 32,
    "mobilenet_v2": 64,
    "squeezenet1_1": 64,
    "nasnet_a_mobile": 96,
    "unet": 32,
}
"""Networks and input sizes; the others repeat their blocks."""


def assert_canonical(mod: tvm.IRModule) -> None:
    """What ConvGraph and the templates expect; permutes of images only at the borders."""
    (block,) = mod["main"].body.blocks
    assert isinstance(block, relax.DataflowBlock)
    found = calls(mod)
    for call in found:
        name, attrs = call.op.name.removeprefix("relax."), call.attrs
        if name in ("nn.conv2d", "nn.conv2d_transpose"):
            kernel = "OHWI" if name == "nn.conv2d" else "IHWO"
            layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout
            assert layouts == ("NHWC", kernel, "NHWC")
            assert len(attrs.padding) == 4
            assert isinstance(call.args[1], tvm.ir.GenericConst)
        if name in ("nn.max_pool2d", "nn.avg_pool2d"):
            assert (attrs.layout, attrs.out_layout) == ("NHWC", "NHWC")
        assert name not in ("nn.batch_norm", "mean", "nn.dropout", "stack", "broadcast_to")
    bound = {b.var for b in block.bindings if isinstance(b.var, relax.DataflowVar)}
    outputs = {b.value for b in block.bindings if not isinstance(b.var, relax.DataflowVar)}
    for call in calls(mod, "permute_dims"):
        at_input = call.args[0] not in bound
        at_output = any(call.same_as(value) for value in outputs)
        shuffles = len(call.attrs.axes) == 5
        assert at_input or at_output or shuffles, f"a permute inside: {call}"


@pytest.mark.parametrize(("name", "size"), ZOO.items())
def test_zoo(name, size):
    before = import_model(f"zoo:{name}", {"data": (1, 3, size, size)})
    after = CanonicalizeConv()(before)
    assert_canonical(after)
    assert "matmul" not in ops(after)
    assert ops(after)["multiply"] == {"densenet121": 62, "nasnet_a_mobile": 4}.get(name, 0)
    tvm.ir.assert_structural_equal(CanonicalizeConv()(after), after)


@pytest.mark.parametrize("name", ["squeezenet", "inception_v1", "resnet50", "densenet121"])
def test_light_onnx_models(name):
    before = import_model(light_models.path(name))
    after = CanonicalizeConv()(before)
    assert_canonical(after)
    assert not {"matmul", "call_tir"} & set(ops(after))
    tvm.ir.assert_structural_equal(CanonicalizeConv()(after), after)


def test_half_precision_of_a_whole_network():
    half = CanonicalizeConv(dtype="float16")(import_model(light_models.path("squeezenet")))
    assert_canonical(half)
    for conv in calls(half, "nn.conv2d"):
        assert [str(arg.ty.dtype) for arg in conv.args] == ["float16"] * 2
    tvm.ir.assert_structural_equal(CanonicalizeConv(dtype="float16")(half), half)


def small_network(emit, x):
    """Every pass has something to do."""

    def norm(y, channels):
        return emit(relax.TupleGetItem(emit(batch_norm(y, channels)), 0))

    y = emit(nn.conv2d(emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 2, 0])), const(6, 3, 3, 3), strides=2))
    y = emit(nn.relu(norm(y, 6)))
    side = norm(emit(nn.conv2d(y, const(6, 1, 3, 3), padding=1, groups=6)), 6)
    y = emit(op.add(y, emit(op.minimum(emit(op.maximum(side, const(1, low=0.0))), const(1)))))
    up = emit(nn.conv2d_transpose(y, const(6, 4, 2, 2), strides=2))
    down = emit(nn.max_pool2d(up, 3, 2, 1, ceil_mode=True))
    y = emit(op.concat([y, emit(op.strided_slice(down, [2, 3], [0, 0], [4, 4]))], 1))
    y = emit(nn.relu(norm(y, 10)))
    y = emit(op.reshape(emit(op.mean(y, [2, 3])), (2, 10)))
    y = emit(relax.TupleGetItem(emit(nn.dropout(y)), 0))
    return [emit(op.add(emit(op.matmul(y, const(10, 5))), const(5))), up]


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), ("float16", 5e-3)])
def test_numbers(dtype, tolerance):
    before = module(small_network, (2, 3, 7, 8))
    after = apply(CanonicalizeConv(dtype=dtype), before)
    assert_canonical(after)
    assert_same_numbers(after, before, tolerance)


def test_squeezenet_against_onnxruntime():
    """Imported, canonicalised and compiled by TVM."""
    model = light_models.randomized("squeezenet")
    imported = import_model(model, "data_0:[1,3,64,64]")
    (data,) = random_inputs(imported)
    (entry,) = (value for value in model.graph.input if value.name == "data_0")
    for dim in entry.type.tensor_type.shape.dim[2:]:
        dim.dim_value = 64
    (want,) = light_models.run_onnx(model, data_0=data)
    (got,) = run(CanonicalizeConv()(imported), data)
    assert abs(got - want).max() < 1e-5 * abs(want).max()


def test_pass_context():
    """Instruments see the small passes, and can switch one off."""

    @tvm.instrument.pass_instrument
    class Watch:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def should_run(self, mod, info):
            return info.name != "FoldBatchNorm"

        def run_before_pass(self, mod, info):
            self.seen.append(info.name)

    watch = Watch()
    before = module(small_network, (2, 3, 7, 8))
    with tvm.transform.PassContext(instruments=[watch]):
        after = tvm.transform.Sequential([CanonicalizeConv()])(before)
    assert {"CanonicalizeConv", "CleanUpImports", "ConvertToNHWC"} <= set(watch.seen)
    assert "nn.batch_norm" in ops(after)


def test_a_module_without_convolutions_keeps_its_numbers_and_operators():
    def build(emit, x, y):
        return nn.softmax(emit(op.matmul(emit(op.multiply(x, y)), y)))

    before = module(build, (8, 8), (8, 8))
    assert ops(apply(CanonicalizeConv(), before)) == ops(before)


def test_symbolic_batch_is_left_in_its_layout():
    batch = tvm.tirx.Var("n", "int64")
    before = module(
        lambda emit, x: nn.relu(emit(nn.conv2d(x, const(4, 3, 3, 3)))), (batch, 3, 8, 8)
    )
    after = CanonicalizeConv()(before)
    assert ops(after) == ops(before)
    assert calls(after, "nn.conv2d")[0].attrs.data_layout == "NCHW"
