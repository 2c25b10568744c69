"""How the warps of a block share a product."""

from __future__ import annotations

from itertools import product

import pytest

from optifx_tvm.analysis.products import FLOAT_STEP, HALF_STEP, ProductShape
from optifx_tvm.analysis.warp_split import WARPS, WarpSplit, choose_split, result_pitch

REGISTERS = 65536
"""Of an SM."""
ROWS, COLUMNS, STEPS = (1, 7, 49, 200, 512), (1, 8, 20, 125, 512), (1, 3, 10, 147, 1152)


def shapes(half: bool) -> list[ProductShape]:
    depth = HALF_STEP if half else FLOAT_STEP
    return [
        ProductShape(rows, columns, steps, steps, depth, half, streamed)
        for rows, columns, steps in product(ROWS, COLUMNS, STEPS)
        for streamed in (False, True)
    ]


def registers(shape: ProductShape, split: WarpSplit) -> int:
    """Registers of a thread for accumulators and operands of one round, counted anew; what comes
    from global memory has two buffers."""
    if shape.half:
        # The warp holds every operand once, two values in a register.
        inputs = split.rows * shape.depth // 2 // 32
        weights = split.columns * shape.depth // 2 // 32
    else:
        inputs = split.rows // (32 // split.lanes) * shape.depth
        weights = split.columns // split.lanes * shape.depth
    buffers = 2 if shape.streamed else 1
    return split.rows * split.columns // 32 + split.unroll * (2 * weights + buffers * inputs)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("half", [False, True])
def test_every_split_covers_the_product_and_fits_into_registers(half: bool, warps: int) -> None:
    for shape in shapes(half):
        split = choose_split(shape, warps)
        assert split.row_tiles == -(-shape.rows // split.rows), (shape, split)
        assert split.column_tiles == -(-shape.columns // split.columns), (shape, split)
        assert split.parts * split.steps >= shape.steps, (shape, split)
        assert split.steps % split.unroll == 0, (shape, split)
        assert 1 <= split.parts <= warps, (shape, split)
        assert split.jobs == split.row_tiles * split.column_tiles * split.parts, (shape, split)
        # What the body may use: an mma is 16 x 8, lanes times pieces of 4 channels cover a row.
        assert split.rows % (16 if half else 32 // split.lanes) == 0, (shape, split)
        assert split.columns % (8 if half else 4 * split.lanes) == 0, (shape, split)
        assert registers(shape, split) <= REGISTERS // (32 * warps) - 32, (shape, split)


@pytest.mark.parametrize("half", [False, True])
def test_the_choice_is_the_same_every_time(half: bool) -> None:
    chosen = [choose_split(shape, WARPS[0]) for shape in shapes(half)]
    choose_split.cache_clear()
    assert [choose_split(shape, WARPS[0]) for shape in shapes(half)] == chosen


@pytest.mark.parametrize("half", [False, True])
def test_a_long_reduction_of_few_outputs_is_shared(half: bool) -> None:
    shape = ProductShape(16, 8, 576, 64, HALF_STEP if half else FLOAT_STEP, half, True)
    split = choose_split(shape, 16)
    assert split.parts >= 8
    assert split.steps <= 576 // 8


@pytest.mark.parametrize("half", [False, True])
def test_more_work_is_never_estimated_to_be_free(half: bool) -> None:
    depth = HALF_STEP if half else FLOAT_STEP
    small = choose_split(ProductShape(49, 64, 72, 8, depth, half, False), 16)
    large = choose_split(ProductShape(49 * 4, 64 * 4, 72 * 4, 32, depth, half, False), 16)
    assert large.clocks > 8 * small.clocks > 0


def test_rows_of_a_result_start_in_different_banks() -> None:
    for columns in range(4, 600, 4):
        pitch = result_pitch(columns)
        assert columns <= pitch < columns + 32
        assert pitch % 32 == 8, columns


def test_result_bytes_are_those_of_the_pitched_result() -> None:
    for half in (False, True):
        for shape in shapes(half):
            split = choose_split(shape, 8)
            rows = split.parts * split.row_tiles * split.rows
            pitch = result_pitch(split.column_tiles * split.columns)
            assert split.result_bytes == 4 * rows * pitch
            # What the product writes lies within.
            last = (rows - 1) * pitch + split.column_tiles * split.columns
            assert 4 * last <= split.result_bytes
