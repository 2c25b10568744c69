"""The pieces that are easily got wrong, against the same in torch (skipped where it is absent)."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax.frontend import nn

from optifx_tvm.zoo import layers, nasnet
from tests.support.running import RELATIVE_ERROR, image, module_of, relative, run_onnx, run_tvm

torch = pytest.importorskip("torch", reason="torch is not installed")
F = torch.nn.functional


class TwoInputs(nn.Module):
    """A NASNet cell whose inputs are both made of ``data`` (the second one at twice the size)."""

    def __init__(self, cell: nn.Module, halved: bool) -> None:
        super().__init__()
        self.cell, self.halved = cell, halved
        self.shrink = layers.MaxPool2d(1, 2)

    def forward(self, data: nn.Tensor) -> nn.Tensor:
        return self.cell(self.shrink(data) if self.halved else data, data)


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (10, 11)])
@pytest.mark.parametrize("kind", ["first", "reduction", "counting"])
def test_nasnet_cells_against_torch(kind, size):
    """The cells as timm writes them (explicit pads, shifted paths), in torch's functions."""
    if kind == "first":
        cell = nasnet.NormalCell(6, 6, 4, "halved")
    else:
        cell = nasnet.ReductionCell(6, 6, 4, count_include_pad=kind == "counting")
    module, values = module_of(TwoInputs(cell, kind == "first"), (1, 6, *size), seed=3)
    reference = TorchCells({k: torch.from_numpy(v) for k, v in values.items()})
    x = image(1, 6, *size)
    data = torch.from_numpy(x)
    if kind == "first":
        want = reference.first(data[:, :, ::2, ::2], data)
    else:
        want = reference.reduction(data, data, count_include_pad=kind == "counting")
    assert relative(run_onnx(module, x)[0], want.numpy()) < RELATIVE_ERROR


class TorchCells:
    """timm's cells, with parameters by name."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def pad_same(self, x, kernel, stride, value=0.0):
        pads = []
        for n in reversed(x.shape[2:]):
            total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads, value=value)

    def bn(self, x, name):
        keys = ("running_mean", "running_var", "weight", "bias")
        mean, var, weight, bias = (self.values[f"cell.{name}.{key}"] for key in keys)
        return F.batch_norm(x, mean, var, weight, bias, eps=1e-3)

    def act_conv_bn(self, x, name):
        y = F.conv2d(x.relu(), self.values[f"cell.{name}.conv.weight"])
        return self.bn(y, f"{name}.bn")

    def branch(self, x, name, stride=1):
        for i in (1, 2):
            separable = f"cell.{name}.separable_{i}"
            depthwise = self.values[f"{separable}.depthwise_conv2d.weight"]
            x = self.pad_same(x.relu(), depthwise.shape[2], stride)
            x = F.conv2d(x, depthwise, stride=stride, groups=len(depthwise))
            x = F.conv2d(x, self.values[f"{separable}.pointwise_conv2d.weight"])
            x, stride = self.bn(x, f"{name}.bn_sep_{i}"), 1
        return x

    def smooth(self, x):
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)

    def first(self, x, x_prev):
        weights = [self.values[f"cell.path_{i}.conv.weight"] for i in (1, 2)]
        paths = (x_prev.relu(), F.pad(x_prev.relu(), (-1, 1, -1, 1)))
        halves = [
            F.conv2d(F.avg_pool2d(path, 1, 2), weight)
            for path, weight in zip(paths, weights, strict=True)
        ]
        left, right = (
            self.bn(torch.cat(halves, 1), "final_path_bn"),
            self.act_conv_bn(x, "conv_1x1"),
        )
        return torch.cat(
            [
                left,
                self.branch(right, "comb_iter_0_left") + self.branch(left, "comb_iter_0_right"),
                self.branch(left, "comb_iter_1_left") + self.branch(left, "comb_iter_1_right"),
                self.smooth(right) + left,
                2 * self.smooth(left),
                self.branch(right, "comb_iter_4_left") + right,
            ],
            1,
        )

    def reduction(self, x, x_prev, count_include_pad):
        left, right = self.act_conv_bn(x_prev, "conv_prev_1x1"), self.act_conv_bn(x, "conv_1x1")
        largest = F.max_pool2d(self.pad_same(right, 3, 2, value=-float("inf")), 3, 2)
        average = F.avg_pool2d(self.pad_same(right, 3, 2), 3, 2)
        if not count_include_pad:
            inside = torch.ones_like(right)
            average = average / F.avg_pool2d(self.pad_same(inside, 3, 2), 3, 2)
        y0 = self.branch(right, "comb_iter_0_left", 2) + self.branch(left, "comb_iter_0_right", 2)
        y1 = largest + self.branch(left, "comb_iter_1_right", 2)
        y2 = average + self.branch(left, "comb_iter_2_right", 2)
        y3 = self.smooth(y0) + y1
        return torch.cat([y1, y2, y3, self.branch(y0, "comb_iter_4_left") + largest], 1)


def test_transposed_convolution_against_torch():
    module, values = module_of(layers.ConvTranspose2d(6, 4, 2, stride=2), (2, 6, 5, 3))
    x = image(2, 6, 5, 3)
    weight, bias = (torch.from_numpy(values[key]) for key in ("weight", "bias"))
    want = F.conv_transpose2d(torch.from_numpy(x), weight, bias, stride=2)
    assert relative(run_tvm(module, x), want.numpy()) < RELATIVE_ERROR
    assert relative(run_onnx(module, x)[0], want.numpy()) < RELATIVE_ERROR


@pytest.mark.parametrize("size", [2, 5, 6, 7, 8])
def test_ceil_mode_against_torch(size):
    module, _ = module_of(layers.MaxPool2d(3, 2, ceil_mode=True), (1, 2, size, size + 1))
    x = image(1, 2, size, size + 1)
    want = F.max_pool2d(torch.from_numpy(x), 3, 2, ceil_mode=True).numpy()
    assert np.array_equal(run_tvm(module, x), want)
    assert np.array_equal(run_onnx(module, x)[0], want)
