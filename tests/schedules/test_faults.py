"""Faults that random CNNs found in tile programs, each as the group that showed it."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range
from tvm.sym import Analyzer
from tvm.target import Target

from optifx_tvm.analysis.legality import tile_fault
from optifx_tvm.analysis.region import RegionError, tile_space
from optifx_tvm.graph import ConvGraph, Step
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.cpu import schedule_cpu
from optifx_tvm.schedules.positions import Pos
from optifx_tvm.schedules.tile_program import build_tile_program
from optifx_tvm.schedules.windows import pool_divisor
from tests.support.groups import RELU, GroupBuilder
from tests.support.kernel_runs import error, feed_and_reference, kernel_arguments, run_on_cpu


def worst_error(graph: ConvGraph, tile: Tile) -> float:
    """Relative L2 error of the group's scheduled kernel on this CPU."""
    target = Target("llvm")
    feed, expected = feed_and_reference(graph)
    args = kernel_arguments(graph, feed)
    run_on_cpu(schedule_cpu(build_tile_program(graph, tile), target), args, target)
    return error(graph, args, expected)


def stores_outside(func: tirx.PrimFunc) -> list[str]:
    """Buffers of which a store's index may leave the bounds (conditions are not looked at)."""
    analyzer = Analyzer()
    found = []

    def visit(stmt) -> None:
        if isinstance(stmt, tirx.For):
            analyzer.bind(stmt.loop_var, Range.from_min_extent(stmt.min, stmt.extent))
        elif isinstance(stmt, s_tir.SBlock):
            for axis in stmt.iter_vars:
                analyzer.bind(axis.var, axis.dom)
        else:
            for index, extent in zip(stmt.indices, stmt.buffer.ty.shape, strict=True):
                bound = analyzer.const_int_bound(index)
                if bound.min_value < 0 or bound.max_value >= int(extent):
                    found.append(stmt.buffer.name)

    kinds = (tirx.For, s_tir.SBlock, tirx.BufferStore)
    tvm_ffi.structural_walk(func.body, (kinds, visit), order="pre")
    return found


@pytest.mark.parametrize("padding", [(1, 2, 2, 0), (3, 0, 0, 2)])
def test_convolution_that_reads_nothing_but_padding(padding):
    """The input's tile has no position inside the image: its one load went beside the tile."""
    b = GroupBuilder()
    x = b.input(1, 1, 17)
    y = b.conv(x, 5, 2, 2 if padding[0] == 1 else 3, pad=padding)
    graph = b.graph(y)
    tile = Tile(*graph.shape(y)[1:3])
    assert stores_outside(build_tile_program(graph, tile).func) == []
    assert worst_error(graph, tile) < 1e-5


def test_epilogue_of_a_concat_reads_what_is_computed_after_a_part():
    """The part was written in place, with the epilogue, before its operand existed."""
    b = GroupBuilder()
    x = b.input(5, 6, 8)
    part = b.conv(x, 8, 3)
    late = b.conv(x, 24, 1, epilogue=())
    joined = b.concat(
        part, b.input(5, 6, 16), epilogue=(Step("add", (0, late)), Step("relu", (1,)))
    )
    for outputs in ((joined,), (late, joined)):
        assert worst_error(b.graph(*outputs), Tile(2, 6)) < 1e-5


def squeeze_excite(b: GroupBuilder, x: str) -> tuple[str, str]:
    """Factors from the mean of ``x``, and ``x`` times them."""
    mean = b.pool(x, "avg", b.tensors[x].shape[1:3], 1)
    factors = b.conv(mean, b.tensors[x].shape[3], 1, epilogue=(Step("sigmoid", (0,)),))
    return factors, b.eltwise(x, Step("multiply", (0, factors)))


def test_factors_of_an_image_that_a_padded_convolution_reads_too():
    """The factor was read from the border of its own tile."""
    b = GroupBuilder(batch=2)
    factors, scaled = squeeze_excite(b, b.input(6, 5, 8))
    padded = b.conv(factors, 5, 3, pad=(1, 1, 1, 1))
    assert worst_error(b.graph(scaled, padded), Tile(1, 1)) < 1e-5


def test_factors_that_only_scale_an_image_are_computed_in_the_group():
    b = GroupBuilder(batch=2)
    _, scaled = squeeze_excite(b, b.conv(b.input(6, 5, 8), 19, 3, epilogue=(RELU,)))
    graph = b.graph(scaled)
    assert worst_error(graph, Tile(6, 5)) < 1e-5
    with pytest.raises(RegionError, match="different speeds"):
        tile_space(graph, (3, 5))


def test_small_tiles_recompute_factors_that_come_from_outside():
    b = GroupBuilder(batch=2)
    factors = b.conv(b.input(1, 1, 12), 8, 1, epilogue=(Step("sigmoid", (0,)),))
    scaled = b.conv(b.input(6, 5, 8), 8, 3, epilogue=(Step("multiply", (0, factors)),))
    assert worst_error(b.graph(scaled), Tile(2, 3)) < 1e-5


def test_divisor_of_average_pooling_is_counted_in_integers():
    """In a module with other kernels LLVM's code generator failed on a product of floats that
    were counts (IntSetAnalyzer made an integer constant of type float32)."""
    b = GroupBuilder()
    (node,) = b.graph(b.pool(b.input(18, 10, 33), "avg", 2, 1, pad=(1, 1, 0, 0))).nodes
    row, column = (Pos(tirx.Var(name, "int64"), 0, 8) for name in ("row", "column"))
    divisor = pool_divisor(node, (row, column), (18, 10))
    assert isinstance(divisor, tirx.Cast)
    assert divisor.value.ty.dtype == "int64"


def test_operators_of_different_batch_sizes_have_no_common_tiles():
    b = GroupBuilder(batch=2)
    first = b.eltwise(b.input(4, 4, 8), RELU)
    b.batch = 1
    second = b.eltwise(b.input(4, 4, 8), RELU)
    assert tile_fault(b.graph(first, second), Tile(4, 4)) == "its operators differ in batch size"
