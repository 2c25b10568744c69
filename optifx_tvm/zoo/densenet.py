"""DenseNet-121 as in torchvision."""

from __future__ import annotations

from tvm.relax.frontend import nn

from optifx_tvm.zoo.layers import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    MaxPool2d,
    concat,
    global_average,
)

_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH
_BLOCKS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """All features so far -> ``_GROWTH`` more."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm1 = BatchNorm2d(in_channels)
        self.conv1 = Conv2d(in_channels, _BOTTLENECK, 1)
        self.norm2 = BatchNorm2d(_BOTTLENECK)
        self.conv2 = Conv2d(_BOTTLENECK, _GROWTH, 3, padding=1)

    def forward(self, features: list[nn.Tensor]) -> nn.Tensor:
        # torchvision concatenates the whole list anew in each layer, of one tensor too
        x = nn.op.relu(self.norm1(concat(features)))
        return self.conv2(nn.op.relu(self.norm2(self.conv1(x))))


class DenseBlock(nn.Module):
    def __init__(self, in_channels: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        for i in range(layers):
            setattr(self, f"denselayer{i + 1}", DenseLayer(in_channels + i * _GROWTH))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        features = [x]
        for i in range(self.layers):
            features.append(getattr(self, f"denselayer{i + 1}")(features))
        return concat(features)


class Transition(nn.Module):
    """Half the channels, half the size."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm = BatchNorm2d(in_channels)
        self.conv = Conv2d(in_channels, in_channels // 2, 1)
        self.pool = AvgPool2d(2, 2)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.pool(self.conv(nn.op.relu(self.norm(x))))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0 = Conv2d(3, 2 * _GROWTH, 7, 2, 3)
        self.norm0 = BatchNorm2d(2 * _GROWTH)
        self.pool0 = MaxPool2d(3, 2, 1)
        channels = 2 * _GROWTH
        for i, layers in enumerate(_BLOCKS, start=1):
            setattr(self, f"denseblock{i}", DenseBlock(channels, layers))
            channels += layers * _GROWTH
            if i < len(_BLOCKS):
                setattr(self, f"transition{i}", Transition(channels))
                channels //= 2
        self.norm5 = BatchNorm2d(channels)
        self.out_channels = channels

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.pool0(nn.op.relu(self.norm0(self.conv0(x))))
        for i in range(1, len(_BLOCKS) + 1):
            x = getattr(self, f"denseblock{i}")(x)
            if i < len(_BLOCKS):
                x = getattr(self, f"transition{i}")(x)
        return self.norm5(x)


class DenseNet121(nn.Module):
    """(N, 3, H, W) -> (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        self.classifier = nn.Linear(self.features.out_channels, 1000)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        return self.classifier(global_average(nn.op.relu(self.features(data))))
