"""Undoes the roundabout ways in which importers write simple things.

Runs first: the other passes of ``CanonicalizeConv`` match what this one leaves. It assumes nothing.

=============================================  =========================================
import                                         after this pass
=============================================  =========================================
``dropout(x)[0]``                              x
``sum|max|min|mean(stack(broadcast_to(..)))``  a chain of add, maximum, minimum
reshape, squeeze, expand_dims, flatten chains  one reshape, or nothing
``permute_dims`` chains, no-op casts           one permute_dims, or nothing
``prelu`` with a constant slope                leakyrelu, or max(x, 0) + slope * min(x, 0)
``where(x > 0, x, x * slope)``                 the same
``maximum(x, 0)``, ``minimum(maximum(..))``    relu, clip
a constant left of a commutative operator      right of it
LRN's ``avg_pool3d`` over channels             shifted channel slices, added
operators on constants                         constants
=============================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    array_of,
    channel_constant,
    constant,
    dtype_of,
    ints,
    op_name,
    rewrite_functions,
    static_shape,
    tuple_fields,
)
from optifx_tvm.passes.fold_constants import fold_call
from optifx_tvm.passes.operators import channel_window_sum

_RESHAPES = (
    "relax.reshape",
    "relax.squeeze",
    "relax.expand_dims",
    "relax.flatten",
    "relax.nn.batch_flatten",
)
_COMMUTATIVE = ("relax.add", "relax.multiply", "relax.maximum", "relax.minimum")
_REDUCTIONS = {
    "relax.sum": relax.op.add,
    "relax.mean": relax.op.add,
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
}


def _scalar(expr: Expr) -> float | None:
    """Value of a constant whose elements are all the same."""
    array = array_of(expr)
    if array is None or array.size != 1:
        return None
    return float(array.reshape(-1)[0])


class _CleanUp(DataflowRewriter):
    def rewrite_call(self, call: Call, source: Call) -> Expr:
        call = self.normalized(call)
        folded = fold_call(call)
        if folded is not None:
            return folded
        name = op_name(call)
        rule = self._rules().get(name) if name else None
        replaced = rule(call) if rule is not None else None
        return call if replaced is None else replaced

    def rewrite_get_item(self, item: relax.TupleGetItem) -> Expr:
        value = item.tuple_value
        dropout = self.call_of(value, "relax.nn.dropout")
        if dropout is not None and item.index == 0:
            return dropout.args[0]
        fields = self._fields_of(value)
        return item if fields is None else fields[item.index]

    def _rules(self) -> dict[str, Callable[[Call], Expr | None]]:
        return {
            **dict.fromkeys(_REDUCTIONS, self._unstack),
            **dict.fromkeys(_RESHAPES, self._reshape),
            **dict.fromkeys(_COMMUTATIVE, self._commute),
            "relax.broadcast_to": self._drop_if_same_type,
            "relax.astype": self._drop_if_same_type,
            "relax.permute_dims": self._permute,
            "relax.nn.prelu": self._prelu,
            "relax.where": self._where,
            "relax.nn.avg_pool3d": self._channel_window,
        }

    def _unstack(self, call: Call) -> Expr | None:
        name = op_name(call) or ""
        stack = self.call_of(call.args[0], "relax.stack")
        if stack is None or call.attrs.axis is None or call.attrs.keepdims:
            return None
        if ints(call.attrs.axis) != (0,) or int(stack.attrs.axis or 0) != 0:
            return None
        fields = self._fields_of(stack.args[0])
        if fields is None:
            return None
        parts = [self._unbroadcast(field) for field in fields]
        shapes = [static_shape(part) for part in parts]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or np.broadcast_shapes(*known) != static_shape(call):
            parts = fields
        result = parts[0]
        for part in parts[1:-1]:
            result = self.emit(_REDUCTIONS[name](result, part))
        if len(parts) > 1:
            result = _REDUCTIONS[name](result, parts[-1])
        if name != "relax.mean":
            return result
        share = constant(np.array(1 / len(parts)), dtype_of(call))
        return relax.op.multiply(self.emit(result), share)

    def _fields_of(self, expr: Expr) -> list[Expr] | None:
        fields = tuple_fields(expr)
        return tuple_fields(self.value_of(expr)) if fields is None else fields

    def _unbroadcast(self, expr: Expr) -> Expr:
        broadcast = self.call_of(expr, "relax.broadcast_to")
        return expr if broadcast is None else broadcast.args[0]

    def _reshape(self, call: Call) -> Expr | None:
        shape = static_shape(call)
        origin = call.args[0]
        inner = self.call_of(origin, *_RESHAPES)
        if inner is not None and static_shape(inner.args[0]) is not None:
            origin = inner.args[0]
        if shape is None or static_shape(origin) is None:
            return None
        if static_shape(origin) == shape:
            return origin
        if origin.same_as(call.args[0]) and op_name(call) == "relax.reshape":
            return None
        return relax.op.reshape(origin, shape)

    def _drop_if_same_type(self, call: Call) -> Expr | None:
        x = call.args[0]
        same = static_shape(x) == static_shape(call) and static_shape(x) is not None
        return x if same and dtype_of(x) == dtype_of(call) else None

    def _permute(self, call: Call) -> Expr | None:
        origin, axes = call.args[0], _permutation(call)
        inner = self.call_of(origin, "relax.permute_dims")
        if inner is not None:
            first = _permutation(inner)
            origin, axes = inner.args[0], [first[axis] for axis in axes]
        if axes == sorted(axes):
            return origin
        return None if inner is None else relax.op.permute_dims(origin, axes)

    def _commute(self, call: Call) -> Expr | None:
        left, right = call.args
        op = relax.op
        name = op_name(call)
        if isinstance(left, GenericConst) and not isinstance(right, GenericConst):
            swapped = self.normalized(Call(call.op, [right, left], call.attrs))
            replaced = self._commute(swapped)
            return swapped if replaced is None else replaced
        value = _scalar(right)
        if value is None or static_shape(left) != static_shape(call):
            return None
        if name == "relax.maximum" and value == 0.0 and "float" in dtype_of(call):
            return op.nn.relu(left)
        if name == "relax.minimum" and np.isfinite(value):
            return self._clip(left, value)
        return None

    def _clip(self, x: Expr, high: float) -> Expr | None:
        relu = self.call_of(x, "relax.nn.relu")
        if relu is not None and high >= 0:
            return relax.op.clip(relu.args[0], 0.0, high)
        lower = self.call_of(x, "relax.maximum")
        low = None if lower is None else _scalar(lower.args[1])
        if lower is None or low is None or not low <= high or not np.isfinite(low):
            return None
        if static_shape(lower.args[0]) != static_shape(lower):
            return None
        return relax.op.clip(lower.args[0], low, high)

    def _prelu(self, call: Call) -> Expr | None:
        x, slope = call.args[0], array_of(call.args[1])
        shape = static_shape(x)
        if slope is None or shape is None:
            return None
        axis = int(call.attrs.axis) % len(shape)
        return self._leaky(x, channel_constant(slope, len(shape), axis, dtype_of(x)))

    def _where(self, call: Call) -> Expr | None:
        condition, x, scaled = call.args
        positive = self.call_of(condition, "relax.greater")
        product = self.call_of(scaled, "relax.multiply")
        if positive is None or product is None or _scalar(positive.args[1]) != 0.0:
            return None
        if not (positive.args[0].same_as(x) and product.args[0].same_as(x)):
            return None
        if static_shape(x) != static_shape(call) or "float" not in dtype_of(x):
            return None
        slope = product.args[1]
        return self._leaky(x, slope) if isinstance(slope, GenericConst) else None

    def _leaky(self, x: Expr, slopes: GenericConst) -> Expr:
        values, dtype = slopes.value.numpy(), dtype_of(x)
        if np.unique(values).size == 1:
            return relax.op.nn.leakyrelu(x, float(values.reshape(-1)[0]))
        zero = constant(np.array(0.0), dtype)
        negative = self.emit(relax.op.minimum(x, zero))
        scaled = self.emit(relax.op.multiply(negative, slopes))
        return relax.op.add(self.emit(relax.op.nn.relu(x)), scaled)

    def _channel_window(self, call: Call) -> Expr | None:
        attrs = call.attrs
        shape = static_shape(call.args[0])
        pads = ints(attrs.padding)
        pads = pads if len(pads) == 6 else pads * (6 // len(pads))
        size = ints(attrs.pool_size)
        if shape is None or attrs.layout != "NCDHW" or shape[1] != 1 or size[1:] != (1, 1):
            return None
        if ints(attrs.strides) != (1, 1, 1) or ints(attrs.dilation) != (1, 1, 1):
            return None
        before, after = pads[0], pads[3]
        if (pads[1], pads[2], pads[4], pads[5]) != (0, 0, 0, 0):
            return None
        if (before or after) and not attrs.count_include_pad:
            return None
        batch, _, channels, height, width = shape
        image = call.args[0]
        inner = self.call_of(image, *_RESHAPES)
        if inner is not None and static_shape(inner.args[0]) == (batch, channels, height, width):
            image = inner.args[0]
        else:
            image = self.emit(relax.op.reshape(image, (batch, channels, height, width)))
        total = channel_window_sum(self.emit, image, size[0], before, after)
        mean = relax.op.multiply(total, constant(np.array(1 / size[0]), dtype_of(call)))
        out = static_shape(call)
        assert out is not None
        return relax.op.reshape(self.emit(mean), out)


def _permutation(call: Call) -> list[int]:
    rank = call.args[0].ty.ndim
    axes = call.attrs.axes
    return [a % rank for a in ints(axes)] if axes is not None else list(range(rank))[::-1]


@tvm.transform.module_pass(opt_level=0, name="CleanUpImports")
class CleanUpImports:
    """Simplifies what importers leave; see the table above."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _CleanUp)
