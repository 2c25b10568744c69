"""How the warps of a CUDA block share a dense convolution: a matrix product of positions x channels
over steps of the reduction, each warp with one warp tile and one part of the steps.

The choice minimises an estimate in clocks of one SM.
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


@dataclass(frozen=True)
class _Clocks:
    """Clocks of an SM, fitted to 750 measured kernels of single convolutions on an H200 (relative
    error 13 percent; the split chosen with them is 2 percent slower than the best one tried)."""

    arithmetic: float
    """Per accumulated register tile of any warp and step."""
    least: float
    """The same at the peak rate."""
    inputs: float
    """Per 16-byte load of any warp and step."""
    weights: float
    step: float
    """Per step of one warp: latency."""
    chain: float
    """Per accumulator of a lane (float16: mma of m16n8k32) and step of one warp."""
    round: float
    """Per round of loads of one warp."""
    result: float
    """Per float of the result's parts."""


_FLOAT = _Clocks(0.0, 1.0, 2.2, 0.4, 98.0, 2.9, 126.0, 0.065)
_HALF = _Clocks(1.15, 3.2, 1.4, 0.2, 70.0, 19.0, 0.0, 0.02)
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
        pitch = result_pitch(self.column_tiles * self.columns)
        return 4 * self.parts * self.row_tiles * self.rows * pitch

    @property
    def jobs(self) -> int:
        """Warp tiles times parts: what the warps share."""
        return self.row_tiles * self.column_tiles * self.parts


def result_pitch(columns: int) -> int:
    """Pitch of the rows of a result, in floats."""
    factor, offset = RESULT_PITCH
    return -(-(columns - offset) // factor) * factor + offset


@cache
def choose_split(shape: ProductShape, warps: int) -> WarpSplit:
    """The split among the warps of a block with the least estimate."""
    registers = _REGISTERS // (warps * 32) - _OTHER_REGISTERS
    tiles = _half_tiles() if shape.half else _simt_tiles(shape.depth)
    options = [
        _option(shape, warps, tile, parts, registers)
        for tile in tiles
        if tile.accumulators + tile.operands(shape.streamed) <= registers
        for parts in _PARTS
        if parts <= min(warps, shape.steps)
    ]
    return min(options, key=lambda split: split.clocks)


@dataclass(frozen=True)
class _Tile:
    """A warp tile with the cost of one step, see _Clocks, and registers of a thread."""

    rows: int
    columns: int
    lanes: int
    arithmetic: int
    input_loads: int
    weight_loads: int
    inputs: int
    weights: int
    accumulators: int

    def operands(self, streamed: bool) -> int:
        """Registers of a thread for the operands of one step: what comes from global memory is
        loaded one round ahead."""
        return 2 * self.weights + (2 if streamed else 1) * self.inputs


def _half_tiles() -> Iterator[_Tile]:
    for i in (1, 2, 4):
        for j in (1, 2, 4, 8):
            yield _Tile(16 * i, 8 * j, 4, i * j, 2 * i, j, 8 * i, 4 * j, 4 * i * j)


def _simt_tiles(depth: int) -> Iterator[_Tile]:
    for lanes, m, n in ((8, 8, 8), (8, 4, 8), (4, 4, 8), (8, 4, 4), (4, 4, 4), (4, 2, 4),
                        (16, 8, 4), (16, 4, 4)):  # fmt: skip
        yield _Tile(32 // lanes * m, lanes * n, lanes, m * n, m, n, depth * m, depth * n, m * n)


def _option(shape: ProductShape, warps: int, tile: _Tile, parts: int, registers: int) -> WarpSplit:
    row_tiles, column_tiles = -(-shape.rows // tile.rows), -(-shape.columns // tile.columns)
    chunk = -(-shape.steps // parts)
    most = max(1, min(8, chunk, (registers - tile.accumulators) // tile.operands(shape.streamed)))
    rounds = -(-chunk // most)
    unroll = -(-chunk // rounds)
    chunk = rounds * unroll
    turns = -(-row_tiles * column_tiles * parts // warps)
    # What the busiest warp and all warps of the SM do.
    chain = turns * chunk
    issued = (row_tiles * column_tiles * parts if turns == 1 else turns * warps) * chunk
    rows, columns = row_tiles * tile.rows, column_tiles * tile.columns
    c = _HALF if shape.half else _FLOAT
    clocks = (
        issued * (c.arithmetic * tile.arithmetic + c.inputs * tile.input_loads)
        + issued * c.weights * tile.weight_loads
        + chain * (c.step + c.chain * tile.arithmetic)
        + turns * rounds * c.round
        + parts * rows * columns * c.result
    )
    clocks = max(clocks, issued * tile.arithmetic * c.least)
    return WarpSplit(
        tile.rows, tile.columns, row_tiles, column_tiles, parts, chunk, unroll, tile.lanes, clocks
    )
