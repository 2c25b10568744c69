"""Reads the bindings of one Relax dataflow block as the operators that ConvGraph knows.

Each binding becomes one ``Op``: a region operator, a concat, an element-wise operator, or "opaque"
for everything else (other layouts, ranks and dtypes, dynamic shapes, unknown operators, calls of
functions). An opaque operator is never fused; it only orders what is before and after it.
Expects the form that CanonicalizeConv makes; what is not in that form is opaque, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.ir import GenericConst

from optifx_tvm.extract_elementwise import (
    ELEMENTWISE_OPS,
    NotFusible,
    element_steps,
    operand_count,
)
from optifx_tvm.graph import DTYPES, Step, TensorSpec, Window


@dataclass(frozen=True)
class Op:
    """One binding, understood. Its result bears its name."""

    name: str
    kind: str
    """As Node.op; "elementwise" is a single operator here."""
    spec: TensorSpec
    var: relax.Var
    value: relax.Expr
    reads: tuple[str, ...]
    """Tensors read: a region operator's input first, concat's parts in order."""
    source: str
    """Operator and variable of the model, for messages."""
    is_output: bool = False
    """Is the result visible outside the block?"""
    args: tuple[str | tuple[str, ...] | None, ...] = ()
    """Per argument of the call: the tensor (tuple: tensors) passed; None: copied as it is."""
    weight: str | None = None
    window: Window = Window()
    groups: int = 1
    steps: tuple[Step, ...] = ()
    """Element-wise only. An int is the result of the operator's own k-th step, from 1."""


@dataclass
class Block:
    """The operators of one block, in order, and what they read from outside it."""

    ops: list[Op] = field(default_factory=list)
    values: dict[str, relax.Expr] = field(default_factory=dict)
    """Tensor -> variable or constant."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    """Weights and per-channel constants."""


def op_name(expr: relax.Expr) -> str:
    """Name of the operator called ("relax.nn.conv2d"), "" for anything else."""
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, tvm.ir.Op):
        return ""
    return expr.op.name


def static_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """Shape of a tensor, None if it is not a tensor of known static shape."""
    shape = getattr(expr.ty, "shape", None) if isinstance(expr.ty, relax.TensorType) else None
    if shape is None or not isinstance(shape, relax.ShapeExpr):
        return None
    dims = [int(d) for d in shape.values if isinstance(d, tvm.tirx.IntImm)]
    return tuple(dims) if len(dims) == len(shape.values) else None


def _is_channel(shape: Sequence[int], channels: int) -> bool:
    """Does such a tensor broadcast along the channels of an NHWC tensor only?"""
    return 1 <= len(shape) <= 4 and shape[-1] == channels and math.prod(shape) == channels


def parse_block(block: relax.DataflowBlock, function_params: Iterable[relax.Var] = ()) -> Block:
    """The operators of ``block``; ``function_params`` may serve as weights and constants."""
    return _Parser(block, function_params).block


class _Parser:
    def __init__(self, block: relax.DataflowBlock, function_params: Iterable[relax.Var]) -> None:
        self.block = Block()
        self._names: set[str] = set()
        self._outside: dict[tuple[relax.Expr, str], str] = {}
        self._inside: dict[relax.Var, Op] = {}
        self._function_params = set(function_params)
        self._weight_side = _weight_side(block)
        # Results take their names first: a name belongs to its variable wherever it can.
        names = {binding.var: self._unique(binding.var.name) for binding in block.bindings}
        for binding in block.bindings:
            name = names[binding.var]
            op = self._fusible(binding, name) or self._opaque(binding, name)
            self._inside[binding.var] = op
            self.block.ops.append(op)
            self.block.specs[op.name] = op.spec
            self.block.values[op.name] = binding.var

    def _unique(self, hint: str) -> str:
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def _opaque(self, binding: relax.Binding, name: str) -> Op:
        var = binding.var
        reads = [
            self._inside[v].name
            for v in relax.analysis.free_vars(binding.value)
            if v in self._inside
        ]
        dtype = str(var.ty.dtype) if isinstance(var.ty, relax.TensorType) else ""
        return Op(
            name=name,
            kind="opaque",
            spec=TensorSpec(name, static_shape(var) or (), dtype),
            var=var,
            value=binding.value,
            reads=tuple(dict.fromkeys(reads)),
            source=_source(binding),
            is_output=not isinstance(var, relax.DataflowVar),
        )

    def _fusible(self, binding: relax.Binding, name: str) -> Op | None:
        call, var = binding.value, binding.var
        parser = _PARSERS.get(op_name(call))
        shape = static_shape(var)
        if parser is None or not isinstance(binding, relax.VarBinding):
            return None
        if var in self._weight_side:
            return None
        if shape is None or len(shape) != 4 or str(var.ty.dtype) not in DTYPES or 0 in shape:
            return None
        try:
            fields = parser(self, call)
        except NotFusible:
            return None
        return Op(
            name=name,
            spec=TensorSpec(name, shape, str(var.ty.dtype)),
            var=var,
            value=call,
            source=_source(binding),
            is_output=not isinstance(var, relax.DataflowVar),
            **fields,
        )

    # What the operators read. Nothing is recorded before the whole operator is known to be fusible,
    # except a spare entry in `values`, which is harmless: extraction keeps what nodes read.

    def activation(self, expr: relax.Expr) -> str:
        """Name of a 4-D activation of known shape and supported dtype."""
        shape = static_shape(expr)
        if shape is None or len(shape) != 4 or 0 in shape or str(expr.ty.dtype) not in DTYPES:
            raise NotFusible
        if isinstance(expr, relax.Var) and expr in self._inside:
            if expr in self._weight_side:
                raise NotFusible
            return self._inside[expr].name
        if isinstance(expr, relax.Var | GenericConst):
            return self._from_outside(expr, "activation", shape)
        raise NotFusible

    def weight(self, expr: relax.Expr, dtype: str) -> tuple[str, tuple[int, ...]]:
        """Name and shape of a 4-D convolution weight: a constant, something from outside the
        block, or an opaque result."""
        shape = static_shape(expr)
        if shape is None or len(shape) != 4 or 0 in shape or str(expr.ty.dtype) != dtype:
            raise NotFusible
        return self._parameter(expr, "weight", shape), shape

    def channel(self, expr: relax.Expr, channels: int) -> str | None:
        """Name of a per-channel constant, None if ``expr`` is something else."""
        shape = static_shape(expr)
        if shape is None or not _is_channel(shape, channels):
            return None
        if isinstance(expr, GenericConst) or expr in self._function_params or shape == (channels,):
            return self._parameter(expr, "channel", (channels,))
        return None

    def _parameter(self, expr: relax.Expr, role: str, shape: tuple[int, ...]) -> str:
        if isinstance(expr, relax.Var) and expr in self._inside:
            op = self._inside[expr]
            if op.kind != "opaque":
                raise NotFusible
            name = op.name
        elif isinstance(expr, relax.Var | GenericConst):
            name = self._from_outside(expr, role, shape)
        else:
            raise NotFusible
        if name not in self.block.params:
            self.block.params.append(name)
        return name

    def _from_outside(self, expr: relax.Expr, role: str, shape: tuple[int, ...]) -> str:
        # One name per role: a tensor is either an activation or a parameter of the graph.
        if (expr, role) not in self._outside:
            name = self._unique(expr.name if isinstance(expr, relax.Var) else "const")
            self._outside[expr, role] = name
            self.block.specs[name] = TensorSpec(name, shape, str(expr.ty.dtype))
            self.block.values[name] = expr
        return self._outside[expr, role]


def _source(binding: relax.Binding) -> str:
    value = binding.value
    what = op_name(value).removeprefix("relax.")
    if not what and isinstance(value, relax.Call) and isinstance(value.op, relax.GlobalVar):
        what = value.op.name_hint
    return f"{what or type(value).__name__} {binding.var.name}"


def _weight_side(block: relax.DataflowBlock) -> set[relax.Var]:
    """Variables that only serve to make convolution weights (casts, folded scales): 4-D tensors,
    but no activations."""
    uses: dict[relax.Var, list[relax.Var | None]] = {}
    for binding in block.bindings:
        call = binding.value
        convolution = op_name(call) in ("relax.nn.conv2d", "relax.nn.conv2d_transpose")
        for var in relax.analysis.free_vars(call):
            is_data = not convolution or var.same_as(call.args[0])
            uses.setdefault(var, []).append(binding.var if is_data else None)
    found: set[relax.Var] = set()
    for binding in reversed(block.bindings):
        readers = uses.get(binding.var, [])
        only_weights = (
            op_name(binding.value) in ELEMENTWISE_OPS
            and isinstance(binding.var, relax.DataflowVar)
            and readers
            and all(r is None or r in found for r in readers)
        )
        if only_weights or any(r is None for r in readers):
            found.add(binding.var)
    return found


def _pair(values: Sequence) -> tuple[int, int]:
    if len(values) != 2:
        raise NotFusible
    return int(values[0]), int(values[1])


def _padding(values: Sequence) -> tuple[int, int, int, int]:
    if len(values) != 4:
        raise NotFusible
    return int(values[0]), int(values[1]), int(values[2]), int(values[3])


def _conv2d(parser: _Parser, call: relax.Call) -> dict:
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    if layouts != ("NHWC", "OHWI", "NHWC"):
        raise NotFusible
    data = parser.activation(call.args[0])
    weight, (_, kh, kw, _) = parser.weight(call.args[1], str(call.args[0].ty.dtype))
    window = Window(
        kernel=(kh, kw),
        strides=_pair(attrs.strides),
        dilation=_pair(attrs.dilation),
        padding=_padding(attrs.padding),
    )
    return _convolution("conv2d", data, weight, window, int(attrs.groups))


def _conv2d_transpose(parser: _Parser, call: relax.Call) -> dict:
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    if layouts != ("NHWC", "IHWO", "NHWC"):
        raise NotFusible
    data = parser.activation(call.args[0])
    weight, (_, kh, kw, _) = parser.weight(call.args[1], str(call.args[0].ty.dtype))
    top, left, bottom, right = _padding(attrs.padding)
    more_rows, more_cols = _pair(attrs.output_padding)
    window = Window(
        kernel=(kh, kw),
        strides=_pair(attrs.strides),
        dilation=_pair(attrs.dilation),
        # output_padding: as many rows and columns less are cropped, even beyond the last tap.
        padding=(top, left, bottom - more_rows, right - more_cols),
    )
    return _convolution("conv2d_transpose", data, weight, window, int(attrs.groups))


def _convolution(kind: str, data: str, weight: str, window: Window, groups: int) -> dict:
    return {
        "kind": kind,
        "reads": (data, weight),
        "args": (data, weight),
        "weight": weight,
        "window": window,
        "groups": groups,
    }


def _pool2d(kind: str) -> Callable[[_Parser, relax.Call], dict]:
    def parse(parser: _Parser, call: relax.Call) -> dict:
        attrs = call.attrs
        if (attrs.layout, attrs.out_layout) != ("NHWC", "NHWC"):
            raise NotFusible
        # ceil_mode needs no field: the result's shape is known, positions past the padding read
        # as padding.
        window = Window(
            kernel=_pair(attrs.pool_size),
            strides=_pair(attrs.strides),
            dilation=_pair(attrs.dilation),
            padding=_padding(attrs.padding),
            count_include_pad=kind == "avg_pool2d" and bool(attrs.count_include_pad),
        )
        data = parser.activation(call.args[0])
        return {"kind": kind, "reads": (data,), "args": (data,), "window": window}

    return parse


def _global_pool(parser: _Parser, call: relax.Call) -> dict:
    attrs = call.attrs
    if op_name(call) == "relax.mean":
        axes = sorted(int(a) % 4 for a in attrs.axis or ())
        if axes != [1, 2] or not attrs.keepdims:
            raise NotFusible
    elif (attrs.layout, attrs.out_layout) != ("NHWC", "NHWC") or tuple(
        int(d) for d in attrs.output_size or ()
    ) != (1, 1):
        raise NotFusible
    data = parser.activation(call.args[0])
    height, width = parser.block.specs[data].shape[1:3]
    window = Window(kernel=(height, width))
    return {"kind": "avg_pool2d", "reads": (data,), "args": (data,), "window": window}


def _concat(parser: _Parser, call: relax.Call) -> dict:
    parts = call.args[0]
    if not isinstance(parts, relax.Tuple) or call.attrs.axis is None:
        raise NotFusible
    if int(call.attrs.axis) not in (3, -1):
        raise NotFusible
    names = tuple(parser.activation(part) for part in parts.fields)
    return {"kind": "concat", "reads": names, "args": (names,)}


def _elementwise(parser: _Parser, call: relax.Call) -> dict:
    name = op_name(call)
    shape = static_shape(call)
    assert shape is not None
    args: list[str | None] = []
    operands: list[str | float] = []
    for arg in call.args[: operand_count(name)]:
        operand = _operand(parser, arg, shape)
        operands.append(operand)
        args.append(operand if isinstance(operand, str) else None)
    args += [None] * (len(call.args) - len(args))
    reads = tuple(dict.fromkeys(a for a in args if a is not None))
    if all(parser.block.specs[t].shape != shape for t in reads):
        raise NotFusible
    return {
        "kind": "elementwise",
        "reads": reads,
        "args": tuple(args),
        "steps": element_steps(name, call, operands),
    }


def _operand(parser: _Parser, expr: relax.Expr, shape: tuple[int, ...]) -> str | float:
    """A scalar constant's value, or the name of a tensor: of ``shape``, (C,) or (N, 1, 1, C)."""
    own = static_shape(expr)
    if own is None:
        raise NotFusible
    if isinstance(expr, GenericConst) and math.prod(own) == 1 and len(own) <= 4:
        return float(expr.value.numpy().reshape(()))
    if own != shape or isinstance(expr, GenericConst):
        channel = parser.channel(expr, shape[3])
        if channel is not None:
            return channel
    if own not in (shape, (shape[0], 1, 1, shape[3])):
        raise NotFusible
    return parser.activation(expr)


_PARSERS: Mapping[str, Callable[[_Parser, relax.Call], dict]] = {
    "relax.nn.conv2d": _conv2d,
    "relax.nn.conv2d_transpose": _conv2d_transpose,
    "relax.nn.max_pool2d": _pool2d("max_pool2d"),
    "relax.nn.avg_pool2d": _pool2d("avg_pool2d"),
    "relax.nn.adaptive_avg_pool2d": _global_pool,
    "relax.mean": _global_pool,
    "relax.concat": _concat,
    **dict.fromkeys(ELEMENTWISE_OPS, _elementwise),
}
