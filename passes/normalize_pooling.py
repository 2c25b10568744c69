"""Writes every two-dimensional pooling as max_pool2d or avg_pool2d with a window.

``adaptive_avg_pool2d`` (where the output size divides the image) and ``mean`` or ``max`` over the
two spatial axes become a pooling whose window is the image or a block of it. Runs after
``CleanUpImports``, before ``DenseToConv`` and ``ConvertToNHWC``. The axes of a bare ``mean`` or
``max`` say nothing of the layout: axes (2, 3) are read as NCHW, (1, 2) as NHWC.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    ints,
    op_name,
    rewrite_functions,
    static_shape,
)

_LONGEST_SUM = 256
"""Positions that are averaged in one go: float32 loses digits in longer sums."""

_SPATIAL = {"NCHW": (2, 3), "NHWC": (1, 2)}


class _Pooling(DataflowRewriter):
    def rewrite_call(self, call: Call, source: Call) -> Expr:
        name = op_name(call)
        if name == "relax.nn.adaptive_avg_pool2d":
            return self._adaptive(call)
        if name in ("relax.mean", "relax.max"):
            return self._global(call)
        return call

    def _adaptive(self, call: Call) -> Expr:
        shape, layout = static_shape(call.args[0]), str(call.attrs.layout)
        if shape is None or layout not in _SPATIAL or call.attrs.out_layout != layout:
            return call
        image = [shape[axis] for axis in _SPATIAL[layout]]
        size = call.attrs.output_size
        target = image if size is None else list(ints(size)) * (2 // len(size))
        if any(extent % out for extent, out in zip(image, target, strict=True)):
            return call
        window = [extent // out for extent, out in zip(image, target, strict=True)]
        if window == [1, 1]:
            return call.args[0]
        return self._average(call.args[0], window, layout)

    def _average(self, data: Expr, window: list[int], layout: str) -> Expr:
        """The mean of each ``window``; of a large one the mean of its rows' means."""
        pool = partial(relax.op.nn.avg_pool2d, padding=(0, 0, 0, 0), layout=layout)
        height, width = window
        if height * width <= _LONGEST_SUM:
            return pool(data, window, strides=window)
        rows = self.emit(pool(data, [1, width], strides=[1, width]))
        return pool(rows, [height, 1], strides=[height, 1])

    def _global(self, call: Call) -> Expr:
        shape = static_shape(call.args[0])
        if shape is None or len(shape) != 4 or call.attrs.axis is None:
            return call
        axes = tuple(sorted(axis % 4 for axis in ints(call.attrs.axis)))
        layout = next((name for name, spatial in _SPATIAL.items() if spatial == axes), None)
        if layout is None:
            return call
        window = [shape[axis] for axis in axes]
        if op_name(call) == "relax.mean":
            pooled = self._average(call.args[0], window, layout)
        else:
            pooled = relax.op.nn.max_pool2d(
                call.args[0], window, strides=window, padding=(0, 0, 0, 0), layout=layout
            )
        if call.attrs.keepdims:
            return pooled
        flat = tuple(extent for axis, extent in enumerate(shape) if axis not in axes)
        return relax.op.reshape(self.emit(pooled), flat)


@tvm.transform.module_pass(opt_level=0, name="NormalizePooling")
class NormalizePooling:
    """Global and adaptive pooling as pooling with a window."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _Pooling)
