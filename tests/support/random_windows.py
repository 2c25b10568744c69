"""Random convolutions and poolings, and what goes with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.support.onnx_canvas import Canvas, Value
from tests.support.random_activations import activation

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 67)
KERNELS = ((1, 1), (2, 2), (3, 3), (3, 3), (1, 3), (3, 1), (2, 3), (5, 5), (4, 1), (1, 7))
LARGEST = 40
"""Rows and columns that up-sampling may reach."""


def width(canvas: Canvas) -> int:
    """A number of channels."""
    return canvas.rng.choice(CHANNELS)


def _window(canvas: Canvas, x: Value, pooling: bool = False) -> tuple[dict, tuple[int, int]] | None:
    """Attributes of a convolution or pooling that fits ``x``, and the result's size."""
    rng = canvas.rng
    kernel = rng.choice(KERNELS)
    strides = (1, 1)
    if rng.random() < 0.4:
        strides = rng.choice(((2, 2), (2, 2), (3, 3), (1, 2), (2, 1), (3, 2)))
    dilated = rng.random() < 0.2
    dilations = rng.choice(((2, 2), (1, 2), (3, 1), (2, 3))) if dilated else (1, 1)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    attrs: dict = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    if rng.random() < 0.12:
        # onnxruntime refuses SAME with dilation, and in pooling with gaps between windows.
        gaps = pooling and any(s > k for s, k in zip(strides, kernel, strict=True))
        modes = ("SAME_UPPER", "SAME_LOWER", "VALID")
        mode = "VALID" if dilated or gaps else rng.choice(modes)
        attrs["auto_pad"] = mode
        same = mode != "VALID"
        size = [
            -(-n // s) if same else (n - r) // s + 1
            for n, s, r in zip(x.size, strides, reach, strict=True)
        ]
        return (attrs, (size[0], size[1])) if min(size) > 0 else None
    pads = _pads(canvas, kernel, reach, pooling)
    if any(pads) or rng.random() < 0.5:
        attrs["pads"] = pads
    ceil = pooling and rng.random() < 0.4
    if pooling:
        attrs["ceil_mode"] = int(ceil)
    size = []
    for i in range(2):
        span = x.size[i] + pads[i] + pads[i + 2] - reach[i]
        if span < 0 or dilations[i] > x.size[i]:
            return None
        count = (-(-span // strides[i]) if ceil else span // strides[i]) + 1
        if ceil and (count - 1) * strides[i] >= x.size[i] + pads[i]:
            count -= 1
        size.append(count)
    return attrs, (size[0], size[1])


def _pads(canvas: Canvas, kernel: Sequence[int], reach: Sequence[int], pooling: bool) -> list[int]:
    rng, style = canvas.rng, canvas.rng.random()
    if style < 0.25:
        return [0, 0, 0, 0]
    if style < 0.6:
        half = [min((r - 1) // 2, k - 1) for r, k in zip(reach, kernel, strict=True)]
        return [*half, *half]
    # A pooling window must not lie in the padding; a convolution's may.
    most = [k - 1 if pooling else r for r, k in zip(reach, kernel, strict=True)]
    return [rng.randint(0, min(most[i % 2], 3)) for i in range(4)]


def conv(canvas: Canvas, x: Value, out: int | None = None, groups: int = 1) -> Value:
    """Convolution, perhaps with a bias, a batch norm and an activation."""
    found = _window(canvas, x)
    if found is None:
        return pointwise(canvas, x, out or width(canvas))
    attrs, size = found
    out = out or width(canvas)
    shape = (out, x.channels // groups, *attrs["kernel_shape"])
    inputs = [canvas.normal(*shape, scale=1 / math.sqrt(math.prod(shape[1:])))]
    if canvas.rng.random() < 0.6:
        inputs.append(canvas.normal(out, scale=0.5))
    if canvas.rng.random() < 0.3:
        del attrs["kernel_shape"]
    y = canvas.emit("Conv", x, *inputs, shape=(x.shape[0], out, *size), group=groups, **attrs)
    if canvas.rng.random() < 0.35:
        y = batch_norm(canvas, y)
    return activation(canvas, y) if canvas.rng.random() < 0.5 else y


def pointwise(canvas: Canvas, x: Value, out: int) -> Value:
    weight = canvas.normal(out, x.channels, 1, 1, scale=1 / math.sqrt(x.channels))
    return canvas.emit("Conv", x, weight, shape=(x.shape[0], out, *x.size))


def grouped(canvas: Canvas, x: Value) -> Value:
    divisors = [g for g in range(2, x.channels + 1) if x.channels % g == 0]
    groups = canvas.rng.choice(divisors) if divisors else 1
    return conv(canvas, x, groups * canvas.rng.choice((1, 2, 3, 5, 8)), groups)


def depthwise(canvas: Canvas, x: Value) -> Value:
    multiplier = canvas.rng.choice((1, 1, 1, 2, 3)) if x.channels < 34 else 1
    return conv(canvas, x, x.channels * multiplier, x.channels)


def transposed(canvas: Canvas, x: Value) -> Value:
    rng = canvas.rng
    groups = rng.choice([g for g in (1, 1, 1, 2, 3, x.channels) if x.channels % g == 0])
    per_group = rng.choice((1, 2, 3, 5, 16, 17)) if groups < 8 else rng.choice((1, 2))
    kernel = rng.choice(((1, 1), (2, 2), (3, 3), (4, 4), (2, 3), (5, 2)))
    strides = rng.choice(((1, 1), (2, 2), (2, 2), (3, 3), (1, 2), (3, 2)))
    dilations = rng.choice(((1, 1), (1, 1), (1, 1), (2, 2), (1, 3)))
    # onnxruntime wants it below the stride, whatever the dilation is.
    extra = [rng.randint(0, s - 1) if rng.random() < 0.4 else 0 for s in strides]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [rng.randint(0, min(reach[i % 2], 3)) if rng.random() < 0.5 else 0 for i in range(4)]
    attrs = {"strides": strides, "dilations": dilations, "group": groups}
    pairs = zip(x.size, strides, reach, extra, strict=True)
    full = [(n - 1) * s + r + e for n, s, r, e in pairs]
    if rng.random() < 0.15:
        size = [max(n - rng.randint(0, 3), 1) for n in full]
        attrs |= {"output_shape": size, "auto_pad": rng.choice(("SAME_UPPER", "SAME_LOWER"))}
    else:
        size = [full[i] - pads[i] - pads[i + 2] for i in range(2)]
        attrs["pads"] = pads
    if min(size) < 1 or max(size) > LARGEST:
        return activation(canvas, x)
    scale = 1 / math.sqrt(x.channels / groups * max(math.prod(kernel) / math.prod(strides), 1))
    inputs = [canvas.normal(x.channels, per_group, *kernel, scale=scale)]
    if rng.random() < 0.5:
        inputs.append(canvas.normal(per_group * groups, scale=0.5))
    if any(extra):
        attrs["output_padding"] = extra
    shape = (x.shape[0], per_group * groups, *size)
    y = canvas.emit("ConvTranspose", x, *inputs, shape=shape, **attrs)
    if rng.random() < 0.3:
        y = batch_norm(canvas, y)
    return activation(canvas, y) if rng.random() < 0.4 else y


def max_pool(canvas: Canvas, x: Value) -> Value:
    return _pool(canvas, x, "MaxPool")


def avg_pool(canvas: Canvas, x: Value) -> Value:
    return _pool(canvas, x, "AveragePool")


def _pool(canvas: Canvas, x: Value, op: str) -> Value:
    found = _window(canvas, x, pooling=True)
    if found is None:
        return activation(canvas, x)
    attrs, size = found
    if canvas.opset < 10 and attrs.pop("ceil_mode", 0):
        return activation(canvas, x)
    if canvas.opset < (19 if op == "AveragePool" else 10) and attrs.pop("dilations") != (1, 1):
        return activation(canvas, x)
    if op == "AveragePool":
        attrs["count_include_pad"] = canvas.rng.randint(0, 1)
    return canvas.emit(op, x, shape=(*x.shape[:2], *size), **attrs)


def global_pool(canvas: Canvas, x: Value) -> Value:
    op = canvas.rng.choice(("GlobalAveragePool", "GlobalMaxPool", "ReduceMean"))
    shape = (*x.shape[:2], 1, 1)
    if op != "ReduceMean":
        return canvas.emit(op, x, shape=shape)
    return mean(canvas, x, [2, 3], shape)


def mean(canvas: Canvas, x: Value, axes: list[int], shape: tuple[int, ...]) -> Value:
    """Mean over some axes, which stay if ``shape`` has four."""
    keep = int(len(shape) == 4)
    if canvas.opset < 18:
        return canvas.emit("ReduceMean", x, shape=shape, axes=axes, keepdims=keep)
    operand = canvas.const(np.array(axes) - 4, "int64")
    return canvas.emit("ReduceMean", x, operand, shape=shape, keepdims=keep)


def batch_norm(canvas: Canvas, x: Value) -> Value:
    c = x.channels
    scale = canvas.normal(c, scale=0.3, mean=1.0)
    shift, mean = canvas.normal(c, scale=0.3), canvas.normal(c, scale=0.3)
    variance = canvas.const(canvas.arrays.uniform(0.5, 1.5, c))
    return canvas.emit("BatchNormalization", x, scale, shift, mean, variance, epsilon=1e-3)
