"""llvm template: every tile is a parallel task, every reduction a register block.

Phase 1  split the columns and channels of each nest into register blocks and vectors
Phase 2  compute each accumulator inside its store nest's register block; reduction loops outside,
         block unrolled, channels vectorised, so that LLVM keeps the accumulators in registers
The tiles run in parallel, which is written in the program already (``outer="parallel"``).
``compute_at`` is asked of the accumulators only: they have one writer and one reader. A tile or an
output may have several writers (channel remainder, borders, slices of a concat), for which TVM
would refuse to move the store nests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.target import Target

from optifx_tvm.analysis.products import LANES
from optifx_tvm.device import DeviceSpec
from optifx_tvm.schedules.tile_program import SLACK, Nest, TileProgram


@dataclass(frozen=True)
class RegisterBlock:
    """Columns and blocks of 16 channels that one accumulator covers."""

    columns: int
    channel_blocks: int


@dataclass(frozen=True)
class VectorUnit:
    """What the register blocks are sized for."""

    lanes: int
    """fp32 elements of a vector register."""
    registers: int


def vector_unit(target: Target) -> VectorUnit:
    """The vector unit of an llvm target."""
    bits = DeviceSpec.from_target(target).vector_bits
    many = bits == 512 or "aarch64" in str(target.attrs.get("mtriple", ""))
    return VectorUnit(bits // 32, 32 if many else 16)


ENOUGH_REUSE = 1.5
"""Multiply-adds per load at which the arithmetic, not the loads, is the limit. A weight counts as
two loads: it comes from the second-level cache, an input from the first. Measured on Zen 4: blocks
from here on run 3x3 and 1x1 convolutions at the same speed, unless they compute surplus columns
or spill."""


def register_block(nest: Nest, unit: VectorUnit) -> RegisterBlock:
    """The block with the least waste (surplus columns, more loads than arithmetic can hide) whose
    accumulators, weights and one input fit into the registers."""
    vectors = LANES // unit.lanes
    width, channels = nest.extents[1], nest.extents[2]
    blocks = max(channels // LANES, 1)

    def score(columns: int, count: int) -> float:
        used = width / (-(-width // columns) * columns)
        if nest.kind not in ("conv", "grouped"):
            return used * min(columns * count, unit.registers // 3)
        return used * min(columns * count / (columns + 2 * count), ENOUGH_REUSE)

    best = (0.0, RegisterBlock(1, 1))
    for channel_blocks in (4, 3, 2, 1):
        if blocks % channel_blocks:
            continue
        count = channel_blocks * vectors
        limit = max((unit.registers - 1 - count) // count, 1)
        for columns in range(1, min(limit, width, SLACK) + 1):
            found = score(columns, count)
            if found > best[0] * 1.001:
                best = (found, RegisterBlock(columns, channel_blocks))
    return best[1]


def schedule_cpu(program: TileProgram, target: Target) -> tirx.PrimFunc:
    """Apply the template's default configuration."""
    unit = vector_unit(target)
    sch = s_tir.Schedule(program.func)
    for nest in program.nests:
        if nest.compute is None:
            _schedule_copy(sch, sch.get_sblock(nest.block), unit)
        else:
            _schedule_reduction(sch, nest, register_block(nest, unit), unit)
    (func,) = (f for _, f in sch.mod.functions_items())
    return func


def _split_channels(sch: s_tir.Schedule, loop, channel_blocks: int, unit: VectorUnit):
    """Split a channel loop into (outer, vectors of the block, lanes); lanes get vectorised."""
    extent = int(sch.get(loop).extent)
    if extent < LANES:
        outer, inner, lanes = sch.split(loop, [1, 1, extent])
    else:
        inner_extent = channel_blocks * LANES // unit.lanes
        outer, inner, lanes = sch.split(loop, [None, inner_extent, unit.lanes])
    if int(sch.get(lanes).extent) > 1:
        sch.vectorize(lanes)
    return outer, inner, lanes


def _schedule_copy(sch: s_tir.Schedule, block, unit: VectorUnit) -> None:
    row, col, channel = sch.get_loops(block)[1:]
    _split_channels(sch, channel, 1, unit)
    # One long loop: LLVM would unroll short ones whole, which for the 20 parts of a concat takes
    # seconds to compile and runs no faster.
    sch.fuse(row, col)


def _schedule_reduction(
    sch: s_tir.Schedule, nest: Nest, block: RegisterBlock, unit: VectorUnit
) -> None:
    assert nest.compute is not None
    store, compute = sch.get_sblock(nest.block), sch.get_sblock(nest.compute)
    sch.set_scope(compute, 0, "local")
    # Phase 1
    row, col, channel = sch.get_loops(store)[1:]
    col_outer, col_inner = sch.split(col, [None, block.columns])
    outer, inner, lanes = _split_channels(sch, channel, block.channel_blocks, unit)
    sch.reorder(outer, row, col_outer, col_inner, inner, lanes)
    # Phase 2
    sch.compute_at(compute, col_outer, preserve_unit_loops=True)
    sch.unroll(col_inner)
    sch.unroll(inner)
    spatial = sch.get_loops(compute)[-(3 + len(nest.reduction)) :]
    row, col, channel, *reduction = spatial
    _, inner, lanes = _split_channels(sch, channel, block.channel_blocks, unit)
    sch.reorder(*reduction, row, col, inner, lanes)
    sch.unroll(col)
    sch.unroll(inner)
    sch.decompose_reduction(compute, reduction[0])
