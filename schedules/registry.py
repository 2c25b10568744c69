"""Which template schedules a group on a target."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.cpu import schedule_cpu
from optifx_tvm.schedules.cuda_simt import schedule_simt
from optifx_tvm.schedules.tile_program import build_tile_program


def schedule_group(group: ConvGraph, tile: Tile, target: Target) -> tirx.PrimFunc | None:
    """The group's kernel, scheduled with the default configuration; None if no template is for
    this kind of target."""
    if target.kind.name == "llvm":
        return schedule_cpu(build_tile_program(group, tile, outer="parallel"), target)
    if target.kind.name == "cuda":
        return schedule_simt(build_tile_program(group, tile, outer="blockIdx.x"))
    return None
