"""The choice of a tile for a group: the cheapest of a small set of candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optifx_tvm.analysis.channels import ChannelError, legal_slices
from optifx_tvm.analysis.footprint import GroupAnalysis
from optifx_tvm.analysis.region import RegionError
from optifx_tvm.cost_model.base import CostModel
from optifx_tvm.device import DeviceSpec
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Rejected, Tile

CPU_HEIGHTS = (1, 2, 3, 4, 7, 8, 14, 16, 28, 56)
GPU_HEIGHTS = (1, 2, 4, 7, 8, 14)
GPU_WIDTHS = (7, 8, 14, 16, 28, 56)
GPU_POSITIONS = (12, 512)
"""Fewest and most positions of a tile that are worth trying (fewer only if the image is small)."""
LIKELY = 2
"""Numbers of channel slices tried for every tile size."""
REFINED = 2
"""Sizes for which all numbers of channel slices are tried."""
BLOCKS_PER_CORE = 2
"""Tasks for each core of a CPU, so that the last ones to finish do not leave others idle."""


def tile_candidates(group: ConvGraph, device: DeviceSpec) -> Iterator[tuple[Tile, ...]]:
    """For every tile size to try its variants by channel slices, the most likely one first.

    CPU: full rows. First come the fewest slices that give every unit work and a single slice, then
    the two neighbours of the former.
    """
    batch, height, width = group.shape(group.nodes[-1].name)[:3]
    slices = legal_slices(group)
    wanted = device.units * (BLOCKS_PER_CORE if device.kind == "cpu" else 1)
    for rows, cols in _sizes(height, width, device, _granule(group)):
        tiles = batch * -(-height // rows) * -(-width // cols)
        first = next((i for i, s in enumerate(slices) if tiles * s >= wanted), len(slices) - 1)
        counts = (slices[first], 1, *slices[max(first - 1, 0) : first + 2])
        if device.kind == "gpu":  # nearly one wave is better than hardly two
            counts = (slices[max(first - 1, 0)], *counts)
        yield tuple(Tile(rows, cols, count) for count in dict.fromkeys(counts))


def _granule(group: ConvGraph) -> int:
    """What the sides of tiles are multiples of, so that they start at whole positions of the
    inputs of transposed convolutions."""
    strides = [n.window.strides for n in group.nodes if n.op == "conv2d_transpose"]
    return math.lcm(*(s for pair in strides for s in pair))


def _sizes(height: int, width: int, device: DeviceSpec, granule: int) -> list[tuple[int, int]]:
    if device.kind == "cpu":
        return [(h, width) for h in _extents(height, (*CPU_HEIGHTS, height), granule)]
    heights = _extents(height, GPU_HEIGHTS, granule)
    widths = _extents(width, (*GPU_WIDTHS, width), granule)
    least = min(GPU_POSITIONS[0], height * width)
    sizes = [(h, w) for h in heights for w in widths]
    kept = [(h, w) for h, w in sizes if least <= h * w <= GPU_POSITIONS[1]]
    return kept or [(heights[-1], widths[-1])]


def _extents(size: int, wanted: tuple[int, ...], granule: int) -> list[int]:
    """For every number of tiles that the wanted extents lead to, the least extent that gives it."""
    found = set()
    for extent in wanted:
        tiles = -(-size // min(extent * granule, size))
        least = -(-size // tiles)
        found.add(min(-(-least // granule) * granule, size))
    return sorted(found)


def best_tile(
    group: ConvGraph, device: DeviceSpec, cost_model: CostModel
) -> tuple[Tile, float] | Rejected:
    """The cheapest tile and its predicted time in microseconds, or why there is none.

    Of equally cheap tiles the first candidate is taken.
    """
    reasons: list[str] = []
    too_big: list[Tile] = []

    def predict(tile: Tile) -> float:
        if any(_contains(tile, other) for other in too_big):
            return math.inf
        try:
            us = cost_model.predict(group, tile)
        except (RegionError, ChannelError) as error:
            reasons.append(str(error))
            return math.inf
        if math.isinf(us):
            too_big.append(tile)
        return us

    sizes = list(tile_candidates(group, device))
    tried = [
        (predict(tile), k, tile) for k, variants in enumerate(sizes) for tile in variants[:LIKELY]
    ]
    ranked = sorted((t for t in tried if t[0] < math.inf), key=lambda t: t[:2])
    # Other numbers of slices only for the best sizes, unless none of the sizes is possible.
    again = [k for _, k, _ in ranked[:REFINED]] or range(len(sizes))
    options = [(us, tile) for us, _, tile in ranked]
    options += [(predict(t), t) for k in dict.fromkeys(again) for t in sizes[k][LIKELY:]]
    us, tile = min(options, key=lambda option: option[0], default=(math.inf, Tile(1, 1)))
    if us < math.inf:
        return tile, us
    if len(group.nodes) == 1:
        return _whole_image(group, cost_model)
    names = tuple(node.name for node in group.nodes)
    return Rejected(names, reasons[0] if reasons else _too_big(group, device))


def _contains(tile: Tile, other: Tile) -> bool:
    """Is ``tile`` at least as large, so that it does not fit if ``other`` does not?"""
    return (
        tile.height >= other.height
        and tile.width >= other.width
        and tile.channel_slices <= other.channel_slices
    )


def _whole_image(group: ConvGraph, cost_model: CostModel) -> tuple[Tile, float]:
    """The last resort of an operator alone: always possible."""
    height, width = group.shape(group.nodes[-1].name)[1:3]
    tile = Tile(height, width)
    return tile, cost_model.predict(group, tile)


def _too_big(group: ConvGraph, device: DeviceSpec) -> str:
    analysis = GroupAnalysis(group, device)
    variants = min(tile_candidates(group, device), key=lambda v: v[0].height * v[0].width)
    least = min(analysis.footprint(tile).shared_bytes for tile in variants)
    where = "shared memory" if device.kind == "gpu" else "L2 cache"
    kilobytes, limit = least / 1024, analysis.capacity / 1024
    return f"its smallest tile needs {kilobytes:.0f} KB of {where}, a block has {limit:.0f} KB"
