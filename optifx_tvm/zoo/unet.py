"""U-Net as in milesial/Pytorch-UNet, ``bilinear=False``: base 64 channels, 2 classes."""

from __future__ import annotations

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.core import wrap_nested

from optifx_tvm.zoo.layers import (
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    MaxPool2d,
    ReLU,
    Sequential,
    concat,
    spatial,
)

_WIDTHS = (64, 128, 256, 512, 1024)
_CLASSES = 2


class DoubleConv(nn.Module):
    """(3x3 convolution, batch norm, ReLU) twice."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.double_conv = Sequential(
            Conv2d(in_channels, out_channels, 3, padding=1),
            BatchNorm2d(out_channels),
            ReLU(),
            Conv2d(out_channels, out_channels, 3, padding=1),
            BatchNorm2d(out_channels),
            ReLU(),
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.double_conv(x)


class Down(nn.Module):
    """Half the size, then a double convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.maxpool_conv = Sequential(MaxPool2d(2, 2), DoubleConv(in_channels, out_channels))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.maxpool_conv(x)


class Up(nn.Module):
    """Twice the size and half the channels, joined to the skip connection, double convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.up = ConvTranspose2d(in_channels, in_channels // 2, 2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x: nn.Tensor, skip: nn.Tensor) -> nn.Tensor:
        return self.conv(concat([skip, _pad_to(self.up(x), spatial(skip))]))


def _pad_to(x: nn.Tensor, size: tuple[int, int]) -> nn.Tensor:
    """Zeros around ``x``: a size that max pooling rounded down lacks a row or a column."""
    rows, columns = (want - have for want, have in zip(size, spatial(x), strict=True))
    if rows == columns == 0:
        return x
    top, left = rows // 2, columns // 2
    widths = [0, 0, 0, 0, top, rows - top, left, columns - left]
    return wrap_nested(relax.op.nn.pad(x._expr, widths), "pad")


class UNet(nn.Module):
    """(N, 3, H, W) -> (N, 2, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = len(_WIDTHS) - 1
        self.inc = DoubleConv(3, _WIDTHS[0])
        for i in range(self.depth):
            setattr(self, f"down{i + 1}", Down(_WIDTHS[i], _WIDTHS[i + 1]))
        for i in range(self.depth):
            setattr(self, f"up{i + 1}", Up(_WIDTHS[-1 - i], _WIDTHS[-2 - i]))
        self.outc = OutConv(_WIDTHS[0], _CLASSES)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        skips = [self.inc(data)]
        for i in range(self.depth):
            skips.append(getattr(self, f"down{i + 1}")(skips[-1]))
        x = skips.pop()
        for i in range(self.depth):
            x = getattr(self, f"up{i + 1}")(x, skips.pop())
        return self.outc(x)


class OutConv(nn.Module):
    """The 1x1 head."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, classes, 1, bias=True)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.conv(x)
