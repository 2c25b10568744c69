"""Random graphs and random prices for tests of the search."""

from __future__ import annotations

import random

from optifx_tvm.graph import ConvGraph, Step
from optifx_tvm.partition import Rejected, Tile
from tests.support.groups import RELU, GroupBuilder


def random_graph(seed: int, most: int = 12) -> ConvGraph:
    """A connected or unconnected DAG of 3 to ``most`` nodes of all kinds of sharing."""
    rng = random.Random(seed)
    b = GroupBuilder()
    values = [b.input(8, 8, 8) for _ in range(rng.randint(1, 2))]
    size = rng.randint(3, most)
    while len(b.nodes) < size:
        kind = rng.choice(("conv", "unary", "add", "concat"))
        near = values[-rng.randint(1, 5) :]
        if kind == "conv":
            values.append(b.conv(rng.choice(near), 8, rng.choice((1, 3))))
        elif kind == "unary":
            values.append(b.eltwise(rng.choice(near), RELU))
        elif kind == "add":
            values.append(b.eltwise(rng.choice(near), Step("add", (0, rng.choice(near)))))
        elif len(b.nodes) + 2 <= size:
            joined = b.concat(rng.choice(near), rng.choice(near))
            values.append(b.conv(joined, 8))
    read = {tensor for node in b.nodes for tensor in node.reads}
    outputs = [n.name for n in b.nodes if n.name not in read or rng.random() < 0.1]
    return b.graph(*outputs)


def random_prices(seed: int, refused: float = 0.25):
    """A chooser: prices depend on structure alone, may gain or lose, some groups are refused."""

    def choose(group: ConvGraph) -> tuple[Tile, float] | Rejected:
        rng = random.Random(f"{seed} {group.structural_hash}")
        size = len(group.nodes)
        if size == 1:
            return Tile(1, 1), rng.uniform(5.0, 15.0)
        if rng.random() < refused:
            return Rejected(tuple(node.name for node in group.nodes), "drawn")
        return Tile(1, 1), 10.0 * size * rng.uniform(0.5, 1.2)

    return choose
