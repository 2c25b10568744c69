"""Half precision with single-precision accumulation, on the NHWC form.

Runs last in ``CanonicalizeConv``. What reaches memory between kernels is float16, what happens
inside one is float32:

* convolutions read float16 data and weights (weights are cast here, with numpy) and give float32
  (``out_dtype``); element-wise operators compute in float32, on float32 constants;
* a value is cast to float16 where its element-wise chain ends: where a convolution, a pooling, a
  concatenation or another operator that moves data reads it, or where it feeds several chains.
  All its readers then start from the float16 value;
* pooling windows of more than 64 positions are averaged in float32;
* everything else (softmax, matmul, operators not known here) keeps float32;
* network inputs keep their type, outputs too unless ``keep_fp32_outputs`` is off.

Only float32 modules change; convolutions that are in float16 already are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst

from optifx_tvm.errors import OptionError
from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    Var,
    bound_values,
    constant,
    dtype_of,
    ints,
    op_name,
    rewrite_functions,
    tuple_fields,
)
from optifx_tvm.passes.layouts import ELEMENTWISE, VIEWS, named
from optifx_tvm.passes.operators import CONVOLUTIONS, conv_like

_HALF, _FULL = "float16", "float32"

_MOVERS = VIEWS | named(
    "concat", "split", "strided_slice", "nn.pad", "nn.max_pool2d", "nn.avg_pool2d"
)
"""Read and give float16: they move values, or lose little by it (a mean over a small window)."""

_LARGE_WINDOW = 64


def _window(call: Call) -> int:
    return int(np.prod(ints(call.attrs.pool_size)))


class _ToHalf(DataflowRewriter):
    def __init__(self, mod: tvm.IRModule, func: relax.Function, keep_fp32_outputs: bool) -> None:
        super().__init__(mod, func)
        blocks = func.body.blocks if isinstance(func.body, relax.SeqExpr) else []
        # Code outside the block reads its outputs with the types they have.
        self._keep_outputs = keep_fp32_outputs or len(blocks) != 1
        self._halves: dict[Var, Var] = {}
        self._ends = chain_ends(func, rounds_outputs=not self._keep_outputs)
        self._outputs: dict[Var, Var] = {}

    def rewrite_result(self, result: Expr) -> Expr:
        if isinstance(result, relax.Tuple):
            return relax.Tuple([self.rewrite_result(field) for field in result.fields])
        return self._outputs.get(result, result) if isinstance(result, Var) else result

    def result_type(self, result: Expr) -> tvm.ir.Type:
        if not self._outputs:
            return super().result_type(result)
        fields = tuple_fields(result)
        return result.ty if fields is None else relax.TupleType([f.ty for f in fields])

    def rewrite_call(self, call: Call, source: Call) -> Expr:
        name = op_name(call) or ""
        if name in CONVOLUTIONS and dtype_of(source.args[0]) == _FULL:
            data, weight = (self._half(arg) for arg in source.args)
            return conv_like(source, data, weight, out_dtype=_FULL)
        if name == "relax.astype" and _rounds(source):
            return self._half(source.args[0])
        if name in _MOVERS and self._moves_half(name, source):
            return self.with_args(source, [self._half(arg) for arg in source.args])
        return self.with_args(source, [self._full(arg) for arg in source.args])

    def bind(self, var: Var, value: Expr) -> None:
        if not isinstance(var, relax.DataflowVar):
            self._bind_output(var, value)
            return
        if isinstance(value, relax.Tuple):
            super().bind(var, relax.Tuple([self._full(f) for f in self._source_fields(var)]))
            return
        if value.same_as(self.source_values[var]) and not isinstance(value, Var):
            super().bind(var, value)
            new: Expr = var
        else:
            new = value if isinstance(value, Var | GenericConst) else self.emit(value)
        if var in self._ends and dtype_of(new) == _FULL:
            new = self._rounded(new)
        self.map(var, new)

    def _bind_output(self, var: Var, value: Expr) -> None:
        if isinstance(value, relax.Tuple):
            fields = self._source_fields(var)
            value = relax.Tuple([self._as_output(f, self.new(f)) for f in fields])
        else:
            value = self._as_output(var, value)
        value = self.builder.normalize(value)
        new = var
        if not tvm_ffi.structural_equal(var.ty, value.ty):
            new = self._outputs[var] = relax.Var(var.name, value.ty)
        self.builder.emit_normalized(relax.VarBinding(new, value))
        self._values[new] = value
        self.map(var, new)

    def _source_fields(self, var: Var) -> list[Expr]:
        source = self.source_values[var]
        assert isinstance(source, relax.Tuple)
        return list(source.fields)

    def _as_output(self, source: Expr, value: Expr) -> Expr:
        """``value``, the new form of ``source``, in the type that an output has."""
        wanted = dtype_of(source)
        if wanted == _FULL and not self._keep_outputs:
            wanted = _HALF
        value = self.builder.normalize(value)
        if not wanted or dtype_of(value) == wanted:
            return value
        leaf = value if isinstance(value, Var | GenericConst) else self.emit(value)
        return self._rounded(leaf) if wanted == _HALF else self.emit(relax.op.astype(leaf, wanted))

    def _moves_half(self, name: str, source: Call) -> bool:
        if name == "relax.nn.avg_pool2d" and _window(source) > _LARGE_WINDOW:
            return False
        data = source.args[0]
        fields = list(data.fields) if isinstance(data, relax.Tuple) else [data]
        floats = all(dtype_of(field) in (_FULL, _HALF) for field in fields)
        # A view of what stays float32 (a network input, logits) is no reason to round it.
        return floats and (name not in VIEWS or dtype_of(self.new(data)) == _HALF)

    def _half(self, source: Expr) -> Expr:
        """The float16 form of a source argument that is float32; others unchanged."""
        if isinstance(source, relax.Tuple):
            return self.tuple_of(source, [self._half(field) for field in source.fields])
        value = self.new(source)
        return self._rounded(value) if dtype_of(value) == _FULL else value

    def _rounded(self, value: Expr) -> Expr:
        """A float32 variable or constant in float16; each variable is cast once."""
        if isinstance(value, GenericConst):
            return constant(value.value.numpy(), _HALF)
        if value not in self._halves:
            self._halves[value] = self.emit(relax.op.astype(value, _HALF))
        return self._halves[value]

    def _full(self, source: Expr) -> Expr:
        """A source argument in the type it had. Each reader gets a cast of its own: a shared one
        would be a float32 copy of the whole value in memory."""
        if isinstance(source, relax.Tuple):
            return self.tuple_of(source, [self._full(field) for field in source.fields])
        value = self.new(source)
        if dtype_of(source) == _FULL and dtype_of(value) == _HALF:
            return self.emit(relax.op.astype(value, _FULL))
        return value


def chain_ends(func: relax.Function, rounds_outputs: bool) -> set[Var]:
    """The float32 variables of ``func`` to be rounded to float16 (see the module's text)."""

    def reads_half(value: Expr) -> bool:
        return _reads_half(value) or (rounds_outputs and op_name(value) is None)

    readers = _readers(func)
    ends: set[Var] = set()
    # Read as they are by an output or an operator that stays in float32, perhaps through a view.
    full: set[Var] = set()
    reached: dict[Var, frozenset[Var]] = {}
    for var, value in reversed(list(bound_values(func).items())):
        reached[var] = frozenset((var,))
        uses = readers.get(var, [])
        if not isinstance(var, relax.DataflowVar) and not rounds_outputs:
            full.add(var)
        if dtype_of(var) != _FULL or not isinstance(var, relax.DataflowVar):
            continue
        if any(
            user in full if _is_view(call) else not _passes_on(call) and not reads_half(call)
            for user, call in uses
        ):
            full.add(var)
            continue
        if any(reads_half(call) or (_is_view(call) and user in ends) for user, call in uses):
            ends.add(var)
            continue
        onward = frozenset().union(*(reached.get(user, frozenset()) for user, _ in uses))
        if len(onward) > 1 and not _is_view(value):
            ends.add(var)
        elif onward:
            reached[var] = onward
    return ends


def _readers(func: relax.Function) -> dict[Var, list[tuple[Var, Expr]]]:
    """Who reads each variable: the variables bound, and what they are bound to."""
    readers: dict[Var, list[tuple[Var, Expr]]] = {}
    for var, value in bound_values(func).items():
        args = list(value.args) if isinstance(value, Call) else [value]
        for arg in args:
            for leaf in arg.fields if isinstance(arg, relax.Tuple) else [arg]:
                if isinstance(leaf, relax.TupleGetItem):
                    leaf = leaf.tuple_value
                if isinstance(leaf, Var):
                    readers.setdefault(leaf, []).append((var, value))
    return readers


def _is_view(value: Expr) -> bool:
    return op_name(value) in VIEWS


def _passes_on(value: Expr) -> bool:
    return op_name(value) in ELEMENTWISE or _is_view(value)


def _rounds(value: Call) -> bool:
    return dtype_of(value) == _HALF and dtype_of(value.args[0]) == _FULL


def _reads_half(value: Expr) -> bool:
    name = op_name(value)
    if name in CONVOLUTIONS:
        return True
    if name == "relax.astype" and isinstance(value, Call):
        return _rounds(value)
    if name == "relax.nn.avg_pool2d" and isinstance(value, Call):
        return _window(value) <= _LARGE_WINDOW
    return name in _MOVERS - VIEWS


@tvm.transform.module_pass(opt_level=0, name="ConvertPrecision")
@dataclass(frozen=True)
class ConvertPrecision:
    """Convolutions in float16 with float32 accumulation."""

    dtype: str = "float16"
    """"float16"; "float32" changes nothing."""

    keep_fp32_outputs: bool = True
    """Whether network outputs keep their type; if not, float32 outputs become float16."""

    def __post_init__(self) -> None:
        if self.dtype not in (_HALF, _FULL):
            raise OptionError(f"dtype is {self.dtype!r}; supported are 'float32' and 'float16'")

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        if self.dtype == _FULL:
            return mod
        return rewrite_functions(mod, _ToHalf, keep_fp32_outputs=self.keep_fp32_outputs)
