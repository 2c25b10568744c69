"""How the warps of a CUDA block share a dense convolution: a matrix product of positions x channels
over steps of the reduction, each warp with one warp tile and one part of the steps.

The choice minimises an estimate in clocks of one SM: what binds of arithmetic, loads from L1 or
shared memory, weights from L2 and the latency of the chain of loads, a share of the rest, and the
sum over the parts of the reduction. Constants are for Hopper; only ratios matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HALF_DEPTH = 32
"""Input channels of one step of a float16 product: two mma.m16n8k16."""
_L2_BYTES = 40
"""Bytes from L2 that one SM gets in a clock when all SMs ask."""
_L2_LATENCY = 700
"""Clocks from a load of weights to its use, the arithmetic of the step included."""
_EXPOSED = 0.4
"""Share of the terms that do not bind which is not hidden."""
_FRAGMENT_REGISTERS = 96
"""Registers of a thread for the operands that are under way."""
_ACCUMULATORS = 64
"""Most accumulators of a thread."""


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

    @property
    def jobs(self) -> int:
        """Warp tiles times parts: what the warps share."""
        return self.row_tiles * self.column_tiles * self.parts


def choose_split(
    positions: int, channels: int, steps: int, depth: int, warps: int, half: bool
) -> WarpSplit:
    """The split with the least estimate; ``depth`` is the input channels of a step."""
    tiles = _half_tiles() if half else _simt_tiles(depth)
    options = [
        _option(positions, channels, steps, depth, warps, half, tile, parts)
        for tile in tiles
        for parts in range(1, min(warps, steps) + 1)
    ]
    return min(options, key=lambda option: option[0])[1]


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


def _half_tiles() -> Iterator[_Tile]:
    for i in (1, 2, 4):
        for j in (1, 2, 4, 8):
            if 4 * i * j <= _ACCUMULATORS:
                yield _Tile(16 * i, 8 * j, 4, 3.2 * i * j, 8.0 * i + 4.0 * j, 8 * i + 4 * j)


def _simt_tiles(depth: int) -> Iterator[_Tile]:
    for lanes, m, n in ((8, 8, 8), (8, 4, 8), (4, 4, 8), (8, 4, 4), (4, 4, 4), (4, 2, 4),
                        (16, 8, 4), (16, 4, 4)):  # fmt: skip
        rows, columns = 32 // lanes * m, lanes * n
        loads = 2.0 * m + 2.0 * depth * n / 4
        yield _Tile(rows, columns, lanes, depth * m * n / 4, loads, depth * (m + n))


def _option(
    positions: int,
    channels: int,
    steps: int,
    depth: int,
    warps: int,
    half: bool,
    tile: _Tile,
    parts: int,
) -> tuple[float, WarpSplit]:
    row_tiles, column_tiles = -(-positions // tile.rows), -(-channels // tile.columns)
    chunk = -(-steps // parts)
    most = max(1, min(8, chunk, _FRAGMENT_REGISTERS // tile.operands))
    rounds = -(-chunk // most)
    unroll = -(-chunk // rounds)
    chunk = rounds * unroll
    split = WarpSplit(
        tile.rows, tile.columns, row_tiles, column_tiles, parts, chunk, unroll, tile.lanes
    )
    turns = -(-split.jobs // warps)
    # The last turn takes as long as a full one: idle warps do not help.
    issued = turns * warps * chunk
    weights = column_tiles * tile.columns * steps * depth * (2 if half else 4)
    terms = (
        issued * tile.arithmetic,
        issued * tile.loads,
        weights / _L2_BYTES,
        turns * rounds * _L2_LATENCY,
    )
    sums = 8 * row_tiles * tile.rows * column_tiles * tile.columns * parts / 100
    longest = max(terms)
    return longest + _EXPOSED * (sum(terms) - longest) + sums, split
