"""Prices of candidate groups: legal or not, the best tile and its predicted time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optifx_tvm.graph import FUSIBLE_OPS, ConvGraph, Step
from optifx_tvm.partition import Group, Rejected, Tile
from optifx_tvm.search.dag import Dag, bits, fusion_mode

MAX_GROUP = 12
"""Most nodes of a group."""

Chooser = Callable[[ConvGraph], "tuple[Tile, float] | Rejected"]
"""The best tile of a group and its predicted microseconds, or why there is none."""


@dataclass(frozen=True)
class Candidate:
    """A legal group, as a mask over the nodes of its graph."""

    mask: int
    tile: Tile
    us: float


class Pricer:
    """Prices the groups of one graph; equal structures are priced once."""

    def __init__(self, dag: Dag, choose: Chooser, max_size: int = MAX_GROUP) -> None:
        self.dag = dag
        self.choose = choose
        self.max_size = max_size
        self.evaluations = 0
        """Structures priced so far."""
        self._by_mask: dict[int, Candidate | str] = {}
        self._by_key: dict[tuple[object, ...], tuple[Tile, float] | str] = {}
        self._signatures = _signatures(dag.graph)
        self._outputs = set(dag.graph.outputs)

    def price(self, mask: int) -> Candidate | Rejected:
        """The candidate, or why these nodes can't be fused."""
        if mask not in self._by_mask:
            self._by_mask[mask] = self._price(mask)
        found = self._by_mask[mask]
        return Rejected(self.dag.members(mask), found) if isinstance(found, str) else found

    def group(self, candidate: Candidate) -> Group:
        """The candidate as it appears in a partition."""
        names = self.dag.members(candidate.mask)
        mode = fusion_mode(self.dag.graph.subgraph(names))
        return Group(names, mode, candidate.tile, candidate.us)

    def _price(self, mask: int) -> Candidate | str:
        reason = refusal(self.dag, mask, self.max_size)
        if reason:
            return reason
        key = self._key(mask)
        if key not in self._by_key:
            self.evaluations += 1
            found = self.choose(self.dag.graph.subgraph(self.dag.members(mask)))
            self._by_key[key] = found.reason if isinstance(found, Rejected) else found
        known = self._by_key[key]
        return known if isinstance(known, str) else Candidate(mask, *known)

    def _key(self, mask: int) -> tuple[object, ...]:
        """What the price depends on: the structure, without names. Equal exactly if the groups'
        structural hashes are equal, and much cheaper."""
        local: dict[str, int] = {}
        key: list[object] = []
        for i in bits(mask):
            node = self.dag.graph.nodes[i]
            key.append(self._signatures[i])
            key.extend(local.setdefault(tensor, len(local)) for tensor in node.reads)
            local[node.name] = len(local)
            read_outside = self.dag.succs[i] & ~mask
            key.append(bool(read_outside) or node.name in self._outputs)
        return tuple(key)


def refusal(dag: Dag, mask: int, max_size: int = MAX_GROUP) -> str | None:
    """Why these nodes can't be one group whatever its tile is; None if nothing speaks against."""
    for node in dag.nodes(mask):
        if node.op not in FUSIBLE_OPS:
            return f"{node.name} is not a fusible operator"
        for tensor in (node.name, *node.inputs):
            shape = dag.graph.shape(tensor)
            if len(shape) != 4 or min(shape) < 1:
                return f"{tensor} has shape {shape}: only static images (N, H, W, C) are fused"
    if mask.bit_count() > max_size:
        return f"{mask.bit_count()} operators, a group has at most {max_size}"
    gap = dag.gap(mask)
    if gap:
        return f"not convex: a path leaves the group through {dag.members(gap)[0]}"
    batches = {dag.graph.shape(node.name)[0] for node in dag.nodes(mask)}
    if len(batches) > 1:
        return "its operators differ in batch size"
    return None


def _signatures(graph: ConvGraph) -> list[int]:
    """For every node a number that is equal for nodes with equal attributes and shapes."""
    known: dict[tuple[object, ...], int] = {}
    params = set(graph.params)

    def steps(chain: tuple[Step, ...], places: dict[str, int]) -> tuple[object, ...]:
        return tuple(
            (s.op, *(("t", places[a]) if isinstance(a, str) else (type(a), a) for a in s.args))
            for s in chain
        )

    found = []
    for node in graph.nodes:
        places = {tensor: k for k, tensor in enumerate(node.reads)}
        specs = tuple(
            (graph.tensors[t].shape, graph.tensors[t].dtype, t in params)
            for t in (*node.reads, node.name)
        )
        signature = (
            node.op,
            node.window,
            node.groups,
            tuple(places[t] for t in node.inputs),
            node.weight is not None and places[node.weight],
            steps(node.prologue, places),
            steps(node.epilogue, places),
            specs,
        )
        found.append(known.setdefault(signature, len(known)))
    return found
