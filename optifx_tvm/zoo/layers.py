"""Building blocks of the zoo, on top of ``relax.frontend.nn``; all activations are NCHW.

Attribute names are torch's (``weight``, ``bias``, ``running_mean``, ``running_var``), so that the
dotted parameter names of a network equal the keys of a torchvision or timm ``state_dict``.
``relax.frontend.nn`` has no batch norm, pooling or 2-D transposed convolution: those wrap
``relax.op`` calls the way its own modules do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.core import wrap_nested

Padding = int | Literal["same"]
Pads = tuple[int, int, int, int]


def spatial(x: nn.Tensor) -> tuple[int, int]:
    """Height and width of an NCHW tensor."""
    return int(x.shape[2]), int(x.shape[3])


def pads(x: nn.Tensor, kernel: int, stride: int, padding: Padding) -> Pads:
    """(top, left, bottom, right). ``"same"`` is TensorFlow's: the odd one goes below and right."""
    if padding != "same":
        return (padding, padding, padding, padding)
    total = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in spatial(x)]
    top, left = (t // 2 for t in total)
    return (top, left, total[0] - top, total[1] - left)


class Conv2d(nn.Module):
    """Convolution with square window, weights OIHW (I = input channels of one group)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        padding: Padding = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.groups = kernel, stride, groups
        self.padding: Padding = padding
        self.weight = nn.Parameter((out_channels, in_channels // groups, kernel, kernel))
        self.bias = nn.Parameter((out_channels,)) if bias else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        padding = pads(x, self.kernel, self.stride, self.padding)
        return nn.op.conv2d(
            x, self.weight, self.bias, self.stride, padding, groups=self.groups, name="conv"
        )


class ConvTranspose2d(nn.Module):
    """Transposed convolution with bias, unpadded, weights IOHW as in torch."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter((in_channels, out_channels, kernel, kernel))
        self.bias = nn.Parameter((out_channels,))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = relax.op.nn.conv2d_transpose(x._expr, self.weight._expr, strides=self.stride)
        bias = relax.op.reshape(self.bias._expr, (1, -1, 1, 1))
        return wrap_nested(relax.op.add(y, bias), "conv_transpose")


class BatchNorm2d(nn.Module):
    """Inference batch norm over axis 1; stays ``relax.nn.batch_norm`` until a pass folds it."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter((channels,))
        self.bias = nn.Parameter((channels,))
        self.running_mean = nn.Parameter((channels,))
        self.running_var = nn.Parameter((channels,))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        statistics = (self.weight, self.bias, self.running_mean, self.running_var)
        normed = relax.op.nn.batch_norm(
            x._expr, *(p._expr for p in statistics), axis=1, epsilon=self.eps, training=False
        )
        normed = relax.BlockBuilder.current().emit(normed)
        return wrap_nested(relax.TupleGetItem(normed, 0), "batch_norm")


class ReLU(nn.Module):
    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return nn.op.relu(x)


class ReLU6(nn.Module):
    """``clip(x, 0, 6)``, which is how the importers bring ReLU6."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return wrap_nested(relax.op.clip(x._expr, 0.0, 6.0), "relu6")


class Dropout(nn.Module):
    """Absent at inference; it holds the place of torchvision's in the numbering of names."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x


class MaxPool2d(nn.Module):
    """Max pooling with square window; padding reads as minus infinity."""

    def __init__(
        self, kernel: int, stride: int, padding: Padding = 0, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.padding: Padding = padding
        self.ceil_mode = ceil_mode

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        pooled = relax.op.nn.max_pool2d(
            x._expr,
            pool_size=self.kernel,
            strides=self.stride,
            padding=pads(x, self.kernel, self.stride, self.padding),
            ceil_mode=self.ceil_mode,
        )
        return wrap_nested(pooled, "max_pool")


class AvgPool2d(nn.Module):
    """Average pooling with square window."""

    def __init__(
        self, kernel: int, stride: int, padding: Padding = 0, count_include_pad: bool = False
    ) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.padding: Padding = padding
        self.count_include_pad = count_include_pad

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        pooled = relax.op.nn.avg_pool2d(
            x._expr,
            pool_size=self.kernel,
            strides=self.stride,
            padding=pads(x, self.kernel, self.stride, self.padding),
            count_include_pad=self.count_include_pad,
        )
        return wrap_nested(pooled, "avg_pool")


class Sequential(nn.ModuleList):
    """Modules in a row, named ``0``, ``1``, ... as torch names them."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(list(modules))


class ConvBnAct(Sequential):
    """``0``: convolution that keeps the size at stride 1, ``1``: batch norm, then ``act``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        act: nn.Module,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        conv = Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups)
        super().__init__(conv, BatchNorm2d(out_channels), act)


def concat(tensors: Sequence[nn.Tensor]) -> nn.Tensor:
    """Joins NCHW tensors along their channels."""
    return nn.op.concat(list(tensors), dim=1)


def global_average(x: nn.Tensor) -> nn.Tensor:
    """(N, C, H, W) -> (N, C): a ``mean``, which is how the importers bring global pooling."""
    mean = wrap_nested(relax.op.mean(x._expr, axis=[2, 3], keepdims=True), "global_pool")
    return flatten(mean)


def flatten(x: nn.Tensor) -> nn.Tensor:
    """(N, C, 1, 1) -> (N, C)."""
    return nn.op.reshape(x, (x.shape[0], x.shape[1]))
