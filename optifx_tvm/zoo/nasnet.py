"""NASNet-A: Large (6 @ 4032) as in timm, Mobile (4 @ 1056) as in pretrained-models.

Parameter names are those two packages' (they agree). Padding is TensorFlow's "same" throughout.
timm's stride-2 average pools count the padding, Mobile's do not; Mobile's "pad, then drop the
first row" constructions are exactly "same" at 224 (and wherever they give fitting shapes).
"""

from __future__ import annotations

from typing import Literal

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.core import wrap_nested

from optifx_tvm.zoo.layers import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    MaxPool2d,
    concat,
    global_average,
    spatial,
)

_EPS = 1e-3


class ConvBn(nn.Module):
    """The stem: 3x3 convolution of stride 2 without padding."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(3, out_channels, 3, stride=2)
        self.bn = BatchNorm2d(out_channels, _EPS)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.bn(self.conv(x))


class ActConvBn(nn.Module):
    """ReLU, 1x1 convolution, batch norm."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, 1)
        self.bn = BatchNorm2d(out_channels, _EPS)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.bn(self.conv(nn.op.relu(x)))


class SeparableConv2d(nn.Module):
    """Depthwise, then 1x1, with nothing in between."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.depthwise_conv2d = Conv2d(
            in_channels, in_channels, kernel, stride, "same", groups=in_channels
        )
        self.pointwise_conv2d = Conv2d(in_channels, out_channels, 1)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.pointwise_conv2d(self.depthwise_conv2d(x))


class BranchSeparables(nn.Module):
    """(ReLU, separable convolution, batch norm) twice.

    The stride is the first one's; it also widens the channels where the input has another width
    (only in the first stem cell).
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.separable_1 = SeparableConv2d(in_channels, out_channels, kernel, stride)
        self.bn_sep_1 = BatchNorm2d(out_channels, _EPS)
        self.separable_2 = SeparableConv2d(out_channels, out_channels, kernel, 1)
        self.bn_sep_2 = BatchNorm2d(out_channels, _EPS)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.bn_sep_1(self.separable_1(nn.op.relu(x)))
        return self.bn_sep_2(self.separable_2(nn.op.relu(x)))


class PathConv(nn.Module):
    """Every second pixel, then a 1x1 convolution; with ``shift`` counted from (1, 1).

    A shifted path reads a row and a column of zeros beyond an image of odd size.
    """

    def __init__(self, in_channels: int, out_channels: int, shift: bool) -> None:
        super().__init__()
        self.shift = shift
        self.every_second = AvgPool2d(1, 2)
        self.conv = Conv2d(in_channels, out_channels, 1)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        if self.shift:
            height, width = spatial(x)
            cut = relax.op.strided_slice(x._expr, [2, 3], [1, 1], [height, width])
            if height % 2 or width % 2:
                cut = relax.op.nn.pad(cut, [0, 0, 0, 0, 0, height % 2, 0, width % 2])
            x = wrap_nested(cut, "shifted")
        return self.conv(self.every_second(x))


Previous = Literal["raw", "halved", "squeezed"]


class Cell(nn.Module):
    """What the two kinds of cell share: how their two inputs become ``channels`` wide.

    ``x`` passes a 1x1 convolution. ``x_prev``, the output of the cell before, is taken ``"raw"``,
    ``"squeezed"`` by a 1x1 convolution or, where it is twice as large as ``x``, ``"halved"``: two
    paths that see every second pixel, one of them shifted by a pixel.
    """

    def __init__(
        self, prev_channels: int, in_channels: int, channels: int, previous: Previous
    ) -> None:
        super().__init__()
        self.previous = previous
        self.conv_1x1 = ActConvBn(in_channels, channels)
        if previous == "squeezed":
            self.conv_prev_1x1 = ActConvBn(prev_channels, channels)
        elif previous == "halved":
            self.path_1 = PathConv(prev_channels, channels // 2, shift=False)
            self.path_2 = PathConv(prev_channels, channels // 2, shift=True)
            self.final_path_bn = BatchNorm2d(channels, _EPS)

    def adapt(self, x: nn.Tensor, x_prev: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        if self.previous == "squeezed":
            x_prev = self.conv_prev_1x1(x_prev)
        elif self.previous == "halved":
            x_prev = nn.op.relu(x_prev)
            x_prev = self.final_path_bn(concat([self.path_1(x_prev), self.path_2(x_prev)]))
        return self.conv_1x1(x), x_prev


class NormalCell(Cell):
    """Keeps the size of ``x``: -> 6 * ``channels``. ``"halved"`` is timm's ``FirstCell``."""

    def __init__(
        self,
        prev_channels: int,
        in_channels: int,
        channels: int,
        previous: Previous = "squeezed",
    ) -> None:
        super().__init__(prev_channels, in_channels, channels, previous)
        self.comb_iter_0_left = BranchSeparables(channels, channels, 5, 1)
        self.comb_iter_0_right = BranchSeparables(channels, channels, 3, 1)
        self.comb_iter_1_left = BranchSeparables(channels, channels, 5, 1)
        self.comb_iter_1_right = BranchSeparables(channels, channels, 3, 1)
        self.comb_iter_4_left = BranchSeparables(channels, channels, 3, 1)
        self.smooth = AvgPool2d(3, 1, "same")

    def forward(self, x: nn.Tensor, x_prev: nn.Tensor) -> nn.Tensor:
        x, prev = self.adapt(x, x_prev)
        y0 = nn.op.add(self.comb_iter_0_left(x), self.comb_iter_0_right(prev))
        y1 = nn.op.add(self.comb_iter_1_left(prev), self.comb_iter_1_right(prev))
        y2 = nn.op.add(self.smooth(x), prev)
        y3 = nn.op.add(self.smooth(prev), self.smooth(prev))
        y4 = nn.op.add(self.comb_iter_4_left(x), x)
        return concat([prev, y0, y1, y2, y3, y4])


class ReductionCell(Cell):
    """Halves the size of ``x``: -> 4 * ``channels``. Also the two cells of the stem."""

    def __init__(
        self,
        prev_channels: int,
        in_channels: int,
        channels: int,
        previous: Previous = "squeezed",
        count_include_pad: bool = False,
    ) -> None:
        super().__init__(prev_channels, in_channels, channels, previous)
        prev_channels = prev_channels if previous == "raw" else channels
        self.comb_iter_0_left = BranchSeparables(channels, channels, 5, 2)
        self.comb_iter_0_right = BranchSeparables(prev_channels, channels, 7, 2)
        self.comb_iter_1_right = BranchSeparables(prev_channels, channels, 7, 2)
        self.comb_iter_2_right = BranchSeparables(prev_channels, channels, 5, 2)
        self.comb_iter_4_left = BranchSeparables(channels, channels, 3, 1)
        self.max_pool = MaxPool2d(3, 2, "same")
        self.avg_pool = AvgPool2d(3, 2, "same", count_include_pad)
        self.smooth = AvgPool2d(3, 1, "same")

    def forward(self, x: nn.Tensor, x_prev: nn.Tensor) -> nn.Tensor:
        x, prev = self.adapt(x, x_prev)
        y0 = nn.op.add(self.comb_iter_0_left(x), self.comb_iter_0_right(prev))
        y1 = nn.op.add(self.max_pool(x), self.comb_iter_1_right(prev))
        y2 = nn.op.add(self.avg_pool(x), self.comb_iter_2_right(prev))
        y3 = nn.op.add(self.smooth(y0), y1)
        y4 = nn.op.add(self.comb_iter_4_left(y0), self.max_pool(x))
        return concat([y1, y2, y3, y4])


class NASNetA(nn.Module):
    """(N, 3, H, W) -> (N, 1000).

    Three stages of ``depth`` normal cells with a reduction cell between them. The first cell
    behind a reduction takes as previous one the output of the last cell before it or, with
    ``skip_reduction_input`` (Large), of the last but one. Cell numbers are those of Large: a
    smaller network leaves some out.
    """

    def __init__(
        self,
        stem: int,
        features: int,
        depth: int,
        skip_reduction_input: bool,
        count_include_pad: bool,
    ) -> None:
        super().__init__()
        width = features // 24
        self.skip_reduction_input = skip_reduction_input
        self.stages = [range(first, first + depth) for first in (0, 6, 12)]
        self.conv0 = ConvBn(stem)
        self.cell_stem_0 = ReductionCell(stem, stem, width // 4, "raw", count_include_pad)
        self.cell_stem_1 = ReductionCell(stem, width, width // 2, "halved", count_include_pad)
        prev_channels, channels = width, 2 * width
        for stage, cells in enumerate(self.stages):
            if stage:
                width *= 2
                reduction = ReductionCell(
                    channels, channels, width, count_include_pad=count_include_pad
                )
                setattr(self, f"reduction_cell_{stage - 1}", reduction)
                prev_channels, channels = channels, 4 * width
            for i in cells:
                previous = "halved" if i == cells[0] else "squeezed"
                cell = NormalCell(prev_channels, channels, width, previous)
                setattr(self, f"cell_{i}", cell)
                prev_channels, channels = channels, 6 * width
        self.last_linear = nn.Linear(channels, 1000)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        stem = self.conv0(data)
        prev = self.cell_stem_0(stem, stem)
        x = self.cell_stem_1(prev, stem)
        for stage, cells in enumerate(self.stages):
            if stage:
                reduced = getattr(self, f"reduction_cell_{stage - 1}")(x, prev)
                x, prev = reduced, (prev if self.skip_reduction_input else x)
            for i in cells:
                x, prev = getattr(self, f"cell_{i}")(x, prev), x
        return self.last_linear(global_average(nn.op.relu(x)))


def nasnet_a_mobile() -> NASNetA:
    return NASNetA(32, 1056, depth=4, skip_reduction_input=False, count_include_pad=False)


def nasnet_a_large() -> NASNetA:
    return NASNetA(96, 4032, depth=6, skip_reduction_input=True, count_include_pad=True)
