"""ONNX graphs to Relax: TVM's importer with its wrong or missing parts replaced.

``OnnxImporter`` is TVM's graph importer with three changes: a node whose inputs are all constants
(and ``Shape`` of a static tensor) is evaluated at once, so that shape arithmetic never reaches
Relax; operators in ``onnx_operators.CONVERTERS`` are converted there; a failure becomes a
``ModelError`` that names the node.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import tvm
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from optifx_tvm.errors import ModelError
from optifx_tvm.onnx_operators import CONVERTERS, Node, UnsupportedNode
from optifx_tvm.passes.dataflow import array_of, constant

# What the importer and the reference evaluator raise on a graph that they can't take.
CONVERSION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_NEVER_FOLDED = frozenset(
    ("Constant", "If", "RandomNormal", "RandomUniform", "Identity", "Dropout", "Shape", "Size")
)
_OPTIONAL_OUTPUTS = ("BatchNormalization", "Dropout", "MaxPool")
_DOMAINS = ("", "ai.onnx", "com.microsoft")


class OnnxImporter(onnx_frontend.ONNXGraphImporter):
    """TVM's importer, mended. One instance imports one graph."""

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        known = {*onnx_frontend._get_convert_map(), *CONVERTERS, "If", "Constant"}
        for node in graph.node:
            if node.op_type not in known or node.domain not in _DOMAINS:
                domain = f"{node.domain}." if node.domain else ""
                raise ModelError(
                    f"unsupported operator {domain}{node.op_type} (node '{node.name}'); "
                    "replace it in the model, or cut the model before it"
                )

    def _convert_operator(
        self, op_name: str, inputs: Sequence, attrs: dict, opset: int
    ) -> relax.Expr:
        name = attrs["tvm_custom"]["name"]
        node = Node(op_name, name, list(inputs), attrs, opset, attrs["tvm_custom"]["num_outputs"])
        try:
            return self._convert(node)
        except UnsupportedNode as error:
            raise ModelError(f"unsupported operator {op_name} (node '{name}'): {error}") from error
        except CONVERSION_ERRORS as error:
            raise ModelError(
                f"operator {op_name} (node '{name}') can't be imported: {_first_line(error)}"
            ) from error

    def _convert(self, node: Node) -> relax.Expr:
        folded = fold_node(node)
        if folded is not None:
            return folded
        convert = CONVERTERS.get(node.op)
        result = convert(node, self.bb) if convert is not None else None
        if result is None:
            inputs = onnx_frontend.onnx_input(node.inputs)
            result = super()._convert_operator(node.op, inputs, node.attrs, node.opset)
        # Bound to a variable at once: a call that two nodes read would be emitted twice.
        return self.bb.emit(result) if isinstance(result, relax.Call) else result


def fold_node(node: Node) -> relax.Expr | None:
    """The constant (or tuple of constants) that a node on constants evaluates to; None when it has
    other inputs, no inputs, or is beyond the reference evaluator."""
    given = [x for x in node.inputs if x is not None]
    arrays = [array for array in map(array_of, given) if array is not None]
    if not arrays or len(arrays) < len(given) or node.op in _NEVER_FOLDED:
        return None
    names = [f"i{i}" if x is not None else "" for i, x in enumerate(node.inputs)]
    outputs = [f"o{i}" for i in range(node.outputs)]
    attrs = {key: value for key, value in node.attrs.items() if key != "tvm_custom"}
    feeds = dict(zip((name for name in names if name), arrays, strict=True))
    try:
        proto = onnx.helper.make_node(node.op, names, outputs, **attrs)
        evaluator = ReferenceEvaluator(proto, opsets={"": node.opset})
        with np.errstate(all="ignore"):
            values = evaluator.run(None, feeds)
    except CONVERSION_ERRORS:
        return None
    if not isinstance(values, list) or not all(isinstance(v, np.ndarray) for v in values):
        return None
    constants = [constant(v) for v in values]
    return constants[0] if len(constants) == 1 else relax.Tuple(constants)


def load(path: Path) -> onnx.ModelProto:
    """Reads an ONNX file with its external data; ``ModelError`` when that is not possible."""
    try:
        model = onnx.load(str(path))
    except DecodeError as error:
        raise ModelError(f"'{path}' is no ONNX model, or it is truncated") from error
    except (OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"can't read '{path}': {_first_line(error)}") from error
    if not model.graph.node or not model.graph.output:
        raise ModelError(f"'{path}' is no ONNX model: its graph has no nodes or no outputs")
    return model


def graph_inputs(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Name and shape of each network input; a dynamic dimension is its name or "?"."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if not isinstance(value.name, str):  # protobuf gives bytes for what is not UTF-8
            raise ModelError(f"the name of an input, {value.name!r}, is not text: a damaged file?")
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"input '{value.name}' is not a tensor; only tensors are supported")
        dims = value.type.tensor_type.shape.dim
        inputs[value.name] = tuple(
            dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in dims
        )
    return inputs


def from_onnx(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> tvm.IRModule:
    """Imports ``model``, whose inputs have the static ``shapes``. The model is left as it is."""
    own = onnx.ModelProto()
    own.CopyFrom(model)
    if own.functions:
        own = onnx.inliner.inline_local_functions(own)
    if own.ir_version < 3:
        raise ModelError(f"ONNX IR version {own.ir_version} is not supported; 3 and later are")
    _tidy(own.graph)
    opset = next((o.version for o in own.opset_import if o.domain in ("", "ai.onnx")), 1)
    importer = OnnxImporter({name: list(shape) for name, shape in shapes.items()}, "float32")
    # The importer prints before it raises, and warns of renamed inputs.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importer.from_onnx(own.graph, opset)
        except CONVERSION_ERRORS as error:
            raise ModelError(f"the ONNX graph can't be imported: {_first_line(error)}") from error


def _tidy(graph: onnx.GraphProto) -> None:
    """Gives every node a name and drops optional outputs that nothing reads."""
    read = {name for node in graph.node for name in node.input}
    read.update(output.name for output in graph.output)
    for node in graph.node:
        if not node.name:
            node.name = next((name for name in node.output if name), node.op_type)
        if node.op_type in _OPTIONAL_OUTPUTS:
            while len(node.output) > 1 and node.output[-1] not in read:
                del node.output[-1]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
