"""Shared memory of scheduled CUDA kernels, and smaller tiles where it is not enough."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from optifx_tvm.analysis.channels import legal_slices
from optifx_tvm.analysis.legality import tile_fault
from optifx_tvm.analysis.placement import pitch_of
from optifx_tvm.analysis.warp_split import result_pitch
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.nests import RESULT
from optifx_tvm.schedules.tile_program import unravel

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
            *outer, channels = [int(e) for e in buffer.ty.shape[OUTER:]]
            size = np.dtype(str(buffer.ty.dtype)).itemsize
            is_result = buffer.name.endswith(RESULT)
            pitch = result_pitch(channels) if is_result else pitch_of(channels, size)
            total += math.prod(outer) * pitch * size + ALIGNMENT
    return total


def keep_tiles_apart(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep every tile of a scheduled tile program alive to the end of its kernel.

    TVM places a tile over one that is read for the last time where the new one is first written,
    after it has put in the barriers: a thread may then overwrite what another has yet to read
    (MergeSharedMemoryAllocations runs after ThreadSync). A last barrier that names all tiles, which
    the code generator ignores, makes them differ in place.
    """
    sch = s_tir.Schedule(func)
    buffers = [
        buffer
        for buffer in sch.get(sch.get_sblock("root")).alloc_buffers
        if buffer.ty.storage_scope == "shared.dyn"
    ]
    if len(buffers) < 2:
        return func

    def extend(loop: tirx.For) -> tirx.For:
        if loop.thread_binding is None or loop.thread_binding.thread_tag != "blockIdx.x":
            return loop
        outer = unravel(loop.loop_var, tuple(int(e) for e in buffers[0].ty.shape[:OUTER]))
        zero = tirx.IntImm("int64", 0)
        named = [buffer[(*outer, *[zero] * (len(buffer.ty.shape) - OUTER))] for buffer in buffers]
        barrier = tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared.dyn", *named)
        nests = loop.body.seq if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
        body = tirx.SeqStmt([*nests, tirx.Evaluate(barrier)])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, extend)))


def smaller_tiles(group: ConvGraph, tile: Tile) -> Iterator[Tile]:
    """Legal tiles that need ever less shared memory, ``tile`` itself first: the longer side is
    halved until one position is left, then the channels are cut into more slices."""
    for slices in (s for s in legal_slices(group) if s >= tile.channel_slices):
        height, width = tile.height, tile.width
        while True:
            found = Tile(height, width, slices)
            if tile_fault(group, found) is None:
                yield found
            if height == width == 1:
                break
            if height >= width:
                height = -(-height // 2)
            else:
                width = -(-width // 2)
