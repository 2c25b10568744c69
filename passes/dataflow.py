"""What the canonicalisation passes share: one walk over dataflow blocks, and small look-ups.

A pass subclasses ``DataflowRewriter`` and overrides ``rewrite_call`` (and, rarely,
``rewrite_get_item``). The walk rebuilds every dataflow block binding by binding; everything outside
dataflow blocks is kept as it is, because a block's output variables keep their identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

Expr = relax.Expr
Var = relax.Var
Call = relax.Call


def op_name(expr: Any) -> str | None:
    """Name of the operator that ``expr`` calls ("relax.nn.conv2d"), None for anything else."""
    return getattr(expr.op, "name", None) if isinstance(expr, Call) else None


def static_shape(expr: Expr) -> tuple[int, ...] | None:
    """Shape of a tensor as integers; None when it is symbolic, unknown, or not a tensor's."""
    shape: Any = getattr(expr.ty, "shape", None) if isinstance(expr.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return None
    dims = []
    for dim in shape.values:
        if not isinstance(dim, tvm.tirx.IntImm):
            return None
        dims.append(int(dim))
    return tuple(dims)


def dtype_of(expr: Expr) -> str:
    """Element type of a tensor ("float32"); empty for anything else."""
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) else ""


def array_of(expr: Any) -> np.ndarray | None:
    """Value of a constant, None for anything else."""
    return expr.value.numpy() if isinstance(expr, GenericConst) else None


def tuple_fields(expr: Any) -> list[Expr] | None:
    """Elements of a tuple, None for anything else."""
    return list(expr.fields) if isinstance(expr, relax.Tuple) else None


def constant(array: np.ndarray, dtype: str | None = None) -> GenericConst:
    """A Relax constant that holds ``array`` (cast to ``dtype``), C-contiguous."""
    array = np.ascontiguousarray(array, dtype=dtype).reshape(np.shape(array))
    return relax.const(array, str(array.dtype))  # without a type it narrows 64-bit numbers


def ints(values: Iterable) -> tuple[int, ...]:
    """Integer attribute values as a tuple of Python integers."""
    return tuple(int(v) for v in values)


def four_sided(padding: Sequence) -> tuple[int, int, int, int]:
    """A 1-, 2- or 4-element padding attribute as (top, left, bottom, right)."""
    pads = ints(padding)
    if len(pads) == 1:
        pads = pads * 4
    elif len(pads) == 2:
        pads = pads * 2
    top, left, bottom, right = pads
    return top, left, bottom, right


def per_channel(array: np.ndarray, rank: int, axis: int, channels: int) -> np.ndarray | None:
    """``array`` as a (channels,) vector when, broadcast to ``rank`` dimensions, it varies along
    ``axis`` alone; None when it does not."""
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(extent != 1 for i, extent in enumerate(shape) if i != axis):
        return None
    if shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(array.reshape(-1), (channels,))


def channel_constant(vector: np.ndarray, rank: int, axis: int, dtype: str) -> GenericConst:
    """A (C,) vector as a constant of ``rank`` dimensions that varies along ``axis``."""
    shape = [1] * rank
    shape[axis] = len(vector)
    return constant(np.asarray(vector).reshape(shape), dtype)


def count_uses(func: relax.Function) -> Counter[Var]:
    """How often each variable is read in ``func`` (as an argument, in a tuple, or returned)."""
    uses: Counter[Var] = Counter()

    def read(expr: Expr) -> None:
        if isinstance(expr, Var):
            uses[expr] += 1
        elif isinstance(expr, Call):
            for arg in expr.args:
                read(arg)
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                read(field)
        elif isinstance(expr, relax.TupleGetItem):
            read(expr.tuple_value)

    body = func.body
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            for binding in block.bindings:
                read(binding.value)
        read(body.body)
    return uses


def bound_values(func: relax.Function) -> dict[Var, Expr]:
    """What each variable that ``func`` binds is bound to."""
    body = func.body
    blocks = body.blocks if isinstance(body, relax.SeqExpr) else []
    return {binding.var: binding.value for block in blocks for binding in block.bindings}


class DataflowRewriter:
    """Rebuilds the dataflow blocks of one function.

    ``rewrite_call(call, source)`` gets a call whose arguments are already the new ones, and the
    original call; it returns what the variable is bound to instead (a call to be emitted, a
    variable or a constant), or ``call`` itself.
    """

    def __init__(self, mod: tvm.IRModule, func: relax.Function) -> None:
        self.func = func
        self.builder = relax.BlockBuilder(mod)
        self.source_uses = count_uses(func)
        self.source_values = bound_values(func)
        self._mapped: dict[Var, Expr] = {}
        self._values: dict[Var, Expr] = {}
        self._uses: Counter[Var] = Counter()
        self._hint = ""

    def run(self) -> relax.Function:
        """The rewritten function, without the bindings that nothing reads any more."""
        body = self.func.body
        if not isinstance(body, relax.SeqExpr):
            return self.func
        self.builder.begin_scope(list(self.func.params))
        blocks = [
            self._block(block) if isinstance(block, relax.DataflowBlock) else block
            for block in body.blocks
        ]
        self.builder.end_scope()
        result = self.rewrite_result(body.body)
        rebuilt = relax.Function(
            self.func.params,
            relax.SeqExpr(blocks, result),
            ret_ty=self.result_type(result),
            is_pure=self.func.is_pure,
            attrs=self.func.attrs,
        )
        return relax.analysis.remove_all_unused(rebuilt)

    def rewrite_call(self, call: Call, source: Call) -> Expr:
        """Hook: what to bind instead of ``call``."""
        return call

    def rewrite_get_item(self, item: relax.TupleGetItem) -> Expr:
        """Hook: what to bind instead of a tuple element."""
        return item

    def rewrite_result(self, result: Expr) -> Expr:
        """Hook: the function's result; only a pass that changes output types needs it."""
        return result

    def result_type(self, result: Expr) -> tvm.ir.Type:
        """Hook: the function's return type."""
        return self.func.ret_ty

    def bind(self, var: Var, value: Expr) -> None:
        """Binds the source variable ``var`` to ``value`` in the new block."""
        if value.same_as(self.source_values[var]) and not isinstance(value, Var):
            # Unchanged: kept with its variable, which spares inferring its type again.
            self.builder.emit_normalized(relax.VarBinding(var, value))
            self._values[var] = value
            self.map(var, var)
        elif isinstance(var, relax.DataflowVar):
            if isinstance(value, Var | GenericConst):
                self.map(var, value)
            else:
                self.map(var, self.emit(value))
        else:
            value = self.builder.normalize(value)
            self.builder.emit_normalized(relax.VarBinding(var, value))
            self._values[var] = value
            self.map(var, var)

    def map(self, var: Var, value: Expr) -> None:
        """Lets later readers of the source variable ``var`` read ``value``."""
        self._mapped[var] = value
        if isinstance(value, Var):
            self._uses[value] += self.source_uses[var]

    def emit(self, value: Expr) -> Var:
        """Appends a binding to the new block and returns its variable."""
        var = self.builder.emit(value, self._hint)
        self._values[var] = value
        return var

    def normalized(self, call: Call) -> Call:
        """``call`` with its type inferred (an operator on leaves stays the one call it is)."""
        if isinstance(call.ty, relax.TensorType | relax.TupleType):
            return call
        result = self.builder.normalize(call)
        assert isinstance(result, Call), f"{op_name(call)} did not normalise to a call"
        return result

    def new(self, expr: Expr) -> Expr:
        """The new expression for a source variable (or a tuple of them); leaves as they are."""
        if isinstance(expr, Var):
            return self._mapped.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return self.tuple_of(expr, [self.new(field) for field in expr.fields])
        return expr

    def value_of(self, expr: Expr) -> Expr | None:
        """What a variable of the new block is bound to; None for parameters and non-variables."""
        return self._values.get(expr) if isinstance(expr, Var) else None

    def call_of(self, expr: Expr, *names: str) -> Call | None:
        """The call that a variable of the new block is bound to, if its operator is in ``names``
        (any operator when none is given)."""
        value = self.value_of(expr)
        if not isinstance(value, Call):
            return None
        return value if not names or op_name(value) in names else None

    def used_once(self, expr: Expr) -> bool:
        """True when at most one binding of the source read what the new ``expr`` replaces, and
        nothing outside the block can read it."""
        return isinstance(expr, relax.DataflowVar) and self._uses[expr] <= 1

    def _block(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        self.builder._begin_dataflow_block()
        for binding in block.bindings:
            self._binding(binding)
        return self.builder._end_block()

    def _binding(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        self._hint = var.name
        if isinstance(binding, relax.MatchCast):
            new_var = relax.DataflowVar(var.name, binding.ty)
            if not isinstance(var, relax.DataflowVar):
                new_var = var
            self.builder.emit_normalized(relax.MatchCast(new_var, self.new(value), binding.ty))
            self.map(var, new_var)
        elif isinstance(value, Call):
            self.bind(var, self.rewrite_call(self.renewed(value), value))
        elif isinstance(value, relax.TupleGetItem):
            source = self.new(value.tuple_value)
            kept = source.same_as(value.tuple_value)
            item = value if kept else relax.TupleGetItem(source, value.index)
            self.bind(var, self.rewrite_get_item(item))
        else:
            self.bind(var, self.new(value))

    def renewed(self, call: Call) -> Call:
        """``call`` on the new arguments; the same object when none of them changed."""
        return self.with_args(call, [self.new(arg) for arg in call.args])

    @staticmethod
    def with_args(call: Call, args: list[Expr]) -> Call:
        """``call`` on ``args``; the same object when they are the ones it has."""
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return call
        return Call(call.op, args, call.attrs, call.ty_args)

    @staticmethod
    def tuple_of(source: relax.Tuple, fields: list[Expr]) -> relax.Tuple:
        """A tuple of ``fields``; the same object as ``source`` when they are the ones it has."""
        if all(new.same_as(old) for new, old in zip(fields, source.fields, strict=True)):
            return source
        return relax.Tuple(fields)


def is_finished(func: relax.Function) -> bool:
    """Has another pass fused the function or given it to an external compiler?"""
    attrs = func.attrs
    return attrs is not None and any(key in attrs for key in ("Composite", "Primitive", "Codegen"))


def rewrite_functions(
    mod: tvm.IRModule, rewriter: type[DataflowRewriter], **options: bool
) -> tvm.IRModule:
    """A copy of ``mod`` in which ``rewriter`` has rebuilt every Relax function that has dataflow
    blocks; finished functions (``is_finished``) are kept."""
    result = mod.clone()
    for global_var, func in mod.functions_items():
        if not isinstance(func, relax.Function) or is_finished(func):
            continue
        result[global_var] = rewriter(mod, func, **options).run()
    return result
