"""Which template schedules a group on a target, with which tile."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from optifx_tvm.analysis.footprint import GroupAnalysis
from optifx_tvm.analysis.products import is_matrix_packed
from optifx_tvm.analysis.warp_split import WARPS
from optifx_tvm.device import DeviceSpec
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.cpu import schedule_cpu
from optifx_tvm.schedules.cuda_simt import BLOCK, schedule_simt
from optifx_tvm.schedules.shared_memory import shared_bytes, smaller_tiles
from optifx_tvm.schedules.tile_program import TileProgram, build_tile_program


def schedule_group(group: ConvGraph, tile: Tile, target: Target) -> tirx.PrimFunc | None:
    """The group's kernel, scheduled with the default configuration; None if no template is for
    this kind of target.

    On a GPU the tile is made smaller until it fits into shared memory; a group of which not even
    one position fits keeps its intermediates in global memory.
    """
    if target.kind.name == "llvm":
        return schedule_cpu(build_tile_program(group, tile, outer="parallel"), target)
    if target.kind.name == "cuda":
        return _schedule_cuda(group, tile, DeviceSpec.from_target(target))
    return None


def _programs(group: ConvGraph, tile: Tile, device: DeviceSpec) -> list[TileProgram]:
    """The programs for the numbers of warps to choose from, the fastest by estimate first."""
    half = any(node.weight and is_matrix_packed(node, group) for node in group.nodes)
    if half and not device.has_mma:
        return [build_tile_program(group, tile, outer=BLOCK)]
    programs = []
    for warps in WARPS:
        programs.append(build_tile_program(group, tile, outer=BLOCK, warps=warps))
        if not programs[-1].clocks:  # no products, so that they are all the same
            break
    return sorted(programs, key=lambda program: program.clocks)


def _schedule_cuda(group: ConvGraph, tile: Tile, device: DeviceSpec) -> tirx.PrimFunc:
    analysis = GroupAnalysis(group, device)
    for candidate in smaller_tiles(group, tile):
        # Cheap estimate first: building a program takes a hundred times as long.
        if candidate != tile and analysis.footprint(candidate).shared_bytes > device.block_bytes:
            continue
        for program in _programs(group, candidate, device):
            scheduled = schedule_simt(program)
            if shared_bytes(scheduled) <= device.block_bytes:
                return scheduled
    program = build_tile_program(group, tile, outer=BLOCK)
    return schedule_simt(program, tiles_in="global")
