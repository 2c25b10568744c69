"""MobileNetV2 (width 1.0) as in torchvision."""

from __future__ import annotations

from tvm.relax.frontend import nn

from optifx_tvm.zoo.layers import (
    BatchNorm2d,
    Conv2d,
    ConvBnAct,
    Dropout,
    ReLU6,
    Sequential,
    global_average,
)

# expansion, channels, repetitions, stride of the first
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_LAST = 1280


class InvertedResidual(nn.Module):
    """1x1 widening (unless ``expansion`` is 1), depthwise 3x3, linear 1x1; short cut if it fits."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        self.shortcut = stride == 1 and in_channels == out_channels
        wide = in_channels * expansion
        self.conv = Sequential()
        if expansion != 1:
            self.conv.append(ConvBnAct(in_channels, wide, 1, ReLU6()))
        self.conv.append(ConvBnAct(wide, wide, 3, ReLU6(), stride, groups=wide))
        self.conv.append(Conv2d(wide, out_channels, 1))
        self.conv.append(BatchNorm2d(out_channels))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.conv(x)
        return nn.op.add(x, y) if self.shortcut else y


class MobileNetV2(nn.Module):
    """(N, 3, H, W) -> (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        channels = 32
        self.features = Sequential(ConvBnAct(3, channels, 3, ReLU6(), stride=2))
        for expansion, out_channels, count, stride in _STAGES:
            for i in range(count):
                block = InvertedResidual(channels, out_channels, stride if i == 0 else 1, expansion)
                self.features.append(block)
                channels = out_channels
        self.features.append(ConvBnAct(channels, _LAST, 1, ReLU6()))
        self.classifier = Sequential(Dropout(), nn.Linear(_LAST, 1000))

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        return self.classifier(global_average(self.features(data)))
