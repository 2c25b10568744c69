"""GoogLeNet (Inception v1) as in torchvision, without auxiliary heads and input transform.

As there, the third branch has a 3x3 window where the paper has 5x5, and batch norm's epsilon is
1e-3.
"""

from __future__ import annotations

from tvm.relax.frontend import nn

from optifx_tvm.zoo.layers import (
    BatchNorm2d,
    Conv2d,
    MaxPool2d,
    Sequential,
    concat,
    global_average,
)

# channels: 1x1; 3x3 reduced, 3x3; "5x5" reduced, "5x5"; projection after the pool
_BLOCKS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class BasicConv2d(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, kernel, stride, padding)
        self.bn = BatchNorm2d(out_channels, eps=1e-3)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return nn.op.relu(self.bn(self.conv(x)))


class Inception(nn.Module):
    """Four branches, joined along the channels."""

    def __init__(self, in_channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, projection = widths
        self.out_channels = one + three + five + projection
        self.branch1 = BasicConv2d(in_channels, one, 1)
        self.branch2 = Sequential(
            BasicConv2d(in_channels, three_in, 1), BasicConv2d(three_in, three, 3, padding=1)
        )
        self.branch3 = Sequential(
            BasicConv2d(in_channels, five_in, 1), BasicConv2d(five_in, five, 3, padding=1)
        )
        self.branch4 = Sequential(
            MaxPool2d(3, 1, 1, ceil_mode=True), BasicConv2d(in_channels, projection, 1)
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return concat([b(x) for b in (self.branch1, self.branch2, self.branch3, self.branch4)])


class GoogLeNet(nn.Module):
    """(N, 3, H, W) -> (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64, 7, stride=2, padding=3)
        self.maxpool1 = MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = BasicConv2d(64, 64, 1)
        self.conv3 = BasicConv2d(64, 192, 3, padding=1)
        self.maxpool2 = MaxPool2d(3, 2, ceil_mode=True)
        channels = 192
        for block, widths in _BLOCKS.items():
            inception = Inception(channels, widths)
            setattr(self, f"inception{block}", inception)
            channels = inception.out_channels
        self.maxpool3 = MaxPool2d(3, 2, ceil_mode=True)
        self.maxpool4 = MaxPool2d(2, 2, ceil_mode=True)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        x = self.maxpool1(self.conv1(data))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        pool_before = {"4a": self.maxpool3, "5a": self.maxpool4}
        for block in _BLOCKS:
            if block in pool_before:
                x = pool_before[block](x)
            x = getattr(self, f"inception{block}")(x)
        return self.fc(global_average(x))
