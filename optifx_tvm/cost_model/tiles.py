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
GPU_POSITIONS = (32, 512)
"""Fewest and most positions of a tile that are worth trying (fewer only if the image is small)."""
BLOCKS_PER_CORE = 2
"""Tasks for each core of a CPU, so that the last ones to finish do not leave others idle."""


def tile_candidates(group: ConvGraph, device: DeviceSpec) -> Iterator[Tile]:
    """Tiles to try, largest number of positions last; deterministic.

    CPU: full rows. For every tile the numbers of channel slices are: 1, the smallest that gives
    every unit work, and its two neighbours.
    """
    batch, height, width = group.shape(group.nodes[-1].name)[:3]
    slices = legal_slices(group)
    wanted = device.units * (BLOCKS_PER_CORE if device.kind == "cpu" else 1)
    for rows, cols in _sizes(height, width, device):
        tiles = batch * -(-height // rows) * -(-width // cols)
        first = next((i for i, s in enumerate(slices) if tiles * s >= wanted), len(slices) - 1)
        for count in sorted({1, *slices[max(first - 1, 0) : first + 2]}):
            yield Tile(rows, cols, count)


def _sizes(height: int, width: int, device: DeviceSpec) -> list[tuple[int, int]]:
    if device.kind == "cpu":
        return [(h, width) for h in sorted({min(h, height) for h in (*CPU_HEIGHTS, height)})]
    heights = sorted({min(h, height) for h in GPU_HEIGHTS})
    widths = sorted({min(w, width) for w in (*GPU_WIDTHS, width)})
    least = min(GPU_POSITIONS[0], height * width)
    sizes = [(h, w) for h in heights for w in widths]
    kept = [(h, w) for h, w in sizes if least <= h * w <= GPU_POSITIONS[1]]
    return kept or [max(sizes, key=lambda size: size[0] * size[1])]


def best_tile(
    group: ConvGraph, device: DeviceSpec, cost_model: CostModel
) -> tuple[Tile, float] | Rejected:
    """The cheapest tile and its predicted time in microseconds, or why there is none.

    Of equally cheap tiles the first candidate is taken.
    """
    best: tuple[Tile, float] | None = None
    reason = ""
    for tile in tile_candidates(group, device):
        try:
            us = cost_model.predict(group, tile)
        except (RegionError, ChannelError) as error:
            reason = reason or str(error)
            continue
        if math.isinf(us):
            continue
        if best is None or us < best[1]:
            best = (tile, us)
    if best is not None:
        return best
    names = tuple(node.name for node in group.nodes)
    return Rejected(names, reason or _too_big(group, device))


def _too_big(group: ConvGraph, device: DeviceSpec) -> str:
    analysis = GroupAnalysis(group, device)
    least = min(analysis.footprint(tile).shared_bytes for tile in tile_candidates(group, device))
    where = "shared memory" if device.kind == "gpu" else "L2 cache"
    kilobytes, limit = least / 1024, analysis.capacity / 1024
    return f"its smallest tile needs {kilobytes:.0f} KB of {where}, a block has {limit:.0f} KB"


class TileChooser:
    """``best_tile`` for one device and cost model, remembered by the group's structural hash."""

    def __init__(self, device: DeviceSpec, cost_model: CostModel) -> None:
        self.device = device
        self.cost_model = cost_model
        self._known: dict[str, tuple[Tile, float] | str] = {}

    def __call__(self, group: ConvGraph) -> tuple[Tile, float] | Rejected:
        """The cheapest tile and its time, or why there is none."""
        key = group.structural_hash
        if key not in self._known:
            found = best_tile(group, self.device, self.cost_model)
            self._known[key] = found.reason if isinstance(found, Rejected) else found
        known = self._known[key]
        if isinstance(known, str):
            return Rejected(tuple(node.name for node in group.nodes), known)
        return known
