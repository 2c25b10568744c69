from __future__ import annotations

import pytest

from optifx_tvm.analysis.channels import (
    ChannelError,
    ChannelRange,
    channel_plan,
    is_depthwise,
    legal_slices,
    passes_slice,
)
from optifx_tvm.graph import Step
from tests.support.groups import RELU, GroupBuilder


def _fire():
    b = GroupBuilder()
    x = b.input(13, 13, 64)
    s = b.conv(x, 16)
    left, right = b.conv(s, 64), b.conv(s, 96, 3)
    return b, x, s, left, right, b.concat(left, right)


def test_one_slice_is_everything():
    b, *_ = _fire()
    assert all(r.full for r in channel_plan(b.graph(), 1).values())


def test_concat_output_passes_equal_slices_and_the_squeeze_stays_whole():
    b, x, s, left, right, joined = _fire()
    plan = channel_plan(b.graph(), 4)
    assert plan == {
        x: ChannelRange(True, 64),
        s: ChannelRange(True, 16),
        left: ChannelRange(False, 16),
        right: ChannelRange(False, 24),
        joined: ChannelRange(False, 40),
    }
    assert legal_slices(b.graph()) == (1, 2, 4)


def test_depthwise_and_pooling_pass_the_slice_backwards():
    b = GroupBuilder()
    x = b.input(14, 14, 24)
    wide = b.conv(x, 96)
    y = b.pool(b.depthwise(wide), "avg", 3, 2)
    plan = channel_plan(b.graph(), 3)
    assert plan[x] == ChannelRange(True, 24)
    assert plan[wide] == plan[y] == ChannelRange(False, 32)


def test_residual_operand_is_read_by_slice():
    b = GroupBuilder()
    x, shortcut = b.input(14, 14, 32), b.input(14, 14, 64)
    b.conv(x, 64, 3, epilogue=(Step("add", (0, shortcut)), Step("relu", (1,))))
    plan = channel_plan(b.graph(), 2)
    assert plan[shortcut] == ChannelRange(False, 32)
    assert plan[x] == ChannelRange(True, 32)


def test_grouped_convolution_needs_its_whole_input():
    b = GroupBuilder()
    x = b.input(14, 14, 32)
    middle = b.conv(x, 32)
    grouped = b.conv(middle, 64, 3, groups=4)
    graph = b.graph()
    assert not is_depthwise(graph, graph.by_name[grouped])
    assert not passes_slice(graph, graph.by_name[grouped])
    assert channel_plan(graph, 2)[middle] == ChannelRange(True, 32)


def test_wanted_as_slice_and_whole_is_whole():
    b = GroupBuilder()
    x = b.input(14, 14, 32)
    middle = b.conv(x, 32)
    b.conv(middle, 32, 3, epilogue=(Step("add", (0, middle)),))
    assert channel_plan(b.graph(), 4)[middle] == ChannelRange(True, 32)


def test_concat_read_inside_is_gathered_whole():
    b = GroupBuilder()
    x, y = b.input(14, 14, 16), b.input(14, 14, 16)
    joined = b.concat(b.conv(x, 16), y)
    b.eltwise(joined, RELU)
    plan = channel_plan(b.graph(), 2)
    assert plan[joined] == ChannelRange(True, 32)
    assert plan[y] == ChannelRange(True, 16)


def test_written_and_read_whole_inside_is_refused():
    b = GroupBuilder()
    x = b.input(14, 14, 32)
    middle = b.conv(x, 32)
    last = b.conv(middle, 32)
    graph = b.graph(middle, last)
    assert legal_slices(graph) == (1,)
    with pytest.raises(ChannelError, match=f"{middle} is written and read whole inside"):
        channel_plan(graph, 2)


def test_part_of_a_written_concat_that_is_read_whole_is_refused():
    b = GroupBuilder()
    x, y = b.input(14, 14, 32), b.input(14, 14, 32)
    part = b.conv(x, 32)
    joined = b.concat(part, y)
    last = b.conv(part, 32)
    graph = b.graph(joined, last)
    assert legal_slices(graph) == (1,)
    with pytest.raises(ChannelError, match=part):
        channel_plan(graph, 2)


def test_an_input_part_of_a_concat_may_be_read_whole():
    """DenseNet: the concat copies a slice of what the convolution reads whole."""
    b = GroupBuilder()
    x = b.input(14, 14, 64)
    joined = b.concat(x, b.conv(x, 32))
    plan = channel_plan(b.graph(), 4)
    assert plan[x] == ChannelRange(True, 64)
    assert plan[joined] == ChannelRange(False, 24)


@pytest.mark.parametrize(("channels", "expected"), [(32, (1, 2, 4)), (24, (1, 3)), (20, (1,))])
def test_slices_are_whole_eights(channels, expected):
    b = GroupBuilder()
    b.conv(b.input(14, 14, 16), channels)
    graph = b.graph()
    assert legal_slices(graph) == expected
    for slices in range(1, 9):
        if slices in expected:
            assert channel_plan(graph, slices)
        else:
            with pytest.raises(ChannelError, match="whole 8s"):
                channel_plan(graph, slices)
