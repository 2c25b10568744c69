"""The greedy planner: merge the two neighbouring groups that gain most, until none gains."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping

from optifx_tvm.partition import Partition
from optifx_tvm.search.dag import Dag, bits, low, partition_groups
from optifx_tvm.search.pricing import Candidate, Pricer

EPSILON = 1e-9
"""Gains below this many microseconds are none."""


def singles(pricer: Pricer) -> list[Candidate]:
    """Every fusible node as its own group.

    A node alone is always legal; the assertion guards the chooser's contract.
    """
    found = []
    for i in bits(pricer.dag.fusible):
        candidate = pricer.price(1 << i)
        assert isinstance(candidate, Candidate), f"no kernel for {candidate}"
        found.append(candidate)
    return found


def greedy_candidates(
    pricer: Pricer, deadline: float = float("inf")
) -> tuple[list[Candidate], bool]:
    """The groups of the greedy plan, and whether it ended before ``deadline``
    (``time.thread_time``)."""
    dag = pricer.dag
    groups = {candidate.mask: candidate for candidate in singles(pricer)}
    owner = {low(mask): mask for mask in groups}
    offers: list[tuple[float, int, int]] = []

    def offer(a: int, b: int) -> None:
        merged = pricer.price(a | b)
        if isinstance(merged, Candidate):
            gain = groups[a].us + groups[b].us - merged.us
            if gain > EPSILON:
                heapq.heappush(offers, (-gain, a | b, min(a, b)))

    for i in owner:
        for j in bits(dag.around(1 << i) & ~((2 << i) - 1)):
            offer(1 << i, 1 << j)
    while offers:
        if time.thread_time() > deadline:
            return list(groups.values()), False
        _, union, a = heapq.heappop(offers)
        b = union & ~a
        if a not in groups or b not in groups or closes_cycle(dag, owner, union):
            continue
        merged = pricer.price(union)
        assert isinstance(merged, Candidate)
        del groups[a], groups[b]
        groups[union] = merged
        owner |= dict.fromkeys(bits(union), union)
        for other in sorted({owner[i] for i in bits(dag.around(union))}):
            offer(union, other)
    return list(groups.values()), True


def closes_cycle(dag: Dag, owner: Mapping[int, int], mask: int) -> bool:
    """Does a path through other groups leave ``mask`` and come back? ``owner``: node -> group."""
    reached = waiting = dag.following(mask)
    while waiting:
        i = low(waiting)
        group = owner.get(i, 1 << i)
        found = dag.following(group)
        if found & mask:
            return True
        waiting = (waiting | found & ~reached) & ~group
        reached |= found | group
    return False


def plan_greedy(pricer: Pricer, seconds: float) -> Partition:
    """The greedy plan within a time budget."""
    started = time.perf_counter()
    chosen, complete = greedy_candidates(pricer, time.thread_time() + seconds)
    groups = partition_groups(pricer.dag, ((c.mask, pricer.group(c)) for c in chosen))
    return Partition(groups, (), "greedy", time.perf_counter() - started, complete)
