"""Random legal partitions of a ConvGraph, for differential tests."""

from __future__ import annotations

import random

from optifx_tvm.analysis.channels import legal_slices
from optifx_tvm.analysis.legality import tile_fault
from optifx_tvm.errors import OptionError
from optifx_tvm.graph import FUSIBLE_OPS, ConvGraph
from optifx_tvm.partition import Group, Partition, Tile
from optifx_tvm.partition_check import schedule_units
from optifx_tvm.search.dag import fusion_mode

_EDGES = (1, 2, 3, 4, 5, 7, 8, 16)


def random_partition(
    graph: ConvGraph, seed: int, merges: float = 1.0, largest: int = 6
) -> Partition:
    """A legal partition that is the same for the same seed.

    About ``merges`` attempts per node are made to unite two groups (neighbours, or readers of
    one tensor) into one of at most ``largest`` nodes; tiles are random.
    """
    rng = random.Random(seed)
    names = [node.name for node in graph.nodes if node.op in FUSIBLE_OPS]
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    tiles = {(name,): _random_tile(graph, (name,), rng) for name in names}
    pairs = _related_pairs(graph, set(names))
    for _ in range(int(merges * len(names)) if pairs else 0):
        left, right = rng.choice(pairs)
        if groups[left] == groups[right]:
            continue
        wanted = {*groups[left], *groups[right]}
        united = tuple(name for name in names if name in wanted)
        if len(united) > largest:
            continue
        others = [group for group in dict.fromkeys(groups.values()) if not wanted & set(group)]
        tile = _random_tile(graph, united, rng)
        if tile is None or not _runs(graph, [*others, united]):
            continue
        tiles[united] = tile
        for name in united:
            groups[name] = united
    chosen = dict.fromkeys(groups.values())
    return Partition(
        tuple(_group(graph, names, tiles[names]) for names in chosen), planner="random"
    )


def single_node_partition(graph: ConvGraph) -> Partition:
    """Every fusible node by itself, its whole image one tile."""
    names = [node.name for node in graph.nodes if node.op in FUSIBLE_OPS]
    return Partition(
        tuple(_group(graph, (name,), Tile(*graph.shape(name)[1:3])) for name in names),
        planner="none",
    )


def fixed_partition(graph: ConvGraph, *groups: tuple[str, ...]) -> Partition:
    """The given groups with their last node's whole image as tile, the other nodes alone."""
    given = {name for group in groups for name in group}
    names = [node.name for node in graph.nodes if node.op in FUSIBLE_OPS]
    units = [*groups, *((name,) for name in names if name not in given)]
    tiles = [Tile(*graph.shape(unit[-1])[1:3]) for unit in units]
    made = zip(units, tiles, strict=True)
    return Partition(tuple(_group(graph, unit, tile) for unit, tile in made), planner="fixed")


def everything(graph: ConvGraph) -> Partition:
    """One group of all nodes, the last one's whole image its tile."""
    names = tuple(node.name for node in graph.nodes if node.op != "opaque")
    return fixed_partition(graph, names)


def _group(graph: ConvGraph, names: tuple[str, ...], tile: Tile | None) -> Group:
    assert tile is not None
    return Group(names, fusion_mode(graph.subgraph(names)), tile, predicted_us=1.0)


def _related_pairs(graph: ConvGraph, fusible: set[str]) -> list[tuple[str, str]]:
    pairs = []
    for tensor, readers in graph.consumers.items():
        family = [n for n in dict.fromkeys((tensor, *readers)) if n in fusible]
        if tensor not in graph.params:
            pairs += [(a, b) for i, a in enumerate(family) for b in family[i + 1 :]]
    return pairs


def _random_tile(graph: ConvGraph, names: tuple[str, ...], rng: random.Random) -> Tile | None:
    """A tile that the group can be computed with, None if even the whole image is not one."""
    group = graph.subgraph(names)
    height, width = graph.shape(names[-1])[1:3]
    slices = legal_slices(group)
    for _ in range(4):
        rows, cols = min(rng.choice(_EDGES), height), min(rng.choice(_EDGES), width)
        tile = Tile(rows, cols, rng.choice(slices))
        if tile_fault(group, tile) is None:
            return tile
    whole = Tile(height, width)
    return whole if tile_fault(group, whole) is None else None


def _runs(graph: ConvGraph, groups: list[tuple[str, ...]]) -> bool:
    try:
        schedule_units(graph, groups)
    except OptionError:
        return False
    return True
