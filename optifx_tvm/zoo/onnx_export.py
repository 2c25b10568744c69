"""A bound Relax CNN as an ONNX model, to check and time it with onnxruntime.

Knows the operators that the zoo's networks consist of, float32 or float16, one input, one output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from optifx_tvm.errors import ModelError

_OPSET = 17
_ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def to_onnx(module: tvm.IRModule) -> onnx.ModelProto:
    """The function ``main`` with all parameters bound. ``ModelError`` names what it can't do."""
    writer = _Writer()
    main = module["main"]
    if len(main.params) != 1:
        raise ModelError(
            f"main has {len(main.params)} inputs; ONNX export supports one, so bind the parameters"
        )
    writer.names[main.params[0]] = main.params[0].name
    for block in main.body.blocks:
        for binding in block.bindings:
            writer.write(binding.var, binding.value)
    graph = helper.make_graph(
        writer.nodes,
        "main",
        [_value_info(main.params[0].name, main.params[0].ty)],
        [_value_info(writer.names[main.body.body], main.body.body.ty)],
        writer.initializers,
    )
    # ir_version 8 goes with opset 17: older onnxruntimes read it too
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def _value_info(name: str, ty: relax.TensorType) -> onnx.ValueInfoProto:
    shape = [int(n) for n in ty.shape]
    return helper.make_tensor_value_info(name, _ELEMENT_TYPES[str(ty.dtype)], shape)


def _ints(values: Sequence[Any]) -> list[int]:
    return [int(v) for v in values]


class _Writer:
    """Collects nodes and initializers; ``names`` has the ONNX name of each Relax value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.names: dict[relax.Expr, str] = {}

    def write(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.Var):
            self.names[var] = self.names[value]
            return
        if isinstance(value, relax.TupleGetItem):
            # a batch norm's first result, the only tuple in an inference network
            self.names[var] = self.names[value.tuple_value]
            return
        if not isinstance(value, relax.Call) or value.op.name not in _OPERATORS:
            what = value.op.name if isinstance(value, relax.Call) else type(value).__name__
            raise ModelError(
                f"{what} ({var.name}) can't be exported to ONNX; supported are "
                f"{', '.join(name.removeprefix('relax.') for name in _OPERATORS)}"
            )
        self.names[var] = name = f"t{len(self.nodes)}"
        _OPERATORS[value.op.name](self, value, name)

    def node(self, op: str, inputs: Sequence[relax.Expr | str], output: str, **attrs: Any) -> None:
        inputs = [i if isinstance(i, str) else self.operand(i) for i in inputs]
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attrs))

    def operand(self, expr: relax.Expr) -> str:
        if isinstance(expr, tvm.ir.GenericConst):
            return self.initializer(expr.value.numpy())
        return self.names[expr]

    def initializer(self, array: np.ndarray) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name


def _conv(w: _Writer, call: relax.Call, out: str) -> None:
    attrs = call.attrs
    w.node(
        "ConvTranspose" if call.op.name.endswith("transpose") else "Conv",
        call.args,
        out,
        strides=_ints(attrs.strides),
        pads=_ints(attrs.padding),
        dilations=_ints(attrs.dilation),
        group=int(attrs.groups),
    )


def _batch_norm(w: _Writer, call: relax.Call, out: str) -> None:
    w.node("BatchNormalization", call.args, out, epsilon=float(call.attrs.epsilon))


def _pool(w: _Writer, call: relax.Call, out: str) -> None:
    attrs = call.attrs
    window: dict[str, Any] = {
        "kernel_shape": _ints(attrs.pool_size),
        "strides": _ints(attrs.strides),
        "pads": _ints(attrs.padding),
        "ceil_mode": int(attrs.ceil_mode),
    }
    if call.op.name.endswith("avg_pool2d"):
        w.node(
            "AveragePool", call.args, out, count_include_pad=int(attrs.count_include_pad), **window
        )
    else:
        w.node("MaxPool", call.args, out, **window)


def _clip(w: _Writer, call: relax.Call, out: str) -> None:
    dtype = str(call.ty.dtype)
    bounds = [w.initializer(np.asarray(float(b.value), dtype)) for b in call.args[1:]]
    w.node("Clip", [call.args[0], *bounds], out)


def _slice(w: _Writer, call: relax.Call, out: str) -> None:
    axes, begin, end = (w.initializer(np.asarray(_ints(a), "int64")) for a in call.args[1:4])
    w.node("Slice", [call.args[0], begin, end, axes], out)


def _pad(w: _Writer, call: relax.Call, out: str) -> None:
    # Relax: (before, after) axis by axis; ONNX: all before, then all after
    widths = np.asarray(_ints(call.attrs.pad_width), "int64").reshape(-1, 2).T.ravel()
    w.node("Pad", [call.args[0], w.initializer(widths)], out)


def _mean(w: _Writer, call: relax.Call, out: str) -> None:
    axes, keep = _ints(call.attrs.axis), int(call.attrs.keepdims)
    if axes == [2, 3] and keep:
        w.node("GlobalAveragePool", call.args, out)
    else:
        w.node("ReduceMean", call.args, out, axes=axes, keepdims=keep)


def _reshape(w: _Writer, call: relax.Call, out: str) -> None:
    shape = w.initializer(np.asarray(_ints(call.ty.shape), "int64"))
    w.node("Reshape", [call.args[0], shape], out)


def _permute(w: _Writer, call: relax.Call, out: str) -> None:
    axes = call.attrs.axes
    perm = list(range(len(call.ty.shape)))[::-1] if axes is None else _ints(axes)
    w.node("Transpose", call.args, out, perm=perm)


_OPERATORS = {
    "relax.nn.conv2d": _conv,
    "relax.nn.conv2d_transpose": _conv,
    "relax.nn.batch_norm": _batch_norm,
    "relax.nn.max_pool2d": _pool,
    "relax.nn.avg_pool2d": _pool,
    "relax.nn.relu": lambda w, call, out: w.node("Relu", call.args, out),
    "relax.clip": _clip,
    "relax.add": lambda w, call, out: w.node("Add", call.args, out),
    "relax.concat": lambda w, call, out: w.node("Concat", call.args[0], out, axis=call.attrs.axis),
    "relax.strided_slice": _slice,
    "relax.nn.pad": _pad,
    "relax.mean": _mean,
    "relax.reshape": _reshape,
    "relax.permute_dims": _permute,
    "relax.matmul": lambda w, call, out: w.node("MatMul", call.args, out),
}
