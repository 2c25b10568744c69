"""Folds batch normalisation, and any per-channel scale or shift, into the convolution beside it.

Runs after ``CleanUpImports`` and ``FoldPadding``. With scale s = gamma / sqrt(var + eps) and shift
t = beta - mean * s, both in double precision:

=======================  ============================================  ========================
before                   after                                         legal when
=======================  ============================================  ========================
s * (conv(x, W) + b)+t   conv(x, s[o] W) + (s b + t)                   the convolution is read
                                                                       by nothing else
conv(s x, W)             conv(x, W s[i])                               always (zeros stay zero)
conv(x + t, W)           conv(x, W) + sum(W t)                         no padding, or t = 0; not
                                                                       transposed
=======================  ============================================  ========================

A batch normalisation that fits none (after a concatenation, say) becomes a multiply and an add by
constants along its axis: the prologue of a DenseNet layer. One in training mode, or with
parameters that are not constants, is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    array_of,
    channel_constant,
    constant,
    dtype_of,
    four_sided,
    op_name,
    per_channel,
    rewrite_functions,
    static_shape,
)
from optifx_tvm.passes.operators import CONVOLUTIONS, conv_like

_AFFINE = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")


@dataclass(frozen=True)
class _Affine:
    """``x * vector`` or ``x + vector``, the vector along the channel axis."""

    x: Expr
    is_scale: bool
    vector: np.ndarray
    """Shape (channels,), double precision."""


def _channel_axis(conv: Call) -> int:
    return str(conv.attrs.data_layout).index("C")


def _is_plain(conv: Call) -> bool:
    """A two-dimensional convolution with a constant weight, input and output in one layout."""
    attrs = conv.attrs
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    return (
        array_of(conv.args[1]) is not None
        and sorted(layouts[0]) == sorted("NCHW")
        and sorted(layouts[1]) == sorted("OIHW")
        and str(attrs.out_layout) == layouts[0]
        and static_shape(conv.args[0]) is not None
    )


def match_affine(call: Call, axis: int) -> _Affine | None:
    """``call`` as a scale or shift along ``axis`` by a constant; None when it is not one."""
    name = op_name(call)
    if name not in _AFFINE or "float" not in dtype_of(call):
        return None
    x, vector = call.args[0], array_of(call.args[1])
    if vector is None and name in ("relax.add", "relax.multiply"):
        x, vector = call.args[1], array_of(call.args[0])
    shape = static_shape(x)
    if vector is None or shape is None or shape != static_shape(call) or axis >= len(shape):
        return None
    channels = per_channel(vector, len(shape), axis, shape[axis])
    if channels is None:
        return None
    values = channels.astype("float64")
    if name == "relax.divide":
        if not values.all():
            return None
        values = 1.0 / values
    if name == "relax.subtract":
        values = -values
    return _Affine(x, name in ("relax.multiply", "relax.divide"), values)


def scale_outputs(conv: Call, scale: np.ndarray) -> np.ndarray:
    """The weight of ``conv`` with every output channel multiplied by its ``scale``."""
    weight, layout = array_of(conv.args[1]), str(conv.attrs.kernel_layout)
    assert weight is not None
    moved = np.moveaxis(weight, layout.index("O"), 0)
    if op_name(conv) == "relax.nn.conv2d":
        scaled = moved * scale.reshape((-1,) + (1,) * 3)
        return np.moveaxis(scaled, 0, layout.index("O")).astype(weight.dtype)
    return _scale_grouped(weight, scale, layout, int(conv.attrs.groups), outer="I", inner="O")


def scale_inputs(conv: Call, scale: np.ndarray) -> np.ndarray:
    """The weight of ``conv`` with every input channel multiplied by its ``scale``."""
    weight, layout = array_of(conv.args[1]), str(conv.attrs.kernel_layout)
    assert weight is not None
    if op_name(conv) == "relax.nn.conv2d_transpose":
        moved = np.moveaxis(weight, layout.index("I"), 0)
        scaled = moved * scale.reshape((-1,) + (1,) * 3)
        return np.moveaxis(scaled, 0, layout.index("I")).astype(weight.dtype)
    return _scale_grouped(weight, scale, layout, int(conv.attrs.groups), outer="O", inner="I")


def _scale_grouped(
    weight: np.ndarray, scale: np.ndarray, layout: str, groups: int, *, outer: str, inner: str
) -> np.ndarray:
    """Scales axis ``inner``, which holds the channels of one group, where ``outer`` runs over the
    groups: channel g * len(inner) + i belongs to the g-th part of ``outer``."""
    axes = layout.index(outer), layout.index(inner)
    moved = np.moveaxis(weight, axes, (0, 1))
    parts = moved.reshape((groups, moved.shape[0] // groups) + moved.shape[1:])
    scaled = parts * scale.reshape(groups, 1, -1, 1, 1)
    return np.moveaxis(scaled.reshape(moved.shape), (0, 1), axes).astype(weight.dtype)


class _FoldBatchNorm(DataflowRewriter):
    def rewrite_get_item(self, item: relax.TupleGetItem) -> Expr:
        norm = self.call_of(item.tuple_value, "relax.nn.batch_norm")
        if norm is None or item.index != 0 or norm.attrs.training:
            return item
        shape = static_shape(norm.args[0])
        parameters = [array_of(arg) for arg in norm.args[1:]]
        known = [p.astype("float64") for p in parameters if p is not None]
        if shape is None or len(known) != 4:
            return item
        gamma, beta, mean, variance = known
        scale = 1.0 / np.sqrt(variance + float(norm.attrs.epsilon))
        scale = scale * gamma if norm.attrs.scale else scale
        shift = (beta if norm.attrs.center else 0.0) - mean * scale
        axis = int(norm.attrs.axis) % len(shape)
        return self._shift(self._scale(norm.args[0], scale, axis), shift, axis)

    def rewrite_call(self, call: Call, source: Call) -> Expr:
        name = op_name(call)
        if name in CONVOLUTIONS:
            return self._absorb_input(self.normalized(call))
        if name in _AFFINE and any(array_of(arg) is not None for arg in call.args):
            return self._absorb_into_conv(self.normalized(call))
        return call

    def _absorb_into_conv(self, call: Call) -> Expr:
        """A scale or shift that follows a convolution (and perhaps its bias) or another scale."""
        for axis in (1, 3):
            affine = match_affine(call, axis)
            if affine is None or not self._merges(affine.x, axis):
                continue
            if affine.is_scale:
                return self._scale(affine.x, affine.vector, axis)
            if self._affine_of(affine.x, axis) is not None:
                return self._shift(affine.x, affine.vector, axis)
        return call

    def _merges(self, x: Expr, axis: int) -> bool:
        """True where a scale of ``x`` costs nothing: ``x`` is a convolution's result or a scale,
        perhaps shifted, and nothing else reads it."""
        if self._conv_of(x, axis) is not None:
            return True
        before = self._affine_of(x, axis)
        return before is not None and (before.is_scale or self._merges(before.x, axis))

    def _conv_of(self, x: Expr, axis: int) -> Call | None:
        """The convolution with channels on ``axis`` whose result ``x`` is, read by nothing else."""
        conv = self.call_of(x, *CONVOLUTIONS)
        if conv is None or not self.used_once(x) or not _is_plain(conv):
            return None
        return conv if _channel_axis(conv) == axis else None

    def _affine_of(self, x: Expr, axis: int) -> _Affine | None:
        """``x`` as a scale or shift by a constant that nothing else reads."""
        call = self.call_of(x, *_AFFINE)
        return match_affine(call, axis) if call is not None and self.used_once(x) else None

    def _scale(self, x: Expr, scale: np.ndarray, axis: int) -> Expr:
        """``x`` times ``scale`` along ``axis``."""
        conv = self._conv_of(x, axis)
        if conv is not None:
            weight = constant(scale_outputs(conv, scale), dtype_of(conv.args[1]))
            return conv_like(conv, conv.args[0], weight)
        before = self._affine_of(x, axis)
        if before is not None and before.is_scale:
            return self._scale(before.x, before.vector * scale, axis)
        if before is not None and self._merges(before.x, axis):
            return self._shift(self._scale(before.x, scale, axis), before.vector * scale, axis)
        shape = static_shape(x)
        assert shape is not None
        return relax.op.multiply(x, channel_constant(scale, len(shape), axis, dtype_of(x)))

    def _shift(self, x: Expr, shift: np.ndarray, axis: int) -> Expr:
        """``x`` plus ``shift`` along ``axis``, merged into a shift that ``x`` already ends with."""
        x = x if isinstance(x, relax.Var) else self.emit(x)
        before = self._affine_of(x, axis)
        if before is not None and not before.is_scale:
            x, shift = before.x, shift + before.vector
        if not shift.any():
            return x
        shape = static_shape(x)
        assert shape is not None
        return relax.op.add(x, channel_constant(shift, len(shape), axis, dtype_of(x)))

    def _absorb_input(self, conv: Call) -> Expr:
        """A scale or shift that comes before a convolution."""
        if not _is_plain(conv):
            return conv
        axis = _channel_axis(conv)
        affine = self._affine_of(conv.args[0], axis)
        if affine is None:
            return conv
        weight_dtype = dtype_of(conv.args[1])
        if affine.is_scale:
            weight = constant(scale_inputs(conv, affine.vector), weight_dtype)
            return self._absorb_input(self.normalized(conv_like(conv, affine.x, weight)))
        padded = any(four_sided(conv.attrs.padding)) and affine.vector.any()
        if padded or op_name(conv) == "relax.nn.conv2d_transpose":
            return conv
        layout = str(conv.attrs.kernel_layout)
        spread = np.moveaxis(scale_inputs(conv, affine.vector), layout.index("O"), 0)
        shift = spread.astype("float64").sum(axis=(1, 2, 3))
        inner = self._absorb_input(self.normalized(conv_like(conv, affine.x, conv.args[1])))
        return self._shift(inner, shift, axis)


@tvm.transform.module_pass(opt_level=0, name="FoldBatchNorm")
class FoldBatchNorm:
    """Batch normalisation, scales and shifts into convolution weights and biases."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _FoldBatchNorm)
