"""How the warps of a CUDA block share a dense convolution: a matrix product of positions x channels
over steps of the reduction, each warp with one warp tile and one part of the steps.

The choice minimises an estimate in clocks of one SM: what binds of arithmetic, loads from L1 or
shared memory, weights from L2 and the latency of the chain of loads, a share of the rest, and the
sum over the parts of the reduction. Constants are for Hopper; only ratios matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from optifx_tvm.analysis.products import ProductShape

WARPS = (16, 8)
"""Warps of a block to choose from."""
RESULT_PITCH = (32, 8)
"""(factor, offset) of the pitch of a result, two columns a lane: its rows fall into different
banks."""
_L2_BYTES = 40
"""Bytes from L2 that one SM gets in a clock when all SMs ask."""
_L2_LATENCY = 700
"""Clocks from a load of weights to its use, the arithmetic of the step included."""
_EXPOSED = 0.4
"""Share of the terms that do not bind which is not hidden."""
_REGISTERS = 65536
"""Of an SM."""
_OTHER_REGISTERS = 40
"""Registers of a thread that hold neither operands nor accumulators."""
_PARTS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
"""Parts of the reduction to try."""


@dataclass(frozen=True)
class WarpSplit:
    """Warp tiles of one product, and how a thread holds its part of one."""

    rows: int
    """Positions of a warp tile."""
    columns: int
    """Channels of a warp tile."""
    row_tiles: int
    column_tiles: int
    parts: int
    """Parts of the reduction, summed by the nest that reads the result."""
    steps: int
    """Steps of the reduction in one part (the last part may have fewer)."""
    unroll: int
    """Steps whose loads are issued together; divides ``steps`` rounded up."""
    lanes: int
    """SIMT: threads of a warp along channels (the others are along positions)."""
    clocks: float
    """The estimate."""

    @property
    def result_bytes(self) -> int:
        """Shared memory for the parts of the result (float32, rows padded by up to 32 columns)."""
        columns = self.column_tiles * self.columns
        pitch = -(-(columns - RESULT_PITCH[1]) // RESULT_PITCH[0]) * RESULT_PITCH[0]
        return 4 * self.parts * self.row_tiles * self.rows * (pitch + RESULT_PITCH[1])

    @property
    def jobs(self) -> int:
        """Warp tiles times parts: what the warps share."""
        return self.row_tiles * self.column_tiles * self.parts


@cache
def choose_split(shape: ProductShape, warps: int) -> WarpSplit:
    """The split among the warps of a block with the least estimate."""
    registers = _REGISTERS // (warps * 32) - _OTHER_REGISTERS
    tiles = _half_tiles() if shape.half else _simt_tiles(shape.depth)
    options = [
        _option(shape, warps, tile, parts, registers)
        for tile in tiles
        if tile.accumulators + tile.operands <= registers
        for parts in _PARTS
        if parts <= min(warps, shape.steps)
    ]
    return min(options, key=lambda split: split.clocks)


@dataclass(frozen=True)
class _Tile:
    """A warp tile with the cost of one step: arithmetic and load clocks of an SM, registers of
    operands and accumulators of a thread."""

    rows: int
    columns: int
    lanes: int
    arithmetic: float
    loads: float
    operands: int
    accumulators: int


def _half_tiles() -> Iterator[_Tile]:
    for i in (1, 2, 4):
        for j in (1, 2, 4, 8):
            yield _Tile(16 * i, 8 * j, 4, 3.2 * i * j, 8.0 * i + 4.0 * j, 8 * i + 4 * j, 4 * i * j)


def _simt_tiles(depth: int) -> Iterator[_Tile]:
    for lanes, m, n in ((8, 8, 8), (8, 4, 8), (4, 4, 8), (8, 4, 4), (4, 4, 4), (4, 2, 4),
                        (16, 8, 4), (16, 4, 4)):  # fmt: skip
        rows, columns = 32 // lanes * m, lanes * n
        loads = 2.0 * m + 2.0 * depth * n / 4
        yield _Tile(rows, columns, lanes, depth * m * n / 4, loads, depth * (m + n), m * n)


def _option(shape: ProductShape, warps: int, tile: _Tile, parts: int, registers: int) -> WarpSplit:
    row_tiles, column_tiles = -(-shape.rows // tile.rows), -(-shape.columns // tile.columns)
    chunk = -(-shape.steps // parts)
    most = max(1, min(8, chunk, (registers - tile.accumulators) // tile.operands))
    rounds = -(-chunk // most)
    unroll = -(-chunk // rounds)
    chunk = rounds * unroll
    turns = -(-row_tiles * column_tiles * parts // warps)
    # The last turn takes as long as a full one: idle warps do not help.
    issued = turns * warps * chunk
    weights = column_tiles * tile.columns * shape.steps * shape.depth * (2 if shape.half else 4)
    terms = (
        issued * tile.arithmetic,
        issued * tile.loads,
        weights / _L2_BYTES,
        turns * rounds * _L2_LATENCY,
    )
    sums = 8 * row_tiles * tile.rows * column_tiles * tile.columns * parts / 100
    longest = max(terms)
    clocks = longest + _EXPOSED * (sum(terms) - longest) + sums
    return WarpSplit(
        tile.rows, tile.columns, row_tiles, column_tiles, parts, chunk, unroll, tile.lanes, clocks
    )
