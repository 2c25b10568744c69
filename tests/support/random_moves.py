"""The moves by which random CNNs grow: each reads an image and makes at least one more value."""

from __future__ import annotations

import math

import numpy as np

from tests.support.onnx_canvas import Canvas, Value
from tests.support.random_activations import Move, activation
from tests.support.random_windows import (
    LARGEST,
    avg_pool,
    batch_norm,
    conv,
    depthwise,
    global_pool,
    grouped,
    max_pool,
    mean,
    pointwise,
    transposed,
    width,
)


def preactivated(canvas: Canvas, x: Value) -> Value:
    """DenseNet: batch norm and ReLU before the convolution."""
    return conv(canvas, canvas.emit("Relu", batch_norm(canvas, x)))


def constant_operand(canvas: Canvas, x: Value) -> Value:
    """An element-wise operator with a constant of some shape that broadcasts."""
    c, (rows, columns) = x.channels, x.size
    along_channels = ((c, 1, 1), (c, 1, 1), (1, c, 1, 1))
    others = ((1, 1, columns), (rows, 1), (c, rows, columns))
    shape = canvas.rng.choice(((), (1,), *along_channels, *others))
    op = canvas.rng.choice(("Add", "Mul", "Sub", "Div", "Max", "Min"))
    operand = canvas.const(canvas.arrays.uniform(0.5, 1.5, shape))
    pair = [x, operand]
    if op != "Div" and canvas.rng.random() < 0.3:
        pair.reverse()
    return canvas.emit(op, *pair, shape=x.shape)


def partner(canvas: Canvas, x: Value) -> Value:
    """Another value of the shape of ``x``, made if there is none."""
    same = canvas.images(lambda v: v.shape == x.shape and v.name != x.name)
    if same and canvas.rng.random() < 0.7:
        return canvas.rng.choice(same)
    return pointwise(canvas, canvas.rng.choice(_as_large(canvas, x)), x.channels)


def _as_large(canvas: Canvas, x: Value) -> list[Value]:
    """Images of the batch and size of ``x``."""
    return canvas.images(lambda v: (v.shape[0], v.size) == (x.shape[0], x.size))


def combine(canvas: Canvas, x: Value) -> Value:
    """x with another value of its shape."""
    op = canvas.rng.choice(("Add", "Add", "Add", "Mul", "Sub", "Max", "Min", "Sum", "Mean"))
    operands = [x, partner(canvas, x)]
    if op in ("Max", "Min", "Sum", "Mean") and canvas.rng.random() < 0.3:
        operands.append(partner(canvas, x))
    y = canvas.emit(op, *canvas.shuffled(*operands))
    return canvas.emit("Relu", y) if canvas.rng.random() < 0.4 else y


def residual(canvas: Canvas, x: Value) -> Value:
    """x + f(x): the sum reads what its own group reads."""
    y = x
    for _ in range(canvas.rng.randint(1, 2)):
        kernel = canvas.rng.choice((1, 3, 3, 5))
        groups = x.channels if canvas.rng.random() < 0.3 else 1
        shape = (x.channels, x.channels // groups, kernel, kernel)
        weight = canvas.normal(*shape, scale=1 / math.sqrt(math.prod(shape[1:])))
        y = canvas.emit("Conv", y, weight, pads=[kernel // 2] * 4, group=groups)
        y = activation(canvas, y) if canvas.rng.random() < 0.6 else y
    return canvas.emit("Add", *canvas.rng.choice(((x, y), (y, x))))


def squeeze_excite(canvas: Canvas, x: Value) -> Value:
    """x times factors of shape (N, C, 1, 1)."""
    y = canvas.emit("GlobalAveragePool", x, shape=(*x.shape[:2], 1, 1))
    if canvas.rng.random() < 0.7:
        y = canvas.emit("Relu", pointwise(canvas, y, canvas.rng.choice((1, 3, 8))))
        y = pointwise(canvas, y, x.channels)
    y = canvas.emit(canvas.rng.choice(("Sigmoid", "HardSigmoid")), y)
    op = canvas.rng.choice(("Mul", "Mul", "Add"))
    return canvas.emit(op, *canvas.shuffled(x, y), shape=x.shape)


def attention(canvas: Canvas, x: Value) -> Value:
    """x times factors of shape (N, 1, H, W) or (1, C, H, W), made from a mean of x."""
    if canvas.rng.random() < 0.5:
        y = mean(canvas, x, [1], (x.shape[0], 1, *x.size))
        weight = canvas.normal(1, 1, 3, 3)
        y = canvas.emit("Conv", y, weight, pads=[1, 1, 1, 1])
    else:
        y = mean(canvas, x, [0], (1, *x.shape[1:]))
    op = canvas.rng.choice(("Mul", "Mul", "Add"))
    factors = canvas.emit("Sigmoid", y)
    return canvas.emit(op, *canvas.shuffled(x, factors), shape=x.shape)


def dense_excite(canvas: Canvas, x: Value) -> Value:
    """Squeeze and excite with dense layers on a flattened mean."""
    y = mean(canvas, x, [2, 3], x.shape[:2])
    weight = canvas.normal(x.channels, x.channels, scale=1 / math.sqrt(x.channels))
    y = canvas.emit("Sigmoid", canvas.emit("Gemm", y, weight, canvas.normal(x.channels)))
    shape = canvas.const(np.array([0, 0, 1, 1]), "int64")
    y = canvas.emit("Reshape", y, shape, shape=(*x.shape[:2], 1, 1))
    return canvas.emit("Mul", *canvas.shuffled(x, y), shape=x.shape)


def channel_shuffle(canvas: Canvas, x: Value) -> Value:
    """ShuffleNet's reshape, transpose, reshape."""
    groups = next((g for g in (2, 3, 5, 7) if x.channels % g == 0), None)
    if groups is None:
        return grouped(canvas, x)
    split = (x.shape[0], groups, x.channels // groups, *x.size)
    swapped = (x.shape[0], x.channels // groups, groups, *x.size)
    y = canvas.emit("Reshape", x, canvas.const(np.array(split), "int64"), shape=split)
    y = canvas.emit("Transpose", y, shape=swapped, perm=[0, 2, 1, 3, 4])
    y = canvas.emit("Reshape", y, canvas.const(np.array(x.shape), "int64"), shape=x.shape)
    return grouped(canvas, y)


def moved(canvas: Canvas, x: Value) -> Value:
    """Operators that are not fused but keep or move an image."""
    batch, channels, (rows, columns) = x.shape[0], x.channels, x.size
    kind = canvas.rng.choice(("depth", "space", "lrn", "norm", "transpose"))
    if kind == "depth" and channels % 4 == 0 and 2 * max(x.size) <= LARGEST:
        shape = (batch, channels // 4, 2 * rows, 2 * columns)
        return canvas.emit("DepthToSpace", x, shape=shape, blocksize=2)
    if kind == "space" and rows % 2 == columns % 2 == 0 and channels < 40:
        shape = (batch, channels * 4, rows // 2, columns // 2)
        return canvas.emit("SpaceToDepth", x, shape=shape, blocksize=2)
    if kind == "lrn":
        return canvas.emit("LRN", x, size=canvas.rng.choice((3, 5)), alpha=0.1, bias=1.5)
    if kind == "norm" and rows * columns > 8:
        scale = canvas.normal(channels, scale=0.3, mean=1.0)
        return canvas.emit("InstanceNormalization", x, scale, canvas.normal(channels))
    shape = (batch, channels, columns, rows)
    return canvas.emit("Transpose", x, shape=shape, perm=[0, 1, 3, 2])


def concat(canvas: Canvas, x: Value) -> Value:
    """x joined with values of its size, perhaps with itself."""
    near = _as_large(canvas, x)
    parts = [x, *(canvas.rng.choice(near) for _ in range(canvas.rng.randint(1, 3)))]
    if canvas.rng.random() < 0.3:
        parts.append(x)
    canvas.rng.shuffle(parts)
    while sum(part.channels for part in parts) > 150 and len(parts) > 2:
        parts.pop()
    channels = sum(part.channels for part in parts)
    y = canvas.emit("Concat", *parts, shape=(x.shape[0], channels, *x.size), axis=1)
    return activation(canvas, y) if canvas.rng.random() < 0.3 else y


def branches(canvas: Canvas, x: Value) -> Value:
    """Fire module or inception: several readers of x, joined."""
    parts = []
    for _ in range(canvas.rng.randint(2, 3)):
        kernel = canvas.rng.choice((1, 3, 3, 5))
        out = width(canvas)
        scale = 1 / math.sqrt(x.channels) / kernel
        weight = canvas.normal(out, x.channels, kernel, kernel, scale=scale)
        shape = (x.shape[0], out, *x.size)
        y = canvas.emit("Conv", x, weight, shape=shape, pads=[kernel // 2] * 4)
        parts.append(canvas.emit("Relu", y) if canvas.rng.random() < 0.7 else y)
    if canvas.rng.random() < 0.3:
        pads = [1, 1, 1, 1]
        parts.append(canvas.emit("MaxPool", x, kernel_shape=[3, 3], pads=pads, strides=[1, 1]))
    channels = sum(part.channels for part in parts)
    return canvas.emit("Concat", *parts, shape=(x.shape[0], channels, *x.size), axis=1)


def split(canvas: Canvas, x: Value) -> Value:
    """x cut along the channels; the parts are read each by itself."""
    if x.channels < 2:
        return activation(canvas, x)
    first = canvas.rng.randint(1, x.channels - 1)
    sizes = [first, x.channels - first]
    old = {"split": sizes} if canvas.opset < 13 else {}
    new = [] if canvas.opset < 13 else [canvas.const(np.array(sizes), "int64")]
    shapes = [(x.shape[0], size, *x.size) for size in sizes]
    left, right = canvas.emit_many("Split", [x, *new], shapes, axis=1, **old)
    if canvas.rng.random() < 0.5:
        return canvas.emit("Concat", _conv_relu(canvas, right), left, shape=x.shape, axis=1)
    activation(canvas, left)
    return activation(canvas, right)


def _conv_relu(canvas: Canvas, x: Value) -> Value:
    return canvas.emit("Relu", pointwise(canvas, x, x.channels))


def slice_axis(canvas: Canvas, x: Value) -> Value:
    """Some channels, or a crop, perhaps with steps."""
    axis = canvas.rng.choice((1, 1, 1, 2, 3))
    extent = x.shape[axis]
    begin = canvas.rng.randint(0, extent - 1)
    end = canvas.rng.randint(begin + 1, extent)
    if axis > 1:
        begin, end = min(begin, 2), max(end, extent - 2)
    step = canvas.rng.choice((1, 1, 1, 2))
    shape = list(x.shape)
    shape[axis] = len(range(begin, end, step))
    if end == extent and canvas.rng.random() < 0.5:
        end = 2**31
    if canvas.opset < 10:
        shape[axis] = min(end, extent) - begin
        bounds = {"starts": [begin], "ends": [end], "axes": [axis]}
        return canvas.emit("Slice", x, shape=tuple(shape), **bounds)
    bounds = ([begin], [end], [axis], [step])
    inputs = [canvas.const(np.array(bound), "int64") for bound in bounds]
    return canvas.emit("Slice", x, *inputs, shape=tuple(shape))


def concat_and_slice(canvas: Canvas, x: Value) -> Value:
    """A concat that is read whole and in slices."""
    y = concat(canvas, x)
    slice_axis(canvas, y)
    return slice_axis(canvas, y)


def pad(canvas: Canvas, x: Value) -> Value:
    mode = canvas.rng.choice(("constant", "constant", "reflect", "edge"))
    low = [canvas.rng.randint(0, 2) if n > 2 else 0 for n in x.size]
    high = [canvas.rng.randint(0, 2) if n > 2 else 0 for n in x.size]
    shape = (*x.shape[:2], *(sum(item) for item in zip(x.size, low, high, strict=True)))
    pads = [0, 0, *low, 0, 0, *high]
    if canvas.opset < 11:
        y = canvas.emit("Pad", x, shape=shape, mode=mode, pads=pads)
    else:
        operand = canvas.const(np.array(pads), "int64")
        y = canvas.emit("Pad", x, operand, shape=shape, mode=mode)
    return canvas.rng.choice((conv, max_pool, avg_pool))(canvas, y)


def resize(canvas: Canvas, x: Value) -> Value:
    if max(x.size) * 2 > LARGEST:
        return max_pool(canvas, x)
    scales = canvas.const(np.array([1.0, 1.0, 2.0, 2.0]))
    shape = (*x.shape[:2], *(2 * n for n in x.size))
    if canvas.opset < 11:
        mode = canvas.rng.choice(("nearest", "linear"))
        return canvas.emit("Upsample", x, scales, shape=shape, mode=mode)
    mode, rule = canvas.rng.choice((("nearest", "asymmetric"), ("linear", "half_pixel")))
    attrs = {"mode": mode, "coordinate_transformation_mode": rule, "nearest_mode": "floor"}
    region = canvas.const(np.zeros(0)) if canvas.opset < 13 else ""
    return canvas.emit("Resize", x, region, scales, shape=shape, **attrs)


def unchanged(canvas: Canvas, x: Value) -> Value:
    return canvas.emit(canvas.rng.choice(("Identity", "Dropout")), x)


def head(canvas: Canvas, x: Value) -> Value:
    """Pooling, flattening and dense layers."""
    if canvas.rng.random() < 0.6:
        x = global_pool(canvas, x)
    features = math.prod(x.shape[1:])
    if features > 6000:
        return x
    y = canvas.emit("Flatten", x, shape=(x.shape[0], features))
    for _ in range(canvas.rng.randint(1, 2)):
        out, turned = canvas.rng.choice((1, 5, 10, 33)), canvas.rng.randint(0, 1)
        shape = (out, y.channels) if turned else (y.channels, out)
        weight = canvas.normal(*shape, scale=1 / math.sqrt(y.channels))
        bias = [canvas.normal(out)] if canvas.opset < 11 or canvas.rng.random() < 0.5 else []
        y = canvas.emit("Gemm", y, weight, *bias, shape=(x.shape[0], out), transB=turned)
        y = canvas.emit("Relu", y) if canvas.rng.random() < 0.3 else y
        if out == 1:
            break  # what follows a single number multiplies its rounding error
    return canvas.emit("Softmax", y, axis=1) if canvas.rng.random() < 0.3 else y


MOVES: tuple[tuple[Move, float], ...] = (
    (conv, 5),
    (grouped, 2),
    (depthwise, 2),
    (transposed, 2),
    (max_pool, 1.5),
    (avg_pool, 1.5),
    (global_pool, 0.4),
    (batch_norm, 1),
    (preactivated, 1.5),
    (activation, 2),
    (constant_operand, 1),
    (combine, 2),
    (residual, 2),
    (squeeze_excite, 1),
    (dense_excite, 0.4),
    (attention, 0.6),
    (channel_shuffle, 0.5),
    (moved, 0.6),
    (concat, 1.5),
    (branches, 1.5),
    (split, 1.2),
    (slice_axis, 0.7),
    (concat_and_slice, 0.8),
    (pad, 0.7),
    (resize, 0.5),
    (unchanged, 0.3),
)
