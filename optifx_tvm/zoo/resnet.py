"""ResNet-18 and ResNet-50 as in torchvision (the stride of a bottleneck is in its 3x3)."""

from __future__ import annotations

from tvm.relax.frontend import nn

from optifx_tvm.zoo.layers import BatchNorm2d, Conv2d, MaxPool2d, Sequential, global_average


class Residual(nn.Module):
    """Convolutions ``conv1, bn1, conv2, ...`` beside a short cut; ReLU after the addition.

    ``kernels`` (3, 3) is the basic block, (1, 3, 1) the bottleneck, which widens ``expansion``
    times in its last convolution. The first 3x3 has the stride.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, kernels: tuple[int, ...], expansion: int
    ) -> None:
        super().__init__()
        self.depth = len(kernels)
        out_channels = width * expansion
        strided = kernels.index(3)
        channels = in_channels
        for i, kernel in enumerate(kernels):
            out = out_channels if i == self.depth - 1 else width
            conv = Conv2d(channels, out, kernel, stride if i == strided else 1, kernel // 2)
            setattr(self, f"conv{i + 1}", conv)
            setattr(self, f"bn{i + 1}", BatchNorm2d(out))
            channels = out
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = Sequential(
                Conv2d(in_channels, out_channels, 1, stride), BatchNorm2d(out_channels)
            )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            if i < self.depth:
                y = nn.op.relu(y)
        shortcut = self.downsample(x) if self.downsample else x
        return nn.op.relu(nn.op.add(y, shortcut))


class ResNet(nn.Module):
    """(N, 3, H, W) -> (N, 1000); ``blocks`` a stage, four stages of width 64 to 512."""

    def __init__(self, blocks: tuple[int, ...], kernels: tuple[int, ...], expansion: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(3, 64, 7, 2, 3)
        self.bn1 = BatchNorm2d(64)
        self.maxpool = MaxPool2d(3, 2, 1)
        self.stages = len(blocks)
        channels = 64
        for stage, count in enumerate(blocks):
            width, stride = 64 << stage, 1 if stage == 0 else 2
            layer = Sequential()
            for i in range(count):
                layer.append(Residual(channels, width, stride if i == 0 else 1, kernels, expansion))
                channels = width * expansion
            setattr(self, f"layer{stage + 1}", layer)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        x = self.maxpool(nn.op.relu(self.bn1(self.conv1(data))))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(global_average(x))


def resnet18() -> ResNet:
    return ResNet((2, 2, 2, 2), kernels=(3, 3), expansion=1)


def resnet50() -> ResNet:
    return ResNet((3, 4, 6, 3), kernels=(1, 3, 1), expansion=4)
