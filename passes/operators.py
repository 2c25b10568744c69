"""Rebuilding the spatial operators with other layouts, paddings, weights or element types.

Everything not named by an argument is taken from the given call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tvm import relax

from optifx_tvm.passes.dataflow import Call, Expr, Var, four_sided, ints, op_name, static_shape

CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv2d_transpose")
POOLINGS = ("relax.nn.max_pool2d", "relax.nn.avg_pool2d")


def conv_like(
    call: Call,
    data: Expr,
    weight: Expr,
    *,
    padding: tuple[int, ...] | None = None,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
    out_dtype: str | None = None,
) -> Call:
    """The convolution ``call`` (conv2d or conv2d_transpose) on other operands; ``padding`` is
    always written as (top, left, bottom, right)."""
    attrs = call.attrs
    layout = data_layout or str(attrs.data_layout)
    own_dtype = None if attrs.out_dtype is None else str(attrs.out_dtype)
    options = {
        "strides": ints(attrs.strides),
        "padding": padding or four_sided(attrs.padding),
        "dilation": ints(attrs.dilation),
        "groups": int(attrs.groups),
        "data_layout": layout,
        "kernel_layout": kernel_layout or str(attrs.kernel_layout),
        "out_layout": layout,
        "out_dtype": out_dtype or own_dtype,
    }
    if op_name(call) == "relax.nn.conv2d":
        return relax.op.nn.conv2d(data, weight, **options)
    options["output_padding"] = ints(attrs.output_padding)
    return relax.op.nn.conv2d_transpose(data, weight, **options)


def pool_like(
    call: Call,
    data: Expr,
    *,
    padding: tuple[int, ...] | None = None,
    layout: str | None = None,
    count_include_pad: bool | None = None,
) -> Call:
    """The pooling ``call`` (max_pool2d or avg_pool2d) on another operand; ``padding`` is always
    written as (top, left, bottom, right)."""
    attrs = call.attrs
    counted = bool(attrs.count_include_pad) if count_include_pad is None else count_include_pad
    chosen = layout or str(attrs.layout)
    pool = {
        "relax.nn.max_pool2d": relax.op.nn.max_pool2d,
        "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d,
    }[op_name(call) or ""]
    return pool(
        data,
        ints(attrs.pool_size),
        strides=ints(attrs.strides),
        padding=padding or four_sided(attrs.padding),
        dilation=ints(attrs.dilation),
        ceil_mode=bool(attrs.ceil_mode),
        count_include_pad=counted,
        layout=chosen,
        out_layout=chosen,
    )


def with_padding(call: Call, data: Expr, padding: tuple[int, ...]) -> Call:
    """``call`` reading the unpadded ``data``, with ``padding`` as its own; an average pooling then
    counts the padded positions, as it did when they were data."""
    if op_name(call) in CONVOLUTIONS:
        return conv_like(call, data, call.args[1], padding=padding)
    return pool_like(call, data, padding=padding, count_include_pad=True)


def channel_window_sum(
    emit: Callable[[Expr], Var], x: Expr, size: int, before: int, after: int
) -> Expr:
    """Sums of ``size`` neighbouring channels of the NCHW tensor ``x``, zero-padded by ``before``
    and ``after`` channels: slices of one padded tensor, which fuse into a single kernel and, other
    than pooling over channels, can follow a change of layout."""
    shape = static_shape(x)
    assert shape is not None and len(shape) == 4
    padded = emit(relax.op.nn.pad(x, [0, 0, before, after, 0, 0, 0, 0]))
    count = shape[1] + before + after - size + 1
    slices = [
        emit(relax.op.strided_slice(padded, [1], [offset], [offset + count]))
        for offset in range(size)
    ]
    return functools.reduce(lambda total, part: emit(relax.op.add(total, part)), slices)
