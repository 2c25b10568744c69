"""The exact planner for small graphs, by a method of its own: what the search is tested against."""

from __future__ import annotations

import time
from functools import cache

from optifx_tvm.partition import Partition
from optifx_tvm.search.dag import partition_groups
from optifx_tvm.search.pricing import Candidate, Pricer

LIMIT = 12
"""Most fusible nodes."""


def oracle_candidates(pricer: Pricer) -> list[Candidate]:
    """The cheapest partition: dynamic programming over the sets of nodes that are done.

    Every subset of nodes is priced; a group may run when all that it reads is done, so whatever is
    built here can be executed.
    """
    dag = pricer.dag
    assert dag.everything == dag.fusible, "the oracle takes graphs without opaque nodes"
    assert dag.fusible.bit_count() <= LIMIT, f"the oracle takes at most {LIMIT} nodes"
    groups: list[tuple[Candidate, int]] = []
    for mask in range(1, dag.fusible + 1):
        if dag.is_connected(mask):
            candidate = pricer.price(mask)
            if isinstance(candidate, Candidate):
                groups.append((candidate, dag.before(mask)))

    @cache
    def rest(done: int) -> tuple[float, tuple[Candidate, ...]]:
        if done == dag.fusible:
            return 0.0, ()
        best: tuple[float, tuple[Candidate, ...]] | None = None
        for candidate, needs in groups:
            if candidate.mask & done or needs & ~done:
                continue
            us, others = rest(done | candidate.mask)
            if best is None or us + candidate.us < best[0]:
                best = (us + candidate.us, (candidate, *others))
        assert best is not None, "every node alone is a legal group"
        return best

    return list(rest(0)[1])


def plan_oracle(pricer: Pricer) -> Partition:
    """The exact plan."""
    started = time.perf_counter()
    chosen = oracle_candidates(pricer)
    groups = partition_groups(pricer.dag, ((c.mask, pricer.group(c)) for c in chosen))
    return Partition(groups, (), "oracle", time.perf_counter() - started)
