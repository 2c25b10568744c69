"""Is a partition of a graph legal? What every planner, also a person's own, must keep to."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from optifx_tvm.analysis.legality import tile_fault
from optifx_tvm.errors import OptionError
from optifx_tvm.graph import FUSIBLE_OPS, ConvGraph
from optifx_tvm.partition import Partition


def check_partition(graph: ConvGraph, partition: Partition) -> None:
    """Raises OptionError, with the first fault found, unless the groups are disjoint, cover every
    fusible node, contain no other node, have a single tile space each and can be run in some
    order."""
    fusible = {node.name for node in graph.nodes if node.op in FUSIBLE_OPS}
    counts = Counter(name for group in partition.groups for name in group.nodes)
    for group in partition.groups:
        label = describe(group.nodes)
        if not group.nodes:
            raise OptionError("planner returned an empty group: a group needs at least one node")
        for name in group.nodes:
            if name not in graph.by_name:
                raise OptionError(f"group {label}: the graph has no node {name}")
            if name not in fusible:
                raise OptionError(f"group {label}: node {name} is opaque and can't be fused")
            if counts[name] > 1:
                raise OptionError(f"node {name} is in {counts[name]} groups, it must be in one")
        reason = tile_fault(graph.subgraph(group.nodes), group.tile)
        if reason:
            raise OptionError(f"group {label} can't be fused: {reason}")
    missing = sorted(fusible - set(counts))
    if missing:
        raise OptionError(f"planner left out nodes {describe(missing)}: each must be in a group")
    schedule_units(graph, [group.nodes for group in partition.groups])


def schedule_units(graph: ConvGraph, groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups, and the other nodes one by one, in an order that runs: as near to the order of the
    nodes as dependences allow. Raises OptionError if groups depend on each other in a cycle."""
    unit_of = {name: tuple(names) for names in groups for name in names}
    for node in graph.nodes:
        unit_of.setdefault(node.name, (node.name,))
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    units = dict.fromkeys(unit_of.values())
    needs = {
        unit: {unit_of[p] for name in unit for p in graph.producers(name)} - {unit}
        for unit in units
    }
    readers: Mapping[tuple[str, ...], list[tuple[str, ...]]] = {unit: [] for unit in units}
    for unit, producers in needs.items():
        for producer in producers:
            readers[producer].append(unit)
    waiting = {unit: len(producers) for unit, producers in needs.items()}
    last = {unit: max(position[name] for name in unit) for unit in units}
    ready = [(last[unit], unit) for unit in units if not waiting[unit]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in readers[unit]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (last[reader], reader))
    if len(order) < len(units):
        stuck = min(
            (unit for unit in units if waiting[unit] and len(unit) > 1), key=last.__getitem__
        )
        raise OptionError(
            f"group {describe(stuck)} needs a result that depends on the group itself: "
            "no order of the groups runs"
        )
    return order


def describe(names: Sequence[str]) -> str:
    """Node names for a message, at most four of them."""
    shown = ", ".join(names[:4])
    return f"[{shown}{', ...' if len(names) > 4 else ''}]"
