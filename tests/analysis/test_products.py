"""Which convolutions are products of warp tiles, and how large."""

from __future__ import annotations

from typing import Any

import pytest

from optifx_tvm.analysis.products import (
    is_narrow,
    is_phased,
    is_product,
    padded_depth,
    product_shape,
)
from optifx_tvm.graph import ConvGraph, Node
from tests.support.groups import GroupBuilder

HALF, FLOAT = "float16", "float32"


def conv(dtype: str, depth: int, channels: int, k: Any = 1, size: int = 16, **kw) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.conv(b.input(size, size, depth), channels, k, **kw))


def transposed(dtype: str, depth: int, channels: int, **kw) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.transposed(b.input(8, 8, depth), channels, **kw))


def only(graph: ConvGraph) -> Node:
    (node,) = graph.nodes
    return node


# (group, channels of a slice, slices)
PRODUCTS = {
    "dense": (conv(FLOAT, 64, 48, 3), 48, 1),
    "dense half": (conv(HALF, 64, 48, 3), 48, 1),
    "strided": (conv(HALF, 64, 48, 3, s=2), 48, 1),
    "dilated": (conv(HALF, 64, 48, 3, d=2), 48, 1),
    "odd channels": (conv(HALF, 7, 19, 3), 19, 1),
    "slices of 4": (conv(FLOAT, 64, 36, 1), 12, 3),
    "slices of 8 half": (conv(HALF, 64, 48, 1), 24, 2),
    "transposed": (transposed(FLOAT, 16, 20), 20, 1),
    "transposed slices of 16": (transposed(FLOAT, 16, 32), 16, 2),
    "transposed slices of 8 half": (transposed(HALF, 16, 32), 8, 4),
}
PLAIN = {
    "grouped": (conv(FLOAT, 64, 64, 3, groups=2), 64, 1),
    "depthwise": (conv(HALF, 64, 64, 3, groups=64), 64, 1),
    "slices of 6": (conv(FLOAT, 64, 36, 1), 6, 6),
    "slices of 12 half": (conv(HALF, 64, 36, 1), 12, 3),
    "transposed, windows overlap": (transposed(FLOAT, 16, 16, k=3), 16, 1),
    "transposed, windows apart": (transposed(FLOAT, 16, 16, k=2, s=3), 16, 1),
    "transposed, dilated": (transposed(FLOAT, 16, 16, d=2), 16, 1),
    "transposed, padded": (transposed(HALF, 16, 16, pad=(1, 1, 1, 1)), 16, 1),
    "transposed, grouped": (transposed(FLOAT, 16, 16, groups=2), 16, 1),
    "transposed slices of 8": (transposed(FLOAT, 16, 32), 8, 4),
}


@pytest.mark.parametrize("name", [*PRODUCTS, *PLAIN])
def test_which_are_products(name: str) -> None:
    graph, channels, slices = {**PRODUCTS, **PLAIN}[name]
    assert is_product(only(graph), graph, channels, slices) == (name in PRODUCTS)


def test_pooling_is_no_product() -> None:
    b = GroupBuilder(HALF)
    graph = b.graph(b.pool(b.input(8, 8, 16)))
    assert not is_product(only(graph), graph, 16, 1)


@pytest.mark.parametrize(
    ("graph", "narrow", "padded"),
    [
        (conv(HALF, 3, 16, 7, s=2), True, 4),
        (conv(HALF, 1, 16, 3), True, 4),
        (conv(HALF, 4, 16, 3), True, 4),
        (conv(HALF, 5, 16, 3), False, 8),
        (conv(HALF, 3, 16, 3, d=(2, 1)), True, 4),
        (conv(HALF, 3, 16, 3, d=(1, 2)), False, 8),
        (conv(HALF, 42, 16), False, 48),
        (conv(HALF, 64, 16), False, 64),
        (conv(FLOAT, 3, 16, 7), False, 4),
        (conv(FLOAT, 42, 16), False, 44),
        (conv(FLOAT, 44, 16), False, 44),
        (transposed(HALF, 3, 16), False, 8),
    ],
)
def test_narrow_and_padded_depth(graph: ConvGraph, narrow: bool, padded: int) -> None:
    node = only(graph)
    assert (is_narrow(node, graph), padded_depth(node, graph)) == (narrow, padded)


@pytest.mark.parametrize(
    ("graph", "extents", "channels", "expected"),
    [  # rows, columns, steps, steps of a tap (narrow: of a kernel row), channels of a step
        (conv(FLOAT, 42, 48, 3), (2, 7), 24, (14, 24, 9 * 11, 11, 4)),
        (conv(HALF, 42, 48, 3), (2, 7), 24, (14, 24, 9 * 2, 2, 32)),
        (conv(HALF, 64, 20, (1, 7)), (3, 3), 20, (9, 20, 7 * 2, 2, 32)),
        (conv(HALF, 3, 24, 7, s=2), (4, 4), 24, (16, 24, 7, 1, 32)),  # 7 * 4 values of a row
        (conv(HALF, 3, 24, 11), (4, 4), 24, (16, 24, 11 * 2, 2, 32)),
        (conv(FLOAT, 3, 24, 7, s=2), (4, 4), 24, (16, 24, 49, 1, 4)),
        # The columns are those of every tap, rounded up to packed blocks of 16 or 8.
        (transposed(FLOAT, 20, 12), (6, 14), 12, (3 * 7, 4 * 16, 5, 5, 4)),
        (transposed(HALF, 40, 12), (6, 14), 12, (3 * 7, 4 * 16, 2, 2, 32)),
        (transposed(HALF, 32, 40), (5, 7), 40, (3 * 4, 4 * 40, 1, 1, 32)),
        (transposed(FLOAT, 8, 16, k=3, s=3), (3, 7), 16, (1 * 3, 9 * 16, 2, 2, 4)),
    ],
)
def test_product_shape(graph, extents, channels, expected) -> None:
    node = only(graph)
    for streamed in (False, True):
        found = product_shape(node, graph, extents, channels, streamed)
        assert (found.rows, found.columns, found.steps, found.blocks, found.depth) == expected
        assert found.streamed == streamed
        assert found.half == (graph.tensors[node.weight or ""].dtype == HALF)


def test_phased_means_windows_that_do_not_overlap() -> None:
    assert is_phased(only(transposed(HALF, 16, 16, k=3, s=3)))
    assert not is_phased(only(transposed(HALF, 16, 16, k=3, s=2)))
    assert not is_phased(only(conv(HALF, 16, 16, 2, s=2)))
