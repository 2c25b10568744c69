"""The dependences of a ConvGraph as bit masks: bit i is the i-th node in topological order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from optifx_tvm.graph import ConvGraph, Node
from optifx_tvm.partition import Group


class Dag:
    """Reachability and neighbourhood of the nodes of one graph; immutable after construction."""

    def __init__(self, graph: ConvGraph) -> None:
        self.graph = graph
        self.names = tuple(node.name for node in graph.nodes)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.fusible = 0
        self.preds = [0] * len(self.names)
        self.succs = [0] * len(self.names)
        self.ancestors = [0] * len(self.names)
        self.descendants = [0] * len(self.names)
        self.neighbours = [0] * len(self.names)
        for i, node in enumerate(graph.nodes):
            if node.op != "opaque":
                self.fusible |= 1 << i
            for tensor in node.reads:
                if tensor in self.index:
                    producer = self.index[tensor]
                    self.preds[i] |= 1 << producer
                    self.succs[producer] |= 1 << i
        for i in range(len(self.names)):
            for j in bits(self.preds[i]):
                self.ancestors[i] |= self.ancestors[j] | 1 << j
        for i in reversed(range(len(self.names))):
            for j in bits(self.succs[i]):
                self.descendants[i] |= self.descendants[j] | 1 << j
        self._reach: dict[int, tuple[int, int]] = {}
        self._link()

    def _link(self) -> None:
        """Neighbours: an edge, or a common activation that both read (siblings)."""
        params = set(self.graph.params)
        for tensor, readers in self.graph.consumers.items():
            if tensor in params:
                continue
            together = self.mask(readers) & self.fusible
            for i in bits(together):
                self.neighbours[i] |= together & ~(1 << i)
        for i in bits(self.fusible):
            self.neighbours[i] |= (self.preds[i] | self.succs[i]) & self.fusible

    def mask(self, names: Iterable[str]) -> int:
        """The mask of these nodes."""
        found = 0
        for name in names:
            found |= 1 << self.index[name]
        return found

    def members(self, mask: int) -> tuple[str, ...]:
        """The nodes of a mask, in topological order."""
        return tuple(self.names[i] for i in bits(mask))

    def nodes(self, mask: int) -> tuple[Node, ...]:
        """The same, as nodes."""
        return tuple(self.graph.nodes[i] for i in bits(mask))

    def before(self, mask: int) -> int:
        """Nodes outside ``mask`` that some node of it depends on."""
        return self.reach(mask)[0]

    def after(self, mask: int) -> int:
        """Nodes outside ``mask`` that depend on some node of it."""
        return self.reach(mask)[1]

    def reach(self, mask: int) -> tuple[int, int]:
        """``before`` and ``after``; remembered, for a search asks again and again."""
        known = self._reach.get(mask)
        if known is None:
            before = after = 0
            for i in bits(mask):
                before |= self.ancestors[i]
                after |= self.descendants[i]
            known = self._reach[mask] = before & ~mask, after & ~mask
        return known

    def following(self, mask: int) -> int:
        """Nodes outside ``mask`` that read a result of it."""
        found = 0
        for i in bits(mask):
            found |= self.succs[i]
        return found & ~mask

    def gap(self, mask: int) -> int:
        """Nodes outside ``mask`` on a path between two of its nodes; 0 if it is convex."""
        return self.before(mask) & self.after(mask)

    def around(self, mask: int) -> int:
        """Fusible nodes outside ``mask`` that are neighbours of one of its nodes."""
        found = 0
        for i in bits(mask):
            found |= self.neighbours[i]
        return found & ~mask

    def is_connected(self, mask: int) -> bool:
        """Do neighbour relations inside ``mask`` connect all its nodes?"""
        reached, rest = mask & -mask, mask & ~(mask & -mask)
        while rest:
            step = self.around(reached) & rest
            if not step:
                return False
            reached, rest = reached | step, rest & ~step
        return True

    def execution_order(self, masks: Iterable[int]) -> list[int] | None:
        """Disjoint ``masks`` that cover the fusible nodes in an order that runs (the earliest
        first node first), or None if they depend on each other in a cycle."""
        waiting = sorted(
            (*masks, *(1 << i for i in bits(~self.fusible & self.everything))), key=low
        )
        needs = [self._direct_needs(mask) for mask in waiting]
        order, done = [], 0
        while waiting:
            ready = next((k for k, need in enumerate(needs) if not need & ~done), None)
            if ready is None:
                return None
            mask = waiting.pop(ready)
            needs.pop(ready)
            done |= mask
            if mask & self.fusible:
                order.append(mask)
        return order

    @property
    def everything(self) -> int:
        """All nodes."""
        return (1 << len(self.names)) - 1

    def _direct_needs(self, mask: int) -> int:
        needs = 0
        for i in bits(mask):
            needs |= self.preds[i]
        return needs & ~mask


def bits(mask: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def low(mask: int) -> int:
    """Index of the lowest set bit."""
    return (mask & -mask).bit_length() - 1


def fusion_mode(group: ConvGraph) -> str:
    """How the nodes of a group hang together: "single", "straight" (a chain), "split" (one tensor
    for several nodes), "merge" (several producers for one node) or "split+merge"."""
    if len(group.nodes) == 1:
        return "single"
    dag = Dag(group)
    merge = any(preds.bit_count() > 1 for preds in dag.preds)
    joined = sum(succs.bit_count() for succs in dag.succs)
    # Fewer edges than a tree: parts that only share an input are siblings.
    split = any(succs.bit_count() > 1 for succs in dag.succs) or joined < len(group.nodes) - 1
    names = [name for name, found in (("split", split), ("merge", merge)) if found]
    return "+".join(names) or "straight"


def partition_groups(dag: Dag, groups: Iterable[tuple[int, Group]]) -> tuple[Group, ...]:
    """The groups (with their masks) in an order that runs; they must not form a cycle."""
    by_mask = dict(groups)
    order = dag.execution_order(by_mask)
    assert order is not None, "the groups of a partition depend on each other in a cycle"
    return tuple(by_mask[mask] for mask in order)
