"""Products of warp tiles in the CUDA emulator, in shapes and splits that leave something over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm.target import Target

from optifx_tvm.analysis.products import ProductShape
from optifx_tvm.analysis.warp_split import WarpSplit
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.schedules import product
from optifx_tvm.schedules.cuda_simt import schedule_simt
from optifx_tvm.schedules.tile_program import build_tile_program
from tests.cuda_emulator.emulator import ORDERS, EmulatedKernel
from tests.support.groups import RELU, GroupBuilder
from tests.support.kernel_runs import TOLERANCE, error, feed_and_reference, kernel_arguments

CUDA = Target({"kind": "cuda", "arch": "sm_87"}, host="llvm")
HALF, FLOAT = "float16", "float32"
DTYPES = pytest.mark.parametrize("dtype", [FLOAT, HALF])


def check(graph: ConvGraph, tile: Tile, warps: int, orders: tuple[str, ...] = ORDERS) -> None:
    program = build_tile_program(graph, tile, outer="blockIdx.x", warps=warps)
    assert [nest.kind for nest in program.nests].count("product") == 1
    kernel = EmulatedKernel(schedule_simt(program), CUDA)
    feed, expected = feed_and_reference(graph)
    for order in orders:
        args = kernel_arguments(graph, feed)
        kernel.run(args, order)
        dtype = graph.tensors[graph.outputs[0]].dtype
        assert error(graph, args, expected) < TOLERANCE[dtype], order


def conv(dtype: str, size: int, depth: int, channels: int, k=1, **kw) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.conv(b.input(size, size, depth), channels, k, **kw))


def transposed(dtype: str, size: int, depth: int, channels: int) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.transposed(b.input(size, size, depth), channels))


def test_stride_2_with_42_input_channels_half() -> None:
    # 42 is padded to 48; the last step of a tap reads 32 from 32 on, clamped.
    check(conv(HALF, 7, 42, 24, 3, s=2), Tile(2, 4), 4)


@DTYPES
def test_stem_7x7_stride_2_of_three_channels(dtype: str) -> None:
    check(conv(dtype, 11, 3, 24, 7, s=2), Tile(2, 6), 4)


@DTYPES
def test_transposed_2x2_in_channel_slices(dtype: str) -> None:
    check(transposed(dtype, 3, 20, 32), Tile(4, 6, 2), 4)


@DTYPES
def test_transposed_2x2_with_a_rest_of_channels_and_positions(dtype: str) -> None:
    check(transposed(dtype, 5, 16, 20), Tile(6, 10), 4)


@DTYPES
def test_1x1_on_one_position_in_125_slices(dtype: str) -> None:
    check(conv(dtype, 1, 64, 1000), Tile(1, 1, 125), 4, ("random",))


@DTYPES
def test_prologue_is_applied_in_registers(dtype: str) -> None:
    check(conv(dtype, 4, 40, 16, prologue=(RELU,)), Tile(2, 4), 4)


def split_of(rows: int, columns: int, lanes: int, parts: int, unroll: int) -> Callable:
    """In the place of ``choose_split``: this split, whatever the estimate says of it."""

    def choose(shape: ProductShape, warps: int) -> WarpSplit:
        steps = -(-shape.steps // (parts * unroll)) * unroll
        row_tiles, column_tiles = -(-shape.rows // rows), -(-shape.columns // columns)
        return WarpSplit(
            rows, columns, row_tiles, column_tiles, parts, steps, unroll, lanes, clocks=1.0
        )

    return choose


def tiles_of(dtype: str) -> tuple[int, int, int]:
    """Rows, columns and lanes of the smallest warp tile."""
    return (16, 8, 4) if dtype == HALF else (16, 16, 4)


@DTYPES
@pytest.mark.parametrize("warps", [2, 4, 8], ids=["turns", "one_short", "idle_warps"])
@pytest.mark.parametrize("k", [1, 3], ids=["global", "shared"])
def test_jobs_not_a_multiple_of_warps(monkeypatch, dtype: str, warps: int, k: int) -> None:
    rows, columns, lanes = tiles_of(dtype)
    # 3 tiles of rows (the last one with a rest), 1 of columns, 1 part: 3 jobs.
    monkeypatch.setattr(product, "choose_split", split_of(rows, columns, lanes, 1, 1))
    check(conv(dtype, 6, 16, columns, k), Tile(6, 6), warps, ("random",))


@DTYPES
@pytest.mark.parametrize(
    ("parts", "unroll"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 3)], ids=lambda n: str(n)
)
def test_steps_not_a_multiple_of_parts(monkeypatch, dtype: str, parts: int, unroll: int) -> None:
    rows, columns, lanes = tiles_of(dtype)
    # 7 steps in 2 * 4 (4 rounds, or 2 of 2), 3 * 3 (an odd number), 3 * 4, or 4 * 3 (the last part
    # has nothing to do).
    monkeypatch.setattr(product, "choose_split", split_of(rows, columns, lanes, parts, unroll))
    depth = 7 * (32 if dtype == HALF else 4)
    check(conv(dtype, 4, depth, columns), Tile(4, 4), 4, ("random",))


@DTYPES
def test_rest_of_rows_columns_and_steps_in_turns(monkeypatch, dtype: str) -> None:
    rows, columns, lanes = tiles_of(dtype)
    monkeypatch.setattr(product, "choose_split", split_of(rows, columns, lanes, 2, 2))
    check(conv(dtype, 5, 12, columns + 4, 3), Tile(5, 5), 3)
