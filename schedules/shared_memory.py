"""Shared memory of scheduled CUDA kernels, and smaller tiles where it is not enough."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from tvm import s_tir, tirx

from optifx_tvm.analysis.channels import ChannelError, channel_plan, legal_slices
from optifx_tvm.analysis.region import RegionError, tile_space
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile

OUTER = 4
"""Leading axes of a tile buffer: one tile has its own slice of them."""
ALIGNMENT = 64
"""Bytes that TVM may add to a buffer when it packs them."""


def shared_bytes(func: tirx.PrimFunc) -> int:
    """Upper bound of the dynamic shared memory of a block of a scheduled tile program: TVM may let
    buffers that are not alive at the same time share their place."""
    sch = s_tir.Schedule(func)
    total = 0
    for buffer in sch.get(sch.get_sblock("root")).alloc_buffers:
        if buffer.ty.storage_scope == "shared.dyn":
            total += _tile_bytes([int(e) for e in buffer.ty.shape], str(buffer.ty.dtype))
    return total


def _tile_bytes(shape: list[int], dtype: str) -> int:
    *outer, channels = shape[OUTER:]
    # Pitches are rounded up by storage_align.
    pitch = -(-channels // 4) * 4
    return math.prod(outer) * pitch * np.dtype(dtype).itemsize + ALIGNMENT


def smaller_tiles(group: ConvGraph, tile: Tile) -> Iterator[Tile]:
    """Legal tiles that need ever less shared memory, ``tile`` itself first: the longer side is
    halved until one position is left, then the channels are cut into more slices."""
    for slices in (s for s in legal_slices(group) if s >= tile.channel_slices):
        height, width = tile.height, tile.width
        while True:
            found = Tile(height, width, slices)
            if _is_legal(group, found):
                yield found
            if height == width == 1:
                break
            if height >= width:
                height = -(-height // 2)
            else:
                width = -(-width // 2)


def _is_legal(group: ConvGraph, tile: Tile) -> bool:
    try:
        tile_space(group, (tile.height, tile.width))
        channel_plan(group, tile.channel_slices)
    except (RegionError, ChannelError):
        return False
    return True
