"""Tiles that don't fit into shared memory, and kernels that need none."""

from __future__ import annotations

import pytest
from tvm import tirx
from tvm.target import Target

from optifx_tvm.cuda_source import Launch, cuda_source
from optifx_tvm.device import SHARED_LIMIT
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.cuda_simt import schedule_simt
from optifx_tvm.schedules.registry import schedule_group
from optifx_tvm.schedules.shared_memory import shared_bytes, smaller_tiles
from optifx_tvm.schedules.tile_program import build_tile_program
from tests.cuda_emulator.emulator import ORDERS, EmulatedKernel
from tests.support.group_cases import build_case, case_names
from tests.support.groups import GroupBuilder
from tests.support.kernel_runs import error, feed_and_reference, kernel_arguments

ADA = Target({"kind": "cuda", "arch": "sm_89"}, host="llvm")
SMALL = Target({"kind": "cuda", "arch": "sm_50"}, host="llvm")


def _launch(func: tirx.PrimFunc) -> Launch:
    (launch,) = cuda_source({"main": func}, ADA).launches["main"]
    return launch


def _check(kernel: EmulatedKernel, graph) -> None:
    feed, expected = feed_and_reference(graph)
    for order in ORDERS:
        args = kernel_arguments(graph, feed)
        kernel.run(args, order)
        assert error(graph, args, expected) < 1e-5, order


@pytest.mark.parametrize("name", case_names()[::4])
def test_shared_bytes_is_a_close_upper_bound(name: str) -> None:
    case = build_case(name)
    func = schedule_simt(build_tile_program(case.graph, case.tile, outer="blockIdx.x"))
    launch = _launch(func)
    assert launch.shared_bytes <= shared_bytes(func) <= 2 * launch.shared_bytes + 512


def test_a_tile_that_does_not_fit_is_made_smaller() -> None:
    b = GroupBuilder()
    b.conv(b.conv(b.input(24, 24, 64), 64, 3), 64, 3)
    tile = Tile(24, 24)
    whole = schedule_simt(build_tile_program(b.graph(), tile, outer="blockIdx.x"))
    assert shared_bytes(whole) > SHARED_LIMIT["sm_89"]
    kernel = schedule_group(b.graph(), tile, ADA)
    assert kernel is not None
    launch = _launch(kernel)
    assert SHARED_LIMIT["sm_89"] / 4 < launch.shared_bytes <= SHARED_LIMIT["sm_89"]
    assert launch.grid[0] > 1


def test_more_slices_when_one_position_does_not_fit() -> None:
    b = GroupBuilder()
    b.depthwise(b.input(13, 13, 1024), 13)
    kernel = schedule_group(b.graph(), Tile(4, 4), ADA)
    assert kernel is not None
    launch = _launch(kernel)
    assert launch.shared_bytes <= SHARED_LIMIT["sm_89"]
    assert launch.block[0] > 1


def test_tiles_in_global_memory_where_nothing_fits() -> None:
    b = GroupBuilder()
    b.conv(b.conv(b.input(4, 4, 1500), 8, 3), 8, 3)
    graph = b.graph()
    kernel = schedule_group(graph, Tile(2, 4), SMALL)
    assert kernel is not None
    emulated = EmulatedKernel(kernel, SMALL)
    assert {launch.shared_bytes for launch in emulated.launches} == {0}
    _check(emulated, graph)


def test_smaller_tiles_start_with_the_tile_and_are_legal() -> None:
    b = GroupBuilder()
    b.transposed(b.input(7, 6, 32), 32)
    tiles = list(smaller_tiles(b.graph(), Tile(4, 6)))
    # A transposed convolution of stride 2 has no tiles of odd size.
    assert tiles[:2] == [Tile(4, 6), Tile(2, 2)]
    assert {tile.channel_slices for tile in tiles} == {1, 2, 4}
