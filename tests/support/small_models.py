"""Networks small enough to compile in a moment."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

INPUT_SHAPE = (1, 3, 8, 8)
OUTPUT_SHAPE = (1, 4, 6, 6)


def conv_relu(batch: int = 1) -> tvm.IRModule:
    """3x3 convolution and ReLU, NCHW: ``data`` (batch, 3, 8, 8) -> (batch, 4, 6, 6), float32."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("float32")
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((batch, *INPUT_SHAPE[1:]), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            conv = builder.emit(relax.op.nn.conv2d(data, relax.const(weight)))
            result = builder.emit_output(relax.op.nn.relu(conv))
        builder.emit_func_output(result)
    return builder.get()


def two_inputs() -> tvm.IRModule:
    """``a`` (2, 3) float32, ``b`` (2, 3) float32 -> (a + b, a * b)."""
    builder = relax.BlockBuilder()
    a, b = (relax.Var(name, relax.TensorType((2, 3), "float32")) for name in "ab")
    with builder.function("main", [a, b]):
        with builder.dataflow():
            total = builder.emit_output(relax.op.add(a, b))
            product = builder.emit_output(relax.op.multiply(a, b))
        builder.emit_func_output([total, product])
    return builder.get()


def conv_relu_reference(data: np.ndarray) -> np.ndarray:
    """What ``conv_relu`` computes, in float64."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(data.astype("float64"), (3, 3), (2, 3))
    return np.maximum(np.einsum("nchwij,ocij->nohw", windows, weight), 0)


def onnx_conv(batch: int | str = 1, operator: str = "Relu", domain: str = "") -> onnx.ModelProto:
    """3x3 convolution, then ``operator`` in a node named ``last``; ``batch`` may be symbolic."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("float32")
    nodes = [
        helper.make_node("Conv", ["data", "weight"], ["conv"], name="first"),
        helper.make_node(operator, ["conv"], ["out"], name="last", domain=domain),
    ]
    graph = helper.make_graph(
        nodes,
        "conv",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [batch, *INPUT_SHAPE[1:]])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [batch, *OUTPUT_SHAPE[1:]])],
        [numpy_helper.from_array(weight, "weight")],
    )
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
