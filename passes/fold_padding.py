"""Folds a spatial zero ``nn.pad`` into the convolution or average pooling that reads it.

Runs after ``CleanUpImports``. A pad before max pooling stays: it pads with zero, the pooling's own
padding with minus infinity. Before average pooling it is folded where the pooling has no padding
of its own, and the padding is then counted in the average. Transposed convolutions are left alone:
their padding crops.
"""

from __future__ import annotations

import tvm

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    four_sided,
    ints,
    op_name,
    rewrite_functions,
)
from optifx_tvm.passes.operators import with_padding


def _spatial_pads(pad: Call, layout: str) -> tuple[int, int, int, int] | None:
    """(top, left, bottom, right) of a constant zero pad that leaves batch and channels alone."""
    attrs = pad.attrs
    widths = ints(attrs.pad_width)
    if attrs.pad_mode != "constant" or float(attrs.pad_value) != 0.0 or len(widths) != 8:
        return None
    pairs = {axis: widths[2 * i : 2 * i + 2] for i, axis in enumerate(layout)}
    if any(pairs["N"]) or any(pairs["C"]) or min(widths) < 0:
        return None
    (top, bottom), (left, right) = pairs["H"], pairs["W"]
    return top, left, bottom, right


class _Padding(DataflowRewriter):
    def rewrite_call(self, call: Call, source: Call) -> Expr:
        name = op_name(call)
        if name not in ("relax.nn.conv2d", "relax.nn.avg_pool2d"):
            return call
        pad = self.call_of(call.args[0], "relax.nn.pad")
        attrs = call.attrs
        layout = str(attrs.data_layout if name == "relax.nn.conv2d" else attrs.layout)
        extra = _spatial_pads(pad, layout) if pad is not None and len(layout) == 4 else None
        if pad is None or extra is None:
            return call
        own = four_sided(attrs.padding)
        if name == "relax.nn.avg_pool2d" and (any(own) or attrs.ceil_mode):
            return call
        total = tuple(a + b for a, b in zip(own, extra, strict=True))
        return with_padding(call, pad.args[0], total)


@tvm.transform.module_pass(opt_level=0, name="FoldPadding")
class FoldPadding:
    """Zero padding becomes an attribute of the operator after it."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _Padding)
