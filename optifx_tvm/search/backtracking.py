"""Cost-based backtracking over partitions: branch and bound with an admissible lower bound.

The first node that is not covered yet is covered by each candidate in turn, cheapest first
(*reduced cost*: price minus the shares of its nodes). Shares are a feasible dual of the covering
problem: over no candidate do they exceed its price, so the shares of the nodes that are left bound
what they cost. What is left, together with the order that the chosen groups force on it, is a
state; its best completion is remembered. The graph is cut into independent components first: nodes
that no candidate worth having joins.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from optifx_tvm.partition import Partition
from optifx_tvm.search.dag import Dag, bits, low, partition_groups
from optifx_tvm.search.enumeration import EXHAUSTIVE, all_candidates, grown_candidates
from optifx_tvm.search.greedy import EPSILON, greedy_candidates, singles
from optifx_tvm.search.pricing import Candidate, Pricer

DUAL_ROUNDS = 12
WINDOW = 24
"""Nodes that are covered anew together when the whole is too large."""
MIN_WINDOW_VISITS = 200

Order = frozenset[tuple[int, int]]
"""Pairs (a, b): groups that were chosen force every node of a to run before every node of b."""
State = tuple[int, Order]
"""What is left to cover, and the order forced on it."""
Completion = tuple[float, tuple[Candidate, ...]]
"""Reduced cost and the groups that cover a state."""


@dataclass(frozen=True)
class Effort:
    """What the search may spend. The counts make a plan reproducible; the time, a backstop, is this
    thread's processor time, so that a loaded machine gets the same plan."""

    evaluations: int = 1200
    """Structures priced when candidates are grown."""
    visits: int = 20_000
    """States opened by the backtracking."""
    seconds: float = 10.0


def plan_search(pricer: Pricer, effort: Effort) -> Partition:
    """The cheapest partition that the effort allows to find."""
    started = time.perf_counter()
    chosen, complete = search_candidates(pricer, effort)
    groups = partition_groups(pricer.dag, ((c.mask, pricer.group(c)) for c in chosen))
    return Partition(groups, (), "search", time.perf_counter() - started, complete)


def search_candidates(pricer: Pricer, effort: Effort) -> tuple[list[Candidate], bool]:
    """The groups of the best partition found, and whether the search was complete."""
    started = time.thread_time()
    incumbent, complete = greedy_candidates(pricer, started + 0.3 * effort.seconds)
    if pricer.dag.fusible.bit_count() <= EXHAUSTIVE:
        candidates = all_candidates(pricer)
    else:
        deadline = started + 0.6 * effort.seconds
        candidates, all_grown = grown_candidates(pricer, effort.evaluations, deadline)
        complete = complete and all_grown
    alone = {low(candidate.mask): candidate for candidate in singles(pricer)}
    useful = _useful([*candidates, *incumbent], alone)
    solver = Solver(pricer.dag, useful, alone, started + 0.9 * effort.seconds)
    components = _components(pricer.dag.fusible, useful)
    chosen: list[Candidate] = []
    for component in components:
        part = [c for c in incumbent if c.mask & component]
        visits = effort.visits * component.bit_count() // pricer.dag.fusible.bit_count()
        chosen += solver.solve(part, visits)
    if pricer.dag.execution_order([c.mask for c in chosen]) is None:
        # Components are independent in cost but may depend on each other in a cycle.
        solver.complete = True
        chosen = solver.solve(incumbent, effort.visits)
    if not solver.complete:
        chosen = solver.refine(chosen, effort.visits)
    return chosen, complete and solver.complete


def _useful(candidates: Iterable[Candidate], alone: dict[int, Candidate]) -> list[Candidate]:
    """Singles and what is cheaper than its nodes alone, without repetition, in order of masks."""
    found = {candidate.mask: candidate for candidate in alone.values()}
    for candidate in candidates:
        if candidate.us < sum(alone[i].us for i in bits(candidate.mask)) - EPSILON:
            found[candidate.mask] = candidate
    return [found[mask] for mask in sorted(found)]


def _components(fusible: int, candidates: list[Candidate]) -> list[int]:
    """Sets of nodes that candidates join, in order of their first nodes."""
    parts: list[int] = []
    for mask in [1 << i for i in bits(fusible)] + [c.mask for c in candidates]:
        touched = [part for part in parts if part & mask]
        parts = [part for part in parts if not part & mask]
        for part in touched:
            mask |= part
        parts.append(mask)
    return sorted(parts, key=low)


class Solver:
    """Best covers of sets of nodes by candidates that can be executed in some order."""

    def __init__(
        self,
        dag: Dag,
        candidates: list[Candidate],
        alone: dict[int, Candidate],
        deadline: float,
    ) -> None:
        self.dag = dag
        self.deadline = deadline
        self.complete = True
        """Did every solve come to its end?"""
        self.shares = dual(candidates, alone)
        self.by_first: dict[int, list[tuple[float, Candidate]]] = {i: [] for i in alone}
        for candidate in candidates:
            reduced = candidate.us - sum(self.shares[i] for i in bits(candidate.mask))
            self.by_first[low(candidate.mask)].append((max(reduced, 0.0), candidate))
        for options in self.by_first.values():
            # Among equals the larger group first: fewer kernels.
            options.sort(key=lambda o: (round(o[0], 6), -o[1].mask.bit_count(), o[1].mask))
        self._best: dict[State, Completion] = {}
        self._bound: dict[State, float] = {}
        self._visits = 0
        self._exhausted = False

    def solve(
        self, incumbent: list[Candidate], visits: int, order: Order = frozenset()
    ) -> list[Candidate]:
        """The cheapest cover of the incumbent's nodes that ``visits`` states suffice to find, or
        the incumbent itself. ``order`` is what groups outside force on the nodes."""
        self._visits, self._exhausted = visits, False
        nodes = 0
        for candidate in incumbent:
            nodes |= candidate.mask
        limit = sum(c.us for c in incumbent) - sum(self.shares[i] for i in bits(nodes))
        found = self._run((nodes, order), limit)
        self.complete = self.complete and not self._exhausted
        return incumbent if found is None else list(found[1])

    def refine(self, incumbent: list[Candidate], visits: int) -> list[Candidate]:
        """Improve a cover of the graph window by window: each group with its neighbours is covered
        anew while the others stay."""
        chosen = {candidate.mask: candidate for candidate in incumbent}
        share = max(visits // max(len(chosen), 1), MIN_WINDOW_VISITS)
        for start in sorted(chosen, key=low):
            if start not in chosen or time.thread_time() > self.deadline:
                continue
            window = self._window(start, chosen)
            outside = [mask for mask in chosen if not mask & window]
            order: Order = frozenset()
            for mask in outside:
                order = _force(self.dag, mask, window, order)
            inside = [chosen[mask] for mask in sorted(chosen) if mask & window]
            better = self.solve(inside, share, order)
            for candidate in inside:
                del chosen[candidate.mask]
            chosen |= {candidate.mask: candidate for candidate in better}
        return list(chosen.values())

    def _window(self, start: int, chosen: dict[int, Candidate]) -> int:
        """The group ``start`` with groups around it, nearest first, up to WINDOW nodes."""
        owner = {i: mask for mask in chosen for i in bits(mask)}
        window = start
        while True:
            fitting = (owner[i] for i in bits(self.dag.around(window)))
            group = next((m for m in fitting if (window | m).bit_count() <= WINDOW), None)
            if group is None:
                return window
            window |= group

    def _run(self, state: State, limit: float) -> Completion | None:
        """Drive ``_search`` with a stack of its own: networks are deeper than Python's."""
        stack = [self._search(state, limit)]
        answer: Completion | None = None
        started = False
        while stack:
            try:
                request = stack[-1].send(answer) if started else next(stack[-1])
                stack.append(self._search(*request))
                started = False
            except StopIteration as finished:
                stack.pop()
                answer, started = finished.value, True
        return answer

    def _search(
        self, state: State, limit: float
    ) -> Generator[tuple[State, float], Completion | None, Completion | None]:
        """The best completion of ``state`` if its reduced cost is below ``limit``, else None.

        Yields (state, limit) and is sent the answer to it.
        """
        left, order = state
        if not left:
            return (0.0, ()) if limit > EPSILON else None
        if state in self._best:
            return self._best[state] if self._best[state][0] < limit - EPSILON else None
        if self._bound.get(state, 0.0) >= limit - EPSILON or self._spent():
            return None
        best: Completion | None = None
        least = limit
        for reduced, candidate in self.by_first[low(left)]:
            if reduced >= least - EPSILON:
                break
            if candidate.mask & ~left or not _may_run(self.dag, candidate.mask, order):
                continue
            rest = left & ~candidate.mask
            following = _force(self.dag, candidate.mask, rest, order)
            completion = yield (rest, following), least - reduced
            if completion is not None:
                least = reduced + completion[0]
                best = (least, (candidate, *completion[1]))
        if self._exhausted:
            return best
        if best is None:
            self._bound[state] = limit
        else:
            self._best[state] = best
        return best

    def _spent(self) -> bool:
        self._visits -= 1
        if self._visits < 0 or (self._visits % 256 == 0 and time.thread_time() > self.deadline):
            self._exhausted = True
        return self._exhausted


def _may_run(dag: Dag, mask: int, order: Order) -> bool:
    """Can these nodes be one group, given the order that the groups chosen before force?"""
    if not order:
        return True
    after = dag.after(mask)
    grows = True
    while grows:
        grows = False
        for before, then in order:
            if before & (mask | after) and then & ~after:
                if then & mask:
                    return False
                after, grows = after | then, True
    return True


def _force(dag: Dag, mask: int, rest: int, order: Order) -> Order:
    """The order forced on ``rest`` by the groups chosen before and the group ``mask``."""
    before, after = dag.before(mask) & rest, dag.after(mask) & rest
    if not order and not (before and after):
        return order
    grows = True
    while grows:
        grows = False
        for a, b in order:
            if b & (mask | before) and a & ~mask & ~before:
                before, grows = before | a & ~mask, True
            if a & (mask | after) and b & ~mask & ~after:
                after, grows = after | b & ~mask, True
    pairs = {(a & rest, b & rest) for a, b in (*order, (before, after))}
    pairs = {(a, b) for a, b in pairs if a and b}
    # Kept even where b depends on a anyway: what runs between them forbids to fuse a with b.
    return frozenset(
        (a, b)
        for a, b in pairs
        if not any((a, b) != (c, d) and not a & ~c and not b & ~d for c, d in pairs)
    )


def dual(candidates: list[Candidate], alone: dict[int, Candidate]) -> dict[int, float]:
    """Shares of the nodes that exceed no candidate's price when summed over its nodes.

    They start from the best price per unit of the nodes' own prices and are then raised in turn.
    """
    weights = {i: max(candidate.us, EPSILON) for i, candidate in alone.items()}
    shares = dict(weights)
    members = [(c.us, tuple(bits(c.mask))) for c in candidates]
    slack = []
    for us, nodes in members:
        rate = us / sum(weights[i] for i in nodes)
        for i in nodes:
            shares[i] = min(shares[i], weights[i] * rate)
    covering: dict[int, list[int]] = {i: [] for i in alone}
    for k, (us, nodes) in enumerate(members):
        slack.append(us - sum(shares[i] for i in nodes))
        for i in nodes:
            covering[i].append(k)
    order = list(alone)
    for _ in range(DUAL_ROUNDS):
        raised = 0.0
        for i in order:
            # Half of the room each time leaves something for the node's neighbours.
            room = min(slack[k] for k in covering[i]) / 2
            if room <= 0.0:
                continue
            shares[i] += room
            raised += room
            for k in covering[i]:
                slack[k] -= room
        order.reverse()
        if raised < EPSILON:
            break
    return shares
