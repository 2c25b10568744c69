"""SqueezeNet 1.1 as in torchvision."""

from __future__ import annotations

from tvm.relax.frontend import nn

from optifx_tvm.zoo.layers import (
    Conv2d,
    Dropout,
    MaxPool2d,
    ReLU,
    Sequential,
    concat,
    global_average,
)


class Fire(nn.Module):
    """1x1 squeeze, then 1x1 and 3x3 expand, joined along the channels."""

    def __init__(self, in_channels: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = Conv2d(in_channels, squeeze, 1, bias=True)
        self.expand1x1 = Conv2d(squeeze, expand, 1, bias=True)
        self.expand3x3 = Conv2d(squeeze, expand, 3, padding=1, bias=True)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = nn.op.relu(self.squeeze(x))
        return concat([nn.op.relu(self.expand1x1(x)), nn.op.relu(self.expand3x3(x))])


class SqueezeNet11(nn.Module):
    """(N, 3, H, W) -> (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Sequential(
            Conv2d(3, 64, 3, stride=2, bias=True),
            ReLU(),
            MaxPool2d(3, 2, ceil_mode=True),
            Fire(64, 16, 64),
            Fire(128, 16, 64),
            MaxPool2d(3, 2, ceil_mode=True),
            Fire(128, 32, 128),
            Fire(256, 32, 128),
            MaxPool2d(3, 2, ceil_mode=True),
            Fire(256, 48, 192),
            Fire(384, 48, 192),
            Fire(384, 64, 256),
            Fire(512, 64, 256),
        )
        self.classifier = Sequential(Dropout(), Conv2d(512, 1000, 1, bias=True), ReLU())

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        return global_average(self.classifier(self.features(data)))
