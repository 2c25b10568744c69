from __future__ import annotations

import math

import pytest
from tvm.s_tir import Schedule

from optifx_tvm.analysis.channels import ChannelError, channel_plan
from optifx_tvm.analysis.footprint import Footprint, footprint, halo
from optifx_tvm.analysis.placement import needs_padding, pitch_of
from optifx_tvm.analysis.region import RegionError
from optifx_tvm.device import GENERIC_CPU, H200, RTX_4090
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.tile_program import build_tile_program
from tests.support.group_cases import build_case, case_names
from tests.support.groups import RELU, GroupBuilder


def _tiles(found: Footprint) -> set[str]:
    """Names of the buffers that are no results of products."""
    return {name for name in found.buffers if not name.endswith(".product")}


def _two_convolutions(size: int = 28, dtype: str = "float32"):
    b = GroupBuilder(dtype)
    x = b.input(size, size, 16)
    y = b.conv(x, 32, 3, epilogue=())
    z = b.conv(y, 48, 3, epilogue=())
    return b.graph(), x, y, z


def test_recompute_and_halo_of_two_convolutions():
    group, x, y, z = _two_convolutions()
    found = footprint(group, Tile(7, 7), H200)
    first, second = 2 * 9 * 16 * 32, 2 * 9 * 32 * 48
    needed = 28 * 28 * (first + second)
    assert found.flops_needed == needed
    assert found.flops == found.flops_matrix == 16 * (81 * first + 49 * second)
    assert found.recompute == found.flops / needed
    assert found.flops_simt == 0
    assert halo(group, found.space) == {z: (0, 0), y: (2, 2), x: (4, 4)}


def test_a_single_tile_recomputes_nothing():
    group, *_ = _two_convolutions()
    assert footprint(group, Tile(28, 28), GENERIC_CPU).recompute == 1.0


def test_bytes_by_level():
    group, *_ = _two_convolutions()
    found = footprint(group, Tile(14, 14), H200)
    weights = 4 * (9 * 16 * 32 + 9 * 32 * 48)
    image = 4 * 28 * 28
    assert found.blocks == 4
    assert found.waves == 1
    assert found.weight_bytes == weights
    assert found.dram_bytes == weights + image * (16 + 48)
    assert found.l2_bytes == 4 * (weights + 4 * 18 * 18 * 16) + image * 48


def test_buffers_hold_intermediates_and_staged_inputs():
    group, x, y, z = _two_convolutions(dtype="float16")
    found = footprint(group, Tile(7, 14), H200)
    # Pitches of 32 channels of y: 64 bytes modulo 128; the product of y covers its halo.
    assert found.buffers[y] == 2 * 9 * 16 * 32
    assert found.buffers[f"{x}->{y}"] == 2 * 11 * 18 * pitch_of(16, 2)
    assert set(found.buffers) == {y, f"{x}->{y}", f"{y}.product", f"{z}.product"}
    assert found.buffers[f"{y}.product"] >= 4 * 9 * 16 * 32
    assert found.shared_bytes == sum(found.buffers.values())


def test_slices_divide_weights_and_repeat_whole_producers():
    group, _, y, z = _two_convolutions()
    whole, cut = (footprint(group, Tile(28, 28, slices), H200) for slices in (1, 2))
    by_name = [{stage.node: stage for stage in found.stages} for found in (whole, cut)]
    assert by_name[0][y] == by_name[1][y]
    assert by_name[1][z].channels == 24
    assert 2 * by_name[1][z].weight_bytes == by_name[0][z].weight_bytes
    assert cut.blocks == 2
    assert cut.recompute > 1.0


def test_parts_of_a_concat_need_no_buffers():
    b = GroupBuilder()
    s = b.conv(b.input(13, 13, 64), 16)
    b.concat(b.conv(s, 64), b.conv(s, 64, 3))
    assert _tiles(footprint(b.graph(), Tile(13, 13), H200)) == {s}


def test_a_gathered_concat_is_only_the_readers_copy():
    b = GroupBuilder()
    parts = [b.input(14, 14, 32), b.input(14, 14, 32)]
    joined = b.concat(*parts)
    reader = b.conv(joined, 16, 3, prologue=(RELU,))
    found = footprint(b.graph(), Tile(7, 14), H200)
    assert _tiles(found) == {f"{joined}->{reader}"}
    assert found.buffers[f"{joined}->{reader}"] == 4 * 9 * 16 * pitch_of(64, 4)


def test_readers_with_one_padding_value_share_a_copy():
    b = GroupBuilder()
    x = b.input(14, 14, 16)
    first, _, pooled = b.conv(x, 16, 3), b.conv(x, 16, 5), b.pool(x, "max", 3, 1, (1, 1, 1, 1))
    group = b.graph(*(node.name for node in b.nodes))
    found = footprint(group, Tile(7, 14), H200)
    assert _tiles(found) == {f"{x}->{first}", f"{x}->{pooled}"}
    assert found.buffers[f"{x}->{first}"] == 4 * 11 * 18 * pitch_of(16, 4)


def test_kinds_of_work():
    b = GroupBuilder()
    x = b.conv(b.input(14, 14, 16), 32)
    b.eltwise(b.pool(b.depthwise(x), "avg", 3, 2), RELU)
    found = footprint(b.graph(), Tile(6, 6), H200)
    assert [stage.kind for stage in found.stages] == ["matrix", "depthwise", "pool", "copy"]
    assert 0 < found.flops_simt < found.flops


def test_limits_of_devices():
    b = GroupBuilder()
    b.depthwise(b.depthwise(b.input(28, 28, 256)))
    group, tile = b.graph(), Tile(7, 7)
    assert not footprint(group, tile, RTX_4090).fits
    assert footprint(group, tile, H200).fits
    assert footprint(group, tile, H200).capacity < H200.block_bytes


def test_batch_multiplies_blocks():
    b = GroupBuilder(batch=3)
    b.conv(b.input(14, 14, 16), 16)
    found = footprint(b.graph(), Tile(7, 14), H200)
    assert found.blocks == 6
    assert found.recompute == 1.0


@pytest.mark.parametrize(
    ("padding", "expected"), [((0, 0, 0, 0), False), ((1, 0, 0, 0), True), ((0, 0, 0, 1), True)]
)
def test_needs_padding(padding, expected):
    b = GroupBuilder()
    b.conv(b.input(8, 8, 8), 8, 3, pad=padding)
    graph = b.graph()
    assert needs_padding(graph.nodes[0], graph) is expected


def test_padding_that_no_output_reads_is_not_needed():
    b = GroupBuilder()
    b.conv(b.input(9, 9, 8), 8, 1, 2, pad=(0, 0, 1, 1))
    graph = b.graph()
    assert not needs_padding(graph.nodes[0], graph)


def test_unusable_tiles_raise():
    b = GroupBuilder()
    x = b.input(16, 16, 8)
    graph = b.graph(b.conv(x, 8), b.pool(x, "max", 2, 2))
    with pytest.raises(RegionError):
        footprint(graph, Tile(4, 4), H200)
    with pytest.raises(ChannelError):
        footprint(_two_convolutions()[0], Tile(7, 7, 5), H200)


@pytest.mark.parametrize("name", case_names())
def test_invariants(name):
    """Work is conserved over stages and blocks, and done at least once."""
    case = build_case(name)
    group, tile = case.graph, case.tile
    found = footprint(group, tile, GENERIC_CPU)
    plan = channel_plan(group, tile.channel_slices)
    assert [s.channels for s in found.stages] == [plan[n.name].extent for n in group.nodes]
    assert found.flops == found.blocks * sum(stage.flops for stage in found.stages)
    assert found.flops_matrix + found.flops_simt == found.flops
    assert found.flops >= found.flops_needed or found.blocks == 1
    assert found.l2_bytes >= sum(group.tensors[t].bytes for t in group.outputs)
    batch = group.shape(group.nodes[-1].name)[0]
    assert found.blocks == math.prod(found.tiles) * tile.channel_slices * batch


@pytest.mark.parametrize("name", case_names())
def test_buffers_are_those_of_the_tile_program(name):
    """The sizes that legality rests on are the sizes that the code generator allocates."""
    case = build_case(name)
    program = build_tile_program(case.graph, case.tile)
    accumulators = {nest.compute for nest in program.nests}
    schedule, sizes = Schedule(program.func), []
    for buffer in schedule.get(schedule.get_sblock("root")).alloc_buffers:
        if buffer.name not in accumulators:
            *_, rows, cols, channels = (int(extent) for extent in buffer.ty.shape)
            channels = -(-channels // 16) * 16 if channels > 16 else channels
            sizes.append(rows * cols * channels * (2 if buffer.ty.dtype == "float16" else 4))
    found = footprint(case.graph, case.tile, GENERIC_CPU)
    assert sorted(found.buffers.values()) == sorted(sizes)
