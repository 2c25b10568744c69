"""The cost model's answers to the questions that fusion depends on."""

from __future__ import annotations

import math

import pytest

from optifx_tvm.cost_model.roofline import RooflineCostModel
from optifx_tvm.cost_model.tiles import best_tile, tile_candidates
from optifx_tvm.device import A100, GENERIC_CPU, H200, ORIN, RTX_4090, DeviceSpec
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Rejected, Tile
from tests.support import blocks
from tests.support.groups import GroupBuilder


def _gain(graph: ConvGraph, device: DeviceSpec) -> float:
    """Time of the operators apart over time of them fused; 0 if they can't be fused."""
    model = RooflineCostModel(device)
    fused = best_tile(graph, device, model)
    if isinstance(fused, Rejected):
        return 0.0
    apart = 0.0
    for node in graph.nodes:
        alone = best_tile(graph.subgraph([node.name]), device, model)
        assert not isinstance(alone, Rejected)
        apart += alone[1]
    return apart / fused[1]


FUSE = {
    "fire": blocks.fire(55, 64, 16, 64),
    "inverted residual": blocks.inverted_residual(56, 24, 144, residual=False),
    "depthwise and 1x1": blocks.inverted_residual(112, 16, 32, residual=False).subgraph(
        ["t1", "t2"]
    ),
    "3x3 and 1x1": blocks.convolutions(112, 32, 3, 1),
}
KEEP_APART = {
    "wide 3x3 at 7x7": blocks.convolutions(7, 512, 3, 3),
    "wide 3x3 at 14x14": blocks.convolutions(14, 256, 3, 3),
    "bottleneck at 14x14": blocks.bottleneck(14, 1024, 256),
    "bottleneck at 7x7": blocks.bottleneck(7, 2048, 512),
}


@pytest.mark.parametrize("name", FUSE)
def test_fusing_pays_on_the_cpu(name):
    assert _gain(FUSE[name], GENERIC_CPU) > 1.0


@pytest.mark.parametrize("name", KEEP_APART)
@pytest.mark.parametrize("device", [GENERIC_CPU, H200, A100, ORIN], ids=lambda d: d.name)
def test_recompute_and_idle_units_are_not_worth_it(name, device):
    assert _gain(KEEP_APART[name], device) < 1.0


@pytest.mark.parametrize("device", [H200, A100, RTX_4090], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(blocks.fire(55, 64, 16, 64, "float16"), id="fire55"),
        pytest.param(blocks.fire(27, 256, 32, 128, "float16"), id="fire27"),
        pytest.param(blocks.inverted_residual(56, 24, 144, dtype="float16"), id="inverted"),
        pytest.param(blocks.stem(224, "float16"), id="stem"),
    ],
)
def test_fusing_pays_on_gpus_in_half_precision(graph, device):
    assert _gain(graph, device) > 1.02


def test_fire_in_single_precision_on_a_gpu():
    assert _gain(blocks.fire(55, 64, 16, 64), H200) > 1.3


def test_convolution_and_1x1_where_tensor_cores_are_fast():
    assert _gain(blocks.convolutions(112, 64, 3, 1, dtype="float16"), H200) > 1.1


def test_measured_kernels_are_predicted_within_a_factor():
    """Our own kernels on an H200, microseconds, medians in CUDA graphs (2026-12-01)."""
    measured = [
        (blocks.fire(13, 384, 48, 192, "float16"), 6.0),
        (blocks.convolutions(56, 64, 3, dtype="float16"), 4.1),
        (blocks.convolutions(28, 128, 3, dtype="float16"), 3.9),
        (blocks.convolutions(14, 256, 3, dtype="float16"), 4.6),
        (blocks.convolutions(7, 512, 3, dtype="float16"), 5.7),
        (blocks.convolutions(56, 64, 3), 11.7),
        (blocks.convolutions(28, 128, 3), 12.8),
        (blocks.convolutions(14, 256, 3), 12.8),
        (blocks.convolutions(7, 512, 3), 16.7),
    ]
    for graph, us in measured:
        found = best_tile(graph, H200, RooflineCostModel(H200))
        assert not isinstance(found, Rejected)
        assert us / 1.5 < found[1] < us * 1.5


@pytest.mark.parametrize("device", [GENERIC_CPU, H200], ids=lambda d: d.kind)
def test_more_work_takes_longer(device):
    model = RooflineCostModel(device)
    times = [
        best_tile(blocks.convolutions(56, channels, 3), device, model)
        for channels in (32, 64, 128, 256)
    ]
    microseconds = [t[1] for t in times if not isinstance(t, Rejected)]
    assert microseconds == sorted(microseconds)
    assert all(us > device.launch_us for us in microseconds)


def test_idle_cores_cost():
    model = RooflineCostModel(GENERIC_CPU)
    group = blocks.convolutions(28, 64, 3)
    assert model.predict(group, Tile(28, 28)) > 2 * model.predict(group, Tile(4, 28))


def test_what_does_not_fit_is_infinite_unless_alone():
    model = RooflineCostModel(ORIN)
    assert math.isinf(model.predict(blocks.convolutions(56, 256, 3, 3), Tile(28, 28)))
    assert math.isfinite(model.predict(blocks.convolutions(56, 256, 3), Tile(28, 28)))


def test_best_tile_says_why_not():
    found = best_tile(blocks.convolutions(14, 2048, 3, 3), ORIN, RooflineCostModel(ORIN))
    assert isinstance(found, Rejected)
    assert found.nodes == ("t0", "t1")
    assert "of shared memory, a block has 161 KB" in found.reason
    b = GroupBuilder()
    x = b.input(56, 56, 8)
    group = b.graph(b.conv(x, 8), b.pool(x, "max", 3, 2, (1, 1, 1, 1)))
    found = best_tile(group, GENERIC_CPU, RooflineCostModel(GENERIC_CPU))
    assert isinstance(found, Rejected) or found[0].height == 28


@pytest.mark.parametrize("device", [GENERIC_CPU, H200], ids=lambda d: d.kind)
def test_every_operator_alone_has_a_tile(device):
    model = RooflineCostModel(device)
    for stride in (1, 2, 3, 5):
        b = GroupBuilder()
        b.transposed(b.input(23, 17, 16), 16, stride + 1, stride)
        assert not isinstance(best_tile(b.graph(), device, model), Rejected)
    b = GroupBuilder()
    b.conv(b.input(3, 5, 4096), 4096, 3)
    assert not isinstance(best_tile(b.graph(), device, model), Rejected)


def test_tile_candidates_are_balanced_and_legal():
    b = GroupBuilder()
    b.conv(b.input(28, 28, 16), 64, 3)
    variants = list(tile_candidates(b.graph(), GENERIC_CPU))
    heights = [v[0].height for v in variants]
    assert heights == [1, 2, 3, 4, 7, 14, 28]
    assert all(tile.width == 28 for v in variants for tile in v)
    # 4 cores: 7 tiles are not 8 tasks, two slices make them so.
    assert variants[heights.index(4)][0] == Tile(4, 28, 2)
    gpu = [tile for v in tile_candidates(b.graph(), H200) for tile in v]
    assert len(gpu) == len(set(gpu))
    assert all(12 <= t.height * t.width <= 512 for t in gpu)
