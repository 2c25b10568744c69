"""Conversion of the ONNX operators that TVM's importer gets wrong, or writes so that no pass could
read it (as calls of compiled kernels, or sums as stack and reduce).

A converter takes the node and the block builder and returns the Relax expression, or None to leave
the node, perhaps with changed attributes, to TVM. ``UnsupportedNode`` carries the reason why a
node is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax

from optifx_tvm.passes.dataflow import array_of, constant, dtype_of, static_shape
from optifx_tvm.passes.operators import channel_window_sum

Expr = relax.Expr


class UnsupportedNode(Exception):
    """The node is one that we refuse; the message says why."""


@dataclass(frozen=True)
class Node:
    """One ONNX node on its way to Relax."""

    op: str
    name: str
    inputs: list[Expr | None]
    attrs: dict
    """Attributes as TVM's importer parses them; converters may change them."""
    opset: int
    outputs: int
    """Number of outputs that are read."""

    def input(self, index: int) -> Expr | None:
        """An input, None when it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def text(self, key: str, default: str) -> str:
        """A string attribute."""
        value = self.attrs.get(key, default)
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of an input, which must be static."""
        value = self.inputs[index]
        shape = static_shape(value) if value is not None else None
        if shape is None:
            raise UnsupportedNode("the shape of its input is not known before it runs")
        return shape

    def array(self, index: int, what: str) -> np.ndarray | None:
        """Value of a constant input, None when it is left out."""
        value = self.input(index)
        if value is None:
            return None
        array = array_of(value)
        if array is None:
            raise UnsupportedNode(f"{what} are computed at run time; only constants are supported")
        return array


Converter = Callable[[Node, relax.BlockBuilder], "Expr | None"]


def _spatial(node: Node, key: str, default: int = 1) -> list[int]:
    rank = len(node.shape()) - 2
    return [int(v) for v in node.attrs.get(key, [default] * rank)]


def _kernel_shape(node: Node) -> list[int]:
    given = node.attrs.get("kernel_shape")
    return [int(v) for v in given] if given is not None else list(node.shape(1)[2:])


def _explicit_padding(node: Node) -> None:
    """Replaces auto_pad by pads, as the ONNX specification defines them."""
    mode = node.text("auto_pad", "NOTSET")
    node.attrs.pop("auto_pad", None)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        if mode == "VALID":
            node.attrs["pads"] = [0] * (2 * (len(node.shape()) - 2))
        return
    head, tail = [], []
    sizes = zip(
        node.shape()[2:],
        _kernel_shape(node),
        _spatial(node, "strides"),
        _spatial(node, "dilations"),
        strict=True,
    )
    for extent, kernel, stride, dilation in sizes:
        total = (math.ceil(extent / stride) - 1) * stride + (kernel - 1) * dilation + 1 - extent
        total = max(total, 0)
        small, large = total // 2, total - total // 2
        head.append(small if mode == "SAME_UPPER" else large)
        tail.append(large if mode == "SAME_UPPER" else small)
    node.attrs["pads"] = head + tail


def _conv(node: Node, builder: relax.BlockBuilder) -> None:
    _explicit_padding(node)


def _pool(node: Node, builder: relax.BlockBuilder) -> None:
    if node.outputs > 1:
        raise UnsupportedNode("its Indices output is read; only the pooled values are supported")
    _explicit_padding(node)


def _conv_transpose(node: Node, builder: relax.BlockBuilder) -> None:
    """Resolves output_shape and auto_pad to pads and output_padding."""
    wanted = node.attrs.pop("output_shape", None)
    if wanted is None:
        return
    mode = node.text("auto_pad", "NOTSET")
    node.attrs.pop("auto_pad", None)
    strides, dilations = _spatial(node, "strides"), _spatial(node, "dilations")
    extra = _spatial(node, "output_padding", 0)
    head, tail = [], []
    for i, (extent, kernel) in enumerate(zip(node.shape()[2:], _kernel_shape(node), strict=True)):
        reach = strides[i] * (extent - 1) + (kernel - 1) * dilations[i] + 1
        total = reach + extra[i] - int(wanted[i - len(strides)])
        if total < 0:
            extra[i] -= total
            total = 0
        if extra[i] >= max(strides[i], dilations[i]):
            raise UnsupportedNode(
                f"output_shape {[int(v) for v in wanted]} is larger than its input can fill"
            )
        small, large = total // 2, total - total // 2
        head.append(small if mode == "SAME_UPPER" else large)
        tail.append(large if mode == "SAME_UPPER" else small)
    node.attrs["pads"] = head + tail
    node.attrs["output_padding"] = extra


def _batch_norm(node: Node, builder: relax.BlockBuilder) -> None:
    if node.attrs.get("training_mode", 0) or node.outputs > 1:
        raise UnsupportedNode("it is in training mode; export the model for inference")
    if node.attrs.get("spatial", 1) == 0:
        raise UnsupportedNode("spatial=0 normalises each position by itself")


def _data_dependent(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    raise UnsupportedNode(
        "the shape of its output depends on the data; static shapes are supported"
    )


def _dropout(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    training = node.input(2)
    if training is not None:
        value = array_of(training)
        if value is None or bool(value):
            raise UnsupportedNode("it is in training mode; export the model for inference")
    if node.outputs > 1:
        raise UnsupportedNode("its mask output is read")
    return node.inputs[0]


def _shape(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    shape = static_shape(node.inputs[0]) if node.inputs[0] is not None else None
    if shape is None:
        return None
    start, end = int(node.attrs.get("start", 0)), node.attrs.get("end")
    return constant(np.array(shape[start : None if end is None else int(end)], dtype="int64"))


def _size(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    return constant(np.array(math.prod(node.shape()), dtype="int64"))


def _pairwise(operator: Callable[[Expr, Expr], Expr]) -> Converter:
    def convert(node: Node, builder: relax.BlockBuilder) -> Expr | None:
        inputs = [x for x in node.inputs if x is not None]
        return functools.reduce(lambda a, b: builder.emit(operator(a, b)), inputs)

    return convert


def _mean(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    total = _pairwise(relax.op.add)(node, builder)
    assert total is not None
    return relax.op.multiply(total, constant(np.array(1 / len(node.inputs)), dtype_of(total)))


def _legacy_binary(operator: Callable[[Expr, Expr], Expr]) -> Converter:
    """Before opset 7 the second operand was aligned to ``axis`` of the first."""

    def convert(node: Node, builder: relax.BlockBuilder) -> Expr | None:
        left, right = node.inputs[0], node.inputs[1]
        axis = node.attrs.get("axis")
        if node.opset >= 7 or axis is None or left is None or right is None:
            return None
        rank, shape = len(node.shape(0)), node.shape(1)
        trailing = rank - int(axis) % rank - len(shape)
        aligned = builder.emit(relax.op.reshape(right, shape + (1,) * trailing))
        return operator(left, aligned)

    return convert


def _clip(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    x = node.inputs[0]
    assert x is not None
    dtype = dtype_of(x)
    if node.opset < 11:
        low, high = (node.attrs.get(key) for key in ("min", "max"))
        bounds = [None if b is None else np.array(b) for b in (low, high)]
    else:
        bounds = [node.array(1, "bounds"), node.array(2, "bounds")]
    low, high = (None if b is None or np.isnan(b).any() else b.reshape(()) for b in bounds)
    if low is not None and high is not None and np.isfinite([low, high]).all() and low <= high:
        return relax.op.clip(x, float(low), float(high)) if "float" in dtype else None
    if low is not None:
        x = builder.emit(relax.op.maximum(x, constant(low, dtype)))
    return x if high is None else relax.op.minimum(x, constant(high, dtype))


_PAD_MODES = {
    "constant": "constant",
    "reflect": "reflect",
    "edge": "replicate",
    "wrap": "circular",
}


def _pad(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    rank, mode = len(node.shape()), node.text("mode", "constant")
    if node.opset < 11:
        given, value = node.attrs.get("pads", node.attrs.get("paddings")), node.attrs.get("value")
        pads = np.array(given)
    else:
        pads, value = node.array(1, "pads"), node.array(2, "padding values")
    assert pads is not None
    axes = node.array(3, "axes")
    used = range(rank) if axes is None else [int(a) % rank for a in axes.reshape(-1)]
    widths = np.zeros((rank, 2), dtype=int)
    widths[list(used)] = pads.reshape(2, -1).T
    if (widths < 0).any():
        raise UnsupportedNode(f"negative pads {pads.tolist()} crop; use Slice")
    if mode not in _PAD_MODES:
        raise UnsupportedNode(f"mode '{mode}'")
    fill = 0.0 if value is None else float(np.reshape(value, ()))
    flat = [int(w) for w in widths.reshape(-1)]
    return relax.op.nn.pad(node.inputs[0], flat, _PAD_MODES[mode], fill)


def _prelu(node: Node, builder: relax.BlockBuilder) -> None:
    """Before opset 7 a (C,) slope was along the channels, since then along the last axis."""
    slope = node.inputs[1]
    shape = node.shape()
    if node.opset < 7 and slope is not None and static_shape(slope) == shape[1:2]:
        spread = shape[1:2] + (1,) * (len(shape) - 2)
        array = array_of(slope)
        if array is None:
            node.inputs[1] = builder.emit(relax.op.reshape(slope, spread))
        else:
            node.inputs[1] = constant(array.reshape(spread))


def _lrn(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    x, size = node.inputs[0], int(node.attrs["size"])
    if len(node.shape()) != 4 or x is None:
        return None
    dtype = dtype_of(x)
    alpha, beta, bias = (
        float(node.attrs.get(key, default))
        for key, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    square = builder.emit(relax.op.multiply(x, x))
    total = channel_window_sum(builder.emit, square, size, (size - 1) // 2, size // 2)
    share = builder.emit(relax.op.multiply(total, constant(np.array(alpha / size), dtype)))
    base = builder.emit(relax.op.add(share, constant(np.array(bias), dtype)))
    scale = builder.emit(relax.op.power(base, constant(np.array(beta), dtype)))
    return relax.op.divide(x, scale)


def _space_to_depth(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    batch, channels, height, width = node.shape()
    block = int(node.attrs["blocksize"])
    order = [0, 1, 3, 5, 2, 4] if node.text("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    down = (height // block, width // block)
    split = relax.op.reshape(node.inputs[0], (batch, channels, down[0], block, down[1], block))
    moved = relax.op.permute_dims(builder.emit(split), order)
    return relax.op.reshape(builder.emit(moved), (batch, channels * block**2, *down))


def _slice(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    """Before opset 10 the bounds were attributes, which TVM does not read."""
    if node.opset >= 10:
        return None
    starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
    axes = list(node.attrs.get("axes", range(len(starts))))
    return relax.op.strided_slice(node.inputs[0], axes, starts, ends)


def _split(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    shape = node.shape()
    axis = int(node.attrs.get("axis", 0)) % len(shape)
    sizes = node.attrs.get("split") if node.opset < 13 else node.array(1, "split sizes")
    if sizes is None:
        part = math.ceil(shape[axis] / node.outputs)
        sizes = [min(part, shape[axis] - part * i) for i in range(node.outputs)]
    sizes = [int(size) for size in sizes]
    if min(sizes) <= 0:
        raise UnsupportedNode(f"a part of size zero (sizes {sizes})")
    if len(sizes) == 1:
        return node.inputs[0]
    bounds = np.cumsum(sizes)[:-1].tolist()
    return relax.op.split(node.inputs[0], bounds, axis)


def _resize(node: Node, builder: relax.BlockBuilder) -> Expr | None:
    """Resize, and its predecessor Upsample, of images; other ranks are left to TVM."""
    if node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnsupportedNode("keep_aspect_ratio_policy other than 'stretch'")
    if node.attrs.get("antialias", 0):
        raise UnsupportedNode("antialias=1")
    shape = node.shape()
    exact_size = _resized_shape(node, shape)
    size = [math.floor(extent + 1e-5) for extent in exact_size]
    if size[:2] != list(shape[:2]):
        raise UnsupportedNode("it changes the batch or the channels")
    # Before opset 11 there was one rule for coordinates, Upsample's.
    legacy = node.opset < 11 or node.op == "Upsample"
    default_mode, default_rounding = (
        ("asymmetric", "floor") if legacy else ("half_pixel", "round_prefer_floor")
    )
    mode = node.text("coordinate_transformation_mode", default_mode)
    rounding = node.text("nearest_mode", default_rounding)
    method = node.text("mode", "nearest")
    methods = {"nearest": "nearest_neighbor", "linear": "linear", "cubic": "cubic"}
    if method not in methods or mode == "tf_crop_and_resize":
        raise UnsupportedNode(f"mode '{method}', coordinates '{mode}'")
    whole = all(abs(extent - exact) < 1e-3 for extent, exact in zip(size, exact_size, strict=True))
    if not whole and mode != "align_corners":
        raise UnsupportedNode(
            f"scales that give a fractional size {exact_size}, from which the result's coordinates "
            "would be computed; give sizes"
        )
    if len(shape) != 4:
        return None
    return relax.op.image.resize2d(
        node.inputs[0],
        relax.ShapeExpr(size[2:]),
        layout="NCHW",
        method=methods[method],
        coordinate_transformation_mode=mode,
        rounding_method=rounding if method == "nearest" else "",
        cubic_alpha=float(node.attrs.get("cubic_coeff_a", -0.75)),
        cubic_exclude=int(node.attrs.get("exclude_outside", 0)),
        extrapolation_value=float(node.attrs.get("extrapolation_value", 0.0)),
    )


def _resized_shape(node: Node, shape: tuple[int, ...]) -> list[float]:
    """The result's shape, from constant scales or sizes of all axes or of ``axes``; not rounded."""
    axes = node.attrs.get("axes")
    used = range(len(shape)) if axes is None else [int(axis) % len(shape) for axis in axes]
    first = 1 if node.op == "Upsample" or node.opset < 11 else 2
    given = node.attrs.get("scales")
    scales = node.array(first, "scales") if given is None else np.array(given)
    sizes = node.array(3, "sizes")
    result = [float(extent) for extent in shape]
    if scales is not None and scales.size:
        for axis, scale in zip(used, scales, strict=True):
            result[axis] = shape[axis] * float(scale)
    elif sizes is not None and sizes.size:
        for axis, size in zip(used, sizes, strict=True):
            result[axis] = float(size)
    else:
        raise UnsupportedNode("neither scales nor sizes are given")
    return result


CONVERTERS: dict[str, Converter] = {
    "Add": _legacy_binary(relax.op.add),
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Conv": _conv,
    "Compress": _data_dependent,
    "ConvTranspose": _conv_transpose,
    "Div": _legacy_binary(relax.op.divide),
    "Dropout": _dropout,
    "LRN": _lrn,
    "LpPool": _pool,
    "Max": _pairwise(relax.op.maximum),
    "MaxPool": _pool,
    "Mean": _mean,
    "Min": _pairwise(relax.op.minimum),
    "Mul": _legacy_binary(relax.op.multiply),
    "NonMaxSuppression": _data_dependent,
    "NonZero": _data_dependent,
    "PRelu": _prelu,
    "Pad": _pad,
    "Resize": _resize,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Sub": _legacy_binary(relax.op.subtract),
    "Sum": _pairwise(relax.op.add),
    "Unique": _data_dependent,
    "Upsample": _resize,
}
"""Operators converted or checked here before TVM's importer sees them."""
