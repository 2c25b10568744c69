"""ConvGraphs of the blocks that the yardstick's seven families of networks are made of."""

from __future__ import annotations

from optifx_tvm.graph import ConvGraph, Step
from tests.support.groups import RELU, GroupBuilder


def fire(size: int, channels: int, squeeze: int, expand: int, dtype: str = "float32") -> ConvGraph:
    """SqueezeNet: 1x1 -> {1x1, 3x3} -> concat."""
    b = GroupBuilder(dtype)
    s = b.conv(b.input(size, size, channels), squeeze)
    b.concat(b.conv(s, expand), b.conv(s, expand, 3))
    return b.graph()


def inverted_residual(
    size: int, channels: int, expand: int, residual: bool = True, dtype: str = "float32"
) -> ConvGraph:
    """MobileNetV2: 1x1 -> depthwise 3x3 -> 1x1 (+ input)."""
    b = GroupBuilder(dtype)
    x = b.input(size, size, channels)
    y = b.depthwise(b.conv(x, expand))
    add = (Step("add", (1, x)),) if residual else ()
    b.conv(y, channels, epilogue=(b.bias(channels), *add))
    return b.graph()


def bottleneck(size: int, channels: int, width: int, dtype: str = "float32") -> ConvGraph:
    """ResNet-50: 1x1 -> 3x3 -> 1x1 + input."""
    b = GroupBuilder(dtype)
    x = b.input(size, size, channels)
    y = b.conv(b.conv(x, width), width, 3)
    last = (b.bias(channels), Step("add", (1, x)), Step("relu", (2,)))
    b.conv(y, channels, epilogue=last)
    return b.graph()


def convolutions(size: int, channels: int, *kernels: int, dtype: str = "float32") -> ConvGraph:
    """A chain of convolutions of constant width (ResNet-18, UNet)."""
    b = GroupBuilder(dtype)
    x = b.input(size, size, channels)
    for kernel in kernels:
        x = b.conv(x, channels, kernel)
    return b.graph()


def stem(size: int = 224, dtype: str = "float32") -> ConvGraph:
    """ResNet, GoogLeNet, DenseNet: 7x7 stride 2 -> max pooling 3x3 stride 2."""
    b = GroupBuilder(dtype)
    y = b.conv(b.input(size, size, 3), 64, 7, 2)
    b.pool(y, "max", 3, 2, (1, 1, 1, 1))
    return b.graph()


def inception(size: int = 28, channels: int = 192, dtype: str = "float32") -> ConvGraph:
    """GoogLeNet: four branches joined by a concat."""
    b = GroupBuilder(dtype)
    x = b.input(size, size, channels)
    pooled = b.pool(x, "max", 3, 1, (1, 1, 1, 1))
    b.concat(
        b.conv(x, 64),
        b.conv(b.conv(x, 96), 128, 3),
        b.conv(b.conv(x, 16), 32, 3),
        b.conv(pooled, 32),
    )
    return b.graph()


def dense_layers(size: int = 28, channels: int = 64, layers: int = 2) -> ConvGraph:
    """DenseNet: concat -> BN-ReLU-1x1 -> 3x3, each layer read by all later ones."""
    b = GroupBuilder()
    parts = [b.input(size, size, channels)]
    for _ in range(layers):
        x = b.concat(*parts) if len(parts) > 1 else parts[0]
        width = b.tensors[x].shape[3]
        norm = (Step("multiply", (0, b.param(width))), Step("add", (1, b.param(width))))
        y = b.conv(x, 128, 1, prologue=(*norm, Step("relu", (2,))))
        parts.append(b.conv(y, 32, 3, epilogue=()))
    b.concat(*parts)
    return b.graph()


def separable_cell(size: int = 28, channels: int = 48, pairs: int = 2) -> ConvGraph:
    """NASNet: pairs of separable convolutions and poolings of two inputs, added, joined."""
    b = GroupBuilder()
    one, two = b.input(size, size, channels), b.input(size, size, channels)
    sums = []
    for x, kernel, other in ((one, 5, two), (two, 3, one))[:pairs]:
        y = b.conv(b.depthwise(x, kernel, prologue=(RELU,), epilogue=()), channels)
        pooled = b.pool(other, "avg", 3, 1, (1, 1, 1, 1))
        z = b.conv(b.depthwise(y, kernel, epilogue=()), channels, 1)
        sums.append(b.eltwise(z, Step("add", (0, pooled))))
    b.concat(one, *sums)
    return b.graph()
