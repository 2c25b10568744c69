"""Legal candidates: all of them for small graphs, the promising ones for large graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Rejected
from optifx_tvm.search.dag import Dag, bits, low
from optifx_tvm.search.pricing import MAX_GROUP, Candidate, Pricer

EXHAUSTIVE = 12
"""Graphs of up to this many fusible nodes are enumerated completely."""
BEAM = 5
"""Candidates kept for each first node and size when growing."""
SLACK = 1.1
"""A candidate is grown further if it costs at most this times its nodes alone."""


def connected_sets(dag: Dag, max_size: int) -> Iterator[int]:
    """Every set of up to ``max_size`` fusible nodes that edges or common inputs connect, once, in
    a deterministic order."""

    def grow(mask: int, around: int, banned: int) -> Iterator[int]:
        yield mask
        if mask.bit_count() == max_size:
            return
        for i in bits(around):
            bigger = mask | 1 << i
            yield from grow(bigger, (around | dag.neighbours[i]) & ~bigger & ~banned, banned)
            banned |= 1 << i
            around &= ~banned

    for first in bits(dag.fusible):
        banned = (1 << first) - 1
        yield from grow(1 << first, dag.neighbours[first] & ~banned, banned)


def enumerate_candidates(
    graph: ConvGraph,
    is_legal: Callable[[tuple[str, ...]], str | None],
    max_size: int = MAX_GROUP,
) -> Iterator[tuple[str, ...] | Rejected]:
    """Connected or sibling sets of nodes: those that ``is_legal`` has nothing against, and a
    Rejected with its reason for each of the others."""
    dag = Dag(graph)
    for mask in connected_sets(dag, max_size):
        names = dag.members(mask)
        reason = is_legal(names)
        yield names if reason is None else Rejected(names, reason)


def all_candidates(pricer: Pricer) -> list[Candidate]:
    """Every legal candidate of a small graph."""
    sets = connected_sets(pricer.dag, pricer.max_size)
    found = (pricer.price(mask) for mask in sets)
    return [candidate for candidate in found if isinstance(candidate, Candidate)]


def grown_candidates(
    pricer: Pricer, evaluations: int, deadline: float
) -> tuple[list[Candidate], bool]:
    """Promising candidates of a large graph, and whether nothing was cut off.

    Level by level every kept candidate is extended by one neighbour (and what convexity then asks
    for); for each first node and size the ``BEAM`` candidates that save most are kept. Ends early
    after ``evaluations`` newly priced structures, or at ``deadline`` (``time.thread_time``).
    """
    dag = pricer.dag
    alone: dict[int, float] = {}
    level: list[Candidate] = []
    for i in bits(dag.fusible):
        candidate = pricer.price(1 << i)
        if isinstance(candidate, Candidate):
            alone[i] = candidate.us
            level.append(candidate)
    found, seen = list(level), {candidate.mask for candidate in level}
    last = pricer.evaluations + evaluations
    while level:
        grown: dict[tuple[int, int], list[tuple[float, Candidate]]] = {}
        for parent in level:
            for i in bits(dag.around(parent.mask)):
                mask = _close(dag, parent.mask | 1 << i)
                if mask is None or mask in seen or mask.bit_count() > pricer.max_size:
                    continue
                if pricer.evaluations >= last or time.thread_time() > deadline:
                    return found, False
                seen.add(mask)
                candidate = pricer.price(mask)
                if isinstance(candidate, Candidate):
                    single = sum(alone[j] for j in bits(mask))
                    if candidate.us <= single * SLACK:
                        key = (low(mask), mask.bit_count())
                        grown.setdefault(key, []).append((candidate.us - single, candidate))
        level = []
        for key in sorted(grown):
            ranked = sorted(grown[key], key=lambda item: (item[0], item[1].mask))
            level += [candidate for _, candidate in ranked[:BEAM]]
        found += level
    return found, True


def _close(dag: Dag, mask: int) -> int | None:
    """The smallest convex set with ``mask``, or None if it has a node that can't be fused."""
    gap = dag.gap(mask)
    return mask | gap if not gap & ~dag.fusible else None
