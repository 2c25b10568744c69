"""The region algebra against brute force: which input elements really move a tile?"""

from __future__ import annotations

import random

import numpy as np
import pytest

from optifx_tvm.analysis.region import Region, Region1D, RegionError, TileSpace, tile_space
from optifx_tvm.graph import ConvGraph, Step
from tests.support.groups import RELU, GroupBuilder
from tests.support.reference import run_graph

CHAINS = 1000
CHANNELS = 2


def _random_operator(b: GroupBuilder, x: str, source: str, rng: random.Random) -> str:
    pad = tuple(rng.randint(0, 2) for _ in range(4))
    kernel = (rng.randint(1, 3), rng.randint(1, 3))
    kind = rng.choice(
        ("conv", "conv", "depthwise", "max", "avg", "transposed", "eltwise", "add", "concat")
    )
    if kind == "conv":
        strides, dilation = (rng.randint(1, 2), rng.randint(1, 2)), rng.randint(1, 2)
        return b.conv(x, CHANNELS, kernel, strides, dilation, pad, epilogue=())
    if kind == "depthwise":
        channels = b.tensors[x].shape[3]
        return b.conv(x, channels, kernel, rng.randint(1, 2), pad=pad, groups=channels, epilogue=())
    if kind in ("max", "avg"):
        pad = tuple(min(p, k - 1) for p, k in zip(pad, kernel * 2, strict=True))
        ceil, include = rng.random() < 0.5, rng.random() < 0.5
        return b.pool(x, kind, kernel, rng.randint(1, 2), pad, ceil=ceil, include=include)
    if kind == "transposed":
        k, s, crop = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 1)
        return b.transposed(x, CHANNELS, k, s, pad=(crop, 0, 0, crop))
    if kind == "add" and b.tensors[source].shape == b.tensors[x].shape:
        return b.eltwise(x, Step("add", (0, source)))
    if kind == "concat":
        other = b.conv(x, CHANNELS, 3, epilogue=())
        return b.concat(b.conv(x, CHANNELS, 1, epilogue=()), other)
    return b.eltwise(x, RELU)


def _random_chain(seed: int) -> ConvGraph | None:
    """A chain (with small branches) on an image of 5 to 9 rows and columns, a batch element for
    each position and one more; None if an image became too small or too large."""
    rng = random.Random(seed)
    height, width = rng.randint(5, 9), rng.randint(5, 9)
    b = GroupBuilder(batch=height * width + 1)
    source = x = b.input(height, width, CHANNELS)
    for _ in range(rng.randint(1, 4)):
        x = _random_operator(b, x, source, rng)
        if not all(1 <= extent <= 24 for extent in b.tensors[x].shape[1:3]):
            return None
    return b.graph()


def _dependences(graph: ConvGraph) -> np.ndarray:
    """[input row, input column, output row, output column]: does the one move the other?

    Weights are positive and an element is raised by much, so no influence cancels or is hidden by
    a maximum."""
    _, height, width, _ = graph.shape(graph.inputs[0])
    rng = np.random.default_rng(0)
    feed = {name: rng.uniform(0.5, 1.5, graph.shape(name)) for name in graph.params}
    image = np.zeros(graph.shape(graph.inputs[0]))
    for i in range(height * width):
        image[i, i // width, i % width] = 1e4
    result = run_graph(graph, feed | {graph.inputs[0]: image})[graph.outputs[0]]
    moved = (result[:-1] != result[-1:]).any(axis=3)
    return moved.reshape(height, width, *moved.shape[1:])


def _span(axis: Region1D, t: int, size: int) -> tuple[int, int]:
    return max(axis.start(t), 0), min(axis.start(t) + axis.extent, size)


def _inside(space: TileSpace, graph: ConvGraph, tile: tuple[int, int]) -> bool:
    """Are all regions of the tile inside their images?"""
    for name, region in (*space.regions.items(), *space.owned.items()):
        for axis, t, size in zip(
            (region.rows, region.cols), tile, graph.shape(name)[1:3], strict=True
        ):
            if axis.start(t) < 0 or axis.start(t) + axis.extent > size:
                return False
    return True


def _check_chain(graph: ConvGraph, tile: tuple[int, int]) -> int:
    """Check every tile; returns for how many the region was checked to be tight."""
    space = tile_space(graph, tile)
    moved = _dependences(graph)
    need, own = space.regions[graph.inputs[0]], space.owned[graph.outputs[0]]
    size, result = moved.shape[:2], moved.shape[2:]
    covered = np.zeros(result, int)
    tight = 0
    for index in np.ndindex(*space.count):
        rows, cols = (
            _span(axis, t, n)
            for axis, t, n in zip((own.rows, own.cols), index, result, strict=True)
        )
        covered[slice(*rows), slice(*cols)] += 1
        matters = moved[:, :, slice(*rows), slice(*cols)].any(axis=(2, 3))
        inside = np.zeros(size, bool)
        top, left = (
            _span(axis, t, n)
            for axis, t, n in zip((need.rows, need.cols), index, size, strict=True)
        )
        inside[slice(*top), slice(*left)] = True
        assert not matters[~inside].any(), "an element outside the region moves the tile"
        exact = all(node.op != "conv2d_transpose" for node in graph.nodes)
        if exact and _inside(space, graph, index):
            found_rows, found_cols = np.nonzero(matters)
            assert (found_rows.min(), found_rows.max() + 1) == top
            assert (found_cols.min(), found_cols.max() + 1) == left
            tight += 1
    assert (covered == 1).all(), "owned parts must cover the image once"
    return tight


def test_regions_equal_brute_force_dependences():
    checked = tight = refused = 0
    kinds = set()
    seed = 0
    while checked < CHAINS:
        graph = _random_chain(seed)
        rng = random.Random(-seed)
        seed += 1
        if graph is None:
            continue
        height, width = graph.shape(graph.outputs[0])[1:3]
        tile = (rng.randint(1, height), rng.randint(1, width))
        try:
            tight += _check_chain(graph, tile)
        except RegionError:
            refused += 1
            continue
        kinds |= {node.op for node in graph.nodes}
        checked += 1
    assert kinds == {
        *("conv2d", "conv2d_transpose", "max_pool2d", "avg_pool2d"),
        *("elementwise", "concat"),
    }
    assert tight > CHAINS / 3, "too few tiles are inside their images for the test to mean much"
    assert refused < CHAINS / 3


def test_a_chain_that_needs_too_little_is_caught(monkeypatch):
    """The brute-force check itself can fail."""
    b = GroupBuilder(batch=65)
    graph = b.graph(b.conv(b.input(8, 8, CHANNELS), CHANNELS, 3, epilogue=()))
    right = tile_space(graph, (2, 2))
    source = graph.inputs[0]
    rows = right.regions[source].rows
    less = Region(Region1D(rows.step, rows.base, rows.extent - 1), right.regions[source].cols)
    wrong = TileSpace(right.count, {**right.regions, source: less}, right.owned)
    assert _check_chain(graph, (2, 2)) > 0
    monkeypatch.setitem(globals(), "tile_space", lambda *_: wrong)
    with pytest.raises(AssertionError, match="outside the region"):
        _check_chain(graph, (2, 2))


def test_halo_of_a_chain():
    """Two 3x3 convolutions and a 3x3 pooling of stride 2: 7 rows of the result need 15 + 4."""
    b = GroupBuilder()
    x = b.input(56, 56, 8)
    y = b.pool(b.conv(b.conv(x, 8, 3), 8, 3), "max", 3, 2, (1, 1, 1, 1))
    space = tile_space(b.graph(), (7, 28))
    assert space.count == (4, 1)
    assert space.regions[y].rows == Region1D(7, 0, 7)
    assert space.regions[x].rows == Region1D(14, -3, 19)
    assert space.regions[x].cols == Region1D(0, -3, 61)


def test_hull_of_branches():
    b = GroupBuilder()
    x = b.input(16, 16, 8)
    b.concat(b.conv(x, 8, 1), b.conv(x, 8, 5))
    assert tile_space(b.graph(), (4, 4)).regions[x].rows == Region1D(4, -2, 8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda b, x: (b.conv(x, 8, 1), b.pool(x, "max", 3, 2, (1, 1, 1, 1))),
            "differ in size and share no consumer",
            id="siblings of different sizes",
        ),
        pytest.param(
            lambda b, x: (b.eltwise(b.transposed(x, 8, 2, 2), RELU),),
            "not a multiple of its up-sampling",
            id="odd tiles of a transposed convolution",
        ),
    ],
)
def test_refusals_say_why(build, message):
    b = GroupBuilder()
    outputs = build(b, b.input(16, 16, 8))
    with pytest.raises(RegionError, match=message):
        tile_space(b.graph(*outputs), (3, 3))


def test_axes_with_a_single_tile_have_no_speed():
    """Branches that move at different speeds are one group if a single tile covers the image."""
    b = GroupBuilder()
    x = b.input(16, 16, 8)
    b.eltwise(b.conv(x, 8, 3, 2), Step("add", (0, b.conv(b.pool(x, "max", 2, 2), 8))))
    assert tile_space(b.graph(), (8, 8)).regions[x].rows == Region1D(0, -1, 17)
