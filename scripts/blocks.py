"""The kinds of block that the zoo's networks are made of, each described once, at its real sizes.

A block is a list of layers. ``relax_module`` makes a Relax module of it, ``torch_blocks.py`` the
calls of torch: so both compute the same, and no exporter decides what is compared. Batch norms are
folded already, as every contender would do, except those in front of a convolution (DenseNet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

Shape = tuple[int, int, int]
"""(height, width, channels)."""
_LAYOUT = {"layout": "NHWC"}


@dataclass(frozen=True)
class Layer:
    """One operator. Its result is the value after those of the inputs and the layers before it."""

    op: str
    """conv, transposed (kernel = stride), affine (scale and bias by channel), relu, max_pool,
    avg_pool (padding counts), global_pool, dense, concat."""
    inputs: tuple[int, ...]
    """Values that it reads; a second one of a convolution is added before ``act``."""
    channels: int = 0
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1
    act: str = ""
    """"", relu or relu6."""


@dataclass(frozen=True)
class Block:
    """Layers on some inputs; the last layer's result is the output."""

    kind: str
    name: str
    inputs: tuple[Shape, ...]
    layers: tuple[Layer, ...]


def value_shapes(block: Block) -> list[Shape]:
    """Shapes of the inputs and of every layer's result."""
    shapes = list(block.inputs)
    for layer in block.layers:
        height, width, channels = shapes[layer.inputs[0]]
        if layer.op == "transposed":
            height, width = height * layer.stride, width * layer.stride
        elif layer.op in ("global_pool", "dense"):
            height = width = 1
        elif layer.op in ("conv", "max_pool", "avg_pool"):
            around = 2 * layer.padding - layer.kernel
            height, width = ((n + around) // layer.stride + 1 for n in (height, width))
        if layer.op == "concat":
            channels = sum(shapes[i][2] for i in layer.inputs)
        shapes.append((height, width, layer.channels or channels))
    return shapes


def block_weights(block: Block, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """float32 parameters of each layer: (kernel OIHW, bias); transposed: IOHW; dense: (O, I);
    affine: (scale, bias). Activations keep a variance of about 1."""
    rng = np.random.default_rng(seed)
    shapes = value_shapes(block)
    found: list[tuple[np.ndarray, ...]] = []
    for layer in block.layers:
        inputs, outputs = shapes[layer.inputs[0]][2], layer.channels
        kernel: tuple[int, ...] = ()
        if layer.op == "conv":
            kernel = (outputs, inputs // layer.groups, layer.kernel, layer.kernel)
        elif layer.op == "transposed":
            kernel = (inputs, outputs, layer.kernel, layer.kernel)
        elif layer.op == "dense":
            kernel = (outputs, inputs)
        if kernel:
            terms = inputs if layer.op == "transposed" else np.prod(kernel[1:])
            values = rng.standard_normal(kernel) * np.sqrt(1.5 / terms)
            bias = rng.standard_normal(outputs) * 0.2
            found.append((values.astype("float32"), bias.astype("float32")))
        elif layer.op == "affine":
            scale, bias = rng.uniform(0.5, 1.5, inputs), rng.standard_normal(inputs) * 0.2
            found.append((scale.astype("float32"), bias.astype("float32")))
        else:
            found.append(())
    return found


def work(block: Block, batch: int, dtype: str) -> tuple[int, int]:
    """FLOP of convolutions and products; bytes of inputs, parameters and output, each once."""
    shapes, parameters = value_shapes(block), block_weights(block)
    flops = 0
    for index, layer in enumerate(block.layers, len(block.inputs)):
        if layer.op in ("conv", "transposed", "dense"):
            height, width, channels = shapes[layer.inputs[0] if layer.op == "transposed" else index]
            kernel = parameters[index - len(block.inputs)][0]
            each = kernel[0].size  # multiply-adds for an output element; transposed: an input's
            flops += 2 * batch * height * width * channels * each
    elements = batch * sum(int(np.prod(shape)) for shape in (*block.inputs, shapes[-1]))
    elements += sum(value.size for values in parameters for value in values)
    return flops, elements * np.dtype(dtype).itemsize


def relax_module(block: Block, batch: int = 1, dtype: str = "float32") -> tvm.IRModule:
    """``main`` takes the inputs and gives the output as (N, H, W, C), all of ``dtype``."""
    builder = relax.BlockBuilder()
    inputs = [
        relax.Var(f"x{i}", relax.TensorType((batch, *shape), dtype))
        for i, shape in enumerate(block.inputs)
    ]
    values: list[relax.Expr] = list(inputs)
    with builder.function("main", inputs):
        with builder.dataflow():
            for layer, parameters in zip(block.layers, block_weights(block), strict=True):
                constants = [relax.const(value.astype(dtype)) for value in parameters]
                chosen = [values[i] for i in layer.inputs]
                values.append(builder.emit(_emit(layer, chosen, constants, batch)))
            output = builder.emit_output(values[-1])
        builder.emit_func_output(output)
    return builder.finalize()


def _emit(
    layer: Layer, inputs: Sequence[relax.Expr], constants: Sequence[relax.Expr], batch: int
) -> relax.Expr:
    x, op = inputs[0], relax.op
    window = {"strides": layer.stride, "padding": layer.padding}
    if layer.op == "concat":
        return op.concat(list(inputs), axis=3)
    if layer.op == "global_pool":
        return op.mean(x, axis=[1, 2], keepdims=True)
    if layer.op == "max_pool":
        return op.nn.max_pool2d(x, layer.kernel, **window, **_LAYOUT)
    if layer.op == "avg_pool":
        return op.nn.avg_pool2d(x, layer.kernel, **window, **_LAYOUT, count_include_pad=True)
    if layer.op == "relu":
        return op.nn.relu(x)
    if layer.op == "dense":
        flat = op.reshape(x, (batch, -1))
        y = op.add(op.matmul(flat, op.permute_dims(constants[0])), constants[1])
        return op.reshape(y, (batch, 1, 1, layer.channels))
    if layer.op == "affine":
        y = op.multiply(x, constants[0])
    elif layer.op == "transposed":
        y = op.nn.conv2d_transpose(
            x, constants[0], layer.stride, data_layout="NHWC", kernel_layout="IOHW"
        )
    else:
        assert layer.op == "conv", layer.op
        y = op.nn.conv2d(
            x, constants[0], **window, groups=layer.groups, data_layout="NHWC", kernel_layout="OIHW"
        )
    y = op.add(y, constants[1])
    for added in inputs[1:]:
        y = op.add(y, added)
    if layer.act:
        y = op.nn.relu(y) if layer.act == "relu" else op.clip(y, 0.0, 6.0)
    return y


class _Maker:
    """Collects layers; its methods take and return indices of values."""

    def __init__(self, *inputs: Shape) -> None:
        self.inputs, self.layers = inputs, list[Layer]()

    def layer(self, op: str, *inputs: int, **options: Any) -> int:
        self.layers.append(Layer(op, inputs, **options))
        return len(self.inputs) + len(self.layers) - 1

    def conv(
        self,
        x: int,
        channels: int,
        kernel: int = 1,
        stride: int = 1,
        act: str = "relu",
        add: int | None = None,
    ) -> int:
        """Padding keeps the size at stride 1."""
        inputs = (x,) if add is None else (x, add)
        shape = {"kernel": kernel, "stride": stride, "padding": kernel // 2}
        return self.layer("conv", *inputs, channels=channels, act=act, **shape)

    def depthwise(self, x: int, channels: int, kernel: int, act: str, stride: int = 1) -> int:
        options = {"channels": channels, "groups": channels, "kernel": kernel, "stride": stride}
        return self.layer("conv", x, padding=kernel // 2, act=act, **options)

    def block(self, kind: str, name: str) -> Block:
        return Block(kind, name, self.inputs, tuple(self.layers))


def _convolution(size: int, inputs: int, outputs: int, kernel: int, add: bool = False) -> Block:
    m = _Maker((size, size, inputs), *([(size, size, outputs)] if add else []))
    m.conv(0, outputs, kernel, add=1 if add else None)
    plus = " + residual" if add else ""
    return m.block("convolution", f"{kernel}x{kernel} {inputs}-{outputs}{plus}, {size}x{size}")


def _chain(kind: str, size: int, inputs: int, *convs: tuple[int, int], add: bool = False) -> Block:
    """Convolutions (channels, kernel) in a row; ``add``: the input is added to the last one."""
    m = _Maker((size, size, inputs))
    x = 0
    for i, (channels, kernel) in enumerate(convs):
        last = i == len(convs) - 1
        x = m.conv(x, channels, kernel, add=0 if add and last else None)
    widths = "-".join(str(channels) for channels, _ in convs)
    return m.block(kind, f"{inputs}-{widths}, {size}x{size}")


def _inverted_residual(size: int, channels: int, expand: int) -> Block:
    m = _Maker((size, size, channels))
    y = m.depthwise(m.conv(0, expand, act="relu6"), expand, 3, "relu6")
    m.conv(y, channels, act="", add=0)
    return m.block("1x1-depthwise-1x1", f"MobileNetV2 {channels}-{expand}, {size}x{size}")


def _separable_twice(size: int, channels: int, kernel: int) -> Block:
    m = _Maker((size, size, channels))
    y = 0
    for _ in range(2):
        y = m.conv(m.depthwise(m.layer("relu", y), channels, kernel, ""), channels, act="")
    return m.block("separable-twice", f"NASNet {kernel}x{kernel} {channels}, {size}x{size}")


def _fire(size: int, inputs: int, squeeze: int, expand: int) -> Block:
    m = _Maker((size, size, inputs))
    s = m.conv(0, squeeze)
    m.layer("concat", m.conv(s, expand), m.conv(s, expand, 3))
    return m.block("fire", f"{inputs}-{squeeze}-{expand}+{expand}, {size}x{size}")


def _inception(name: str, size: int, inputs: int, widths: Sequence[int]) -> Block:
    """``widths``: 1x1; 1x1, 3x3; 1x1, 3x3; 1x1 behind the pooling (torchvision's: no 5x5)."""
    m = _Maker((size, size, inputs))
    pooled = m.layer("max_pool", 0, kernel=3, padding=1)
    first = m.conv(0, widths[0])
    second = m.conv(m.conv(0, widths[1]), widths[2], 3)
    third = m.conv(m.conv(0, widths[3]), widths[4], 3)
    m.layer("concat", first, second, third, m.conv(pooled, widths[5]))
    return m.block("inception", f"{name}, {size}x{size}")


def _stem(size: int, width: int = 64) -> Block:
    m = _Maker((size, size, 3))
    m.layer("max_pool", m.conv(0, width, 7, 2), kernel=3, stride=2, padding=1)
    return m.block("stem", f"7x7 3-{width} + max pool, {size}x{size}")


def _dense_layer(size: int, channels: int, width: int = 128, growth: int = 32) -> Block:
    m = _Maker((size, size, channels))
    y = m.conv(m.layer("affine", 0, act="relu"), width)
    m.layer("concat", 0, m.conv(y, growth, 3, act=""))
    return m.block("dense-layer", f"DenseNet {channels}+{growth}, {size}x{size}")


def _upsampling(size: int, inputs: int) -> Block:
    """The input at ``size`` is doubled and joined to a skip connection."""
    half = inputs // 2
    m = _Maker((size, size, inputs), (2 * size, 2 * size, half))
    m.layer("concat", 1, m.layer("transposed", 0, channels=half, kernel=2, stride=2))
    return m.block("transposed-concat", f"UNet {inputs}-{half}, {size}x{size}")


def _tail(size: int, channels: int, classes: int = 1000) -> Block:
    m = _Maker((size, size, channels))
    m.layer("dense", m.layer("global_pool", 0), channels=classes)
    return m.block("tail", f"average pool + dense {channels}-{classes}, {size}x{size}")


BLOCKS = (
    *(_convolution(s, c, c, 3) for s, c in ((56, 64), (28, 128), (14, 256), (7, 512))),
    *(_convolution(s, c, c, 3, add=True) for s, c in ((56, 64), (7, 512))),
    *(_convolution(s, c, 4 * c, 1, add=True) for s, c in ((56, 64), (28, 128), (14, 256))),
    *(_convolution(s, 4 * c, c, 1) for s, c in ((56, 64), (14, 256), (7, 512))),
    _chain("3x3-1x1", 56, 64, (64, 3), (256, 1)),
    _chain("3x3-1x1", 14, 256, (256, 3), (1024, 1)),
    _chain("1x1-3x3", 56, 256, (64, 1), (64, 3)),
    _chain("1x1-3x3", 14, 1024, (256, 1), (256, 3)),
    *(_inverted_residual(s, c, 6 * c) for s, c in ((56, 24), (28, 32), (14, 96), (7, 160))),
    *(_separable_twice(42, 168, k) for k in (3, 5, 7)),
    *(_separable_twice(s, c, 5) for s, c in ((21, 336), (11, 672))),
    _fire(55, 64, 16, 64),
    _fire(27, 128, 32, 128),
    _fire(13, 384, 64, 256),
    _inception("GoogLeNet 3a", 28, 192, (64, 96, 128, 16, 32, 32)),
    _inception("GoogLeNet 4e", 14, 528, (256, 160, 320, 32, 128, 128)),
    _inception("GoogLeNet 5b", 7, 832, (384, 192, 384, 48, 128, 128)),
    _stem(224),
    *(_dense_layer(s, c) for s, c in ((56, 128), (28, 256), (14, 512), (7, 768))),
    _chain("3x3-3x3", 256, 64, (64, 3), (64, 3)),
    _chain("3x3-3x3", 56, 64, (64, 3), (64, 3), add=True),
    _chain("3x3-3x3", 14, 256, (256, 3), (256, 3), add=True),
    _upsampling(16, 1024),
    _upsampling(128, 128),
    _tail(7, 512),
    _tail(7, 2048),
    _tail(11, 4032),
)
KINDS = tuple(dict.fromkeys(block.kind for block in BLOCKS))

SMALL_BLOCKS = (
    _convolution(14, 32, 64, 3),
    _convolution(14, 32, 64, 1, add=True),
    _chain("3x3-1x1", 14, 32, (32, 3), (64, 1)),
    _chain("1x1-3x3", 14, 64, (32, 1), (32, 3)),
    _inverted_residual(14, 16, 48),
    *(_separable_twice(11, 24, k) for k in (3, 5, 7)),
    _fire(13, 32, 16, 32),
    _inception("small", 14, 32, (16, 16, 32, 16, 16, 16)),
    _stem(32, 16),
    _dense_layer(14, 48, 32, 16),
    _chain("3x3-3x3", 14, 16, (16, 3), (16, 3), add=True),
    _upsampling(8, 32),
    _tail(7, 32, 24),
)
"""One or more of every kind, small enough for an emulator or a sanitizer."""
