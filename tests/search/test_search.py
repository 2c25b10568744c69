"""The planners against each other, on random DAGs and on blocks of networks."""

from __future__ import annotations

from functools import partial

import pytest

from optifx_tvm.cost_model.roofline import RooflineCostModel
from optifx_tvm.cost_model.tiles import best_tile
from optifx_tvm.device import GENERIC_CPU, H200
from optifx_tvm.errors import OptionError
from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Partition, Rejected, Tile
from optifx_tvm.partition_check import check_partition, schedule_units
from optifx_tvm.search.backtracking import Effort, Solver, dual, plan_search, search_candidates
from optifx_tvm.search.dag import Dag, bits, fusion_mode, low
from optifx_tvm.search.enumeration import all_candidates, grown_candidates
from optifx_tvm.search.greedy import greedy_candidates, plan_greedy, singles
from optifx_tvm.search.oracle import oracle_candidates, plan_oracle
from optifx_tvm.search.planners import make_planner
from optifx_tvm.search.pricing import Candidate, Pricer
from tests.support import blocks
from tests.support.groups import GroupBuilder
from tests.support.random_graphs import random_graph, random_prices

CLOSE = 1e-6


def _cost(candidates: list[Candidate]) -> float:
    return sum(candidate.us for candidate in candidates)


@pytest.mark.parametrize("seed", range(220))
def test_search_equals_oracle_and_greedy_is_never_better(seed):
    dag = Dag(random_graph(seed))
    pricer = Pricer(dag, random_prices(seed))
    exact = oracle_candidates(pricer)
    found, complete = search_candidates(pricer, Effort())
    greedy, _ = greedy_candidates(pricer)
    assert complete
    assert _cost(found) == pytest.approx(_cost(exact), abs=CLOSE)
    assert _cost(greedy) >= _cost(found) - CLOSE
    for chosen in (found, exact, greedy):
        covered = 0
        for candidate in chosen:
            assert not covered & candidate.mask
            covered |= candidate.mask
        assert covered == dag.fusible
        assert dag.execution_order([c.mask for c in chosen]) is not None


def test_greedy_is_worse_somewhere():
    """Else the comparison above would say little about the search."""
    worse = 0
    for seed in range(40):
        pricer = Pricer(Dag(random_graph(seed)), random_prices(seed))
        found, _ = search_candidates(pricer, Effort())
        greedy, _ = greedy_candidates(pricer)
        worse += _cost(greedy) > _cost(found) + CLOSE
    assert worse > 10


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_a_feasible_dual(seed):
    """Shares exceed no candidate's price, so that sums of shares are lower bounds."""
    pricer = Pricer(Dag(random_graph(seed)), random_prices(seed))
    candidates = all_candidates(pricer)
    shares = dual(candidates, {low(c.mask): c for c in singles(pricer)})
    for candidate in candidates:
        assert sum(shares[i] for i in bits(candidate.mask)) <= candidate.us + CLOSE
    assert sum(shares.values()) <= _cost(oracle_candidates(pricer)) + CLOSE


def _crossing() -> ConvGraph:
    """Two pairs that are convex one by one but depend on each other crosswise."""
    b = GroupBuilder()
    x, y = b.input(8, 8, 8), b.input(8, 8, 8)
    a, c = b.conv(x, 8), b.conv(y, 8)
    left = b.eltwise(a, Step("add", (0, c)))
    right = b.eltwise(c, Step("add", (0, a)))
    return b.graph(left, right)


def test_groups_that_need_each_other_are_never_chosen_together():
    graph = _crossing()
    dag = Dag(graph)
    a, c, left, right = (1 << i for i in range(4))
    cheap = {a | right, c | left}

    def choose(group: ConvGraph) -> tuple[Tile, float] | Rejected:
        mask = dag.mask(node.name for node in group.nodes)
        size = len(group.nodes)
        return Tile(1, 1), (1.0 if mask in cheap else 10.0 * size)

    class ByMask(Pricer):
        """Prices by nodes rather than by structure."""

        def _key(self, mask: int) -> tuple[object, ...]:
            return (mask,)

    pricer = ByMask(dag, choose)
    assert dag.gap(a | right) == dag.gap(c | left) == 0
    assert dag.execution_order([a | right, c | left]) is None
    for found in (search_candidates(pricer, Effort())[0], oracle_candidates(pricer)):
        assert _cost(found) == 21.0
        assert dag.execution_order([x.mask for x in found]) is not None
    assert _cost(greedy_candidates(pricer)[0]) == 21.0
    incumbent = singles(pricer)
    solver = Solver(dag, all_candidates(pricer), {low(c.mask): c for c in incumbent}, float("inf"))
    refined = solver.refine(incumbent, 1000)
    assert _cost(refined) == 21.0
    assert dag.execution_order([x.mask for x in refined]) is not None


def _pricer(graph: ConvGraph, device=H200) -> Pricer:
    model = RooflineCostModel(device)
    return Pricer(Dag(graph), partial(best_tile, device=device, cost_model=model))


@pytest.mark.parametrize("device", [GENERIC_CPU, H200], ids=lambda d: d.kind)
@pytest.mark.parametrize(
    "graph",
    [
        blocks.fire(55, 64, 16, 64),
        blocks.inverted_residual(56, 24, 144),
        blocks.bottleneck(28, 512, 128),
        blocks.inception(),
        blocks.dense_layers(),
        blocks.separable_cell(14, 32, pairs=1),
        blocks.stem(64),
    ],
    ids=["fire", "inverted", "bottleneck", "inception", "dense", "separable", "stem"],
)
def test_blocks_of_networks_are_planned_exactly(graph, device):
    pricer = _pricer(graph, device)
    found = plan_search(pricer, Effort())
    check_partition(graph, found)
    assert found.complete
    assert found.predicted_us == pytest.approx(plan_oracle(pricer).predicted_us, abs=CLOSE)


def _network(cells: int) -> ConvGraph:
    """Fire modules with shortcuts around them."""
    b = GroupBuilder("float16")
    x = b.input(28, 28, 64)
    for _ in range(cells):
        s = b.conv(x, 16)
        joined = b.concat(b.conv(s, 32), b.conv(s, 32, 3))
        x = b.eltwise(joined, Step("add", (0, x)))
    return b.graph()


def test_large_graphs_are_planned_within_the_effort():
    graph = _network(12)
    found = plan_search(_pricer(graph), Effort())
    check_partition(graph, found)
    greedy = plan_greedy(_pricer(graph), 10.0)
    check_partition(graph, greedy)
    assert found.predicted_us <= greedy.predicted_us + CLOSE
    alone = sum(c.us for c in singles(_pricer(graph)))
    assert found.predicted_us < 0.7 * alone


def test_equal_structures_are_priced_once():
    few, many = _pricer(_network(4)), _pricer(_network(12))
    for pricer in (few, many):
        grown_candidates(pricer, 10_000, float("inf"))
    assert many.evaluations < 1.5 * few.evaluations


def test_same_graph_same_plan_whatever_the_names():
    graph = _network(6)
    canonical, names = graph.canonical()
    first = plan_search(_pricer(graph), Effort())
    again = plan_search(_pricer(graph), Effort())
    renamed = plan_search(_pricer(canonical), Effort())
    assert first.groups == again.groups
    assert [tuple(names[n] for n in g.nodes) for g in first.groups] == [
        g.nodes for g in renamed.groups
    ]
    assert [g.tile for g in first.groups] == [g.tile for g in renamed.groups]


@pytest.mark.parametrize(
    "effort",
    [Effort(visits=10), Effort(evaluations=5), Effort(seconds=0.0)],
    ids=["visits", "evaluations", "time"],
)
def test_a_spent_budget_gives_the_best_plan_so_far_and_says_so(effort):
    graph = _network(8)
    found = plan_search(_pricer(graph), effort)
    check_partition(graph, found)
    assert not found.complete
    full = plan_search(_pricer(graph), Effort(visits=200_000))
    alone = sum(c.us for c in singles(_pricer(graph)))
    assert full.predicted_us - CLOSE <= found.predicted_us <= alone + CLOSE


def test_budgets_in_counts_are_deterministic():
    graph = _network(8)
    effort = Effort(evaluations=60, visits=50)
    first, again = (plan_search(_pricer(graph), effort) for _ in range(2))
    assert not first.complete
    assert first.groups == again.groups


def test_planners_by_name():
    graph = _network(2)
    plans = {name: make_planner(name, H200)(graph) for name in ("search", "greedy", "none")}
    for name, plan in plans.items():
        check_partition(graph, plan)
        assert plan.planner == name
        assert plan.seconds > 0.0
    assert {len(group.nodes) for group in plans["none"].groups} == {1}
    assert {group.mode for group in plans["none"].groups} == {"single"}
    assert plans["search"].predicted_us <= plans["greedy"].predicted_us
    assert plans["greedy"].predicted_us < plans["none"].predicted_us

    def mine(graph: ConvGraph) -> Partition:
        return plans["none"]

    assert make_planner(mine, H200) is mine


def test_wrong_options_are_refused():
    with pytest.raises(OptionError, match="planner 'best' is not known; supported: search, gre"):
        make_planner("best", H200)
    with pytest.raises(OptionError, match="time budget -1"):
        make_planner("search", H200, time_budget=-1)


def test_a_cost_model_of_ones_own_decides():
    class Launches:
        """Every kernel costs the same."""

        def predict(self, group: ConvGraph, tile: Tile) -> float:
            return 1.0

    graph = _network(1)
    assert len(make_planner("search", H200, cost_model=Launches())(graph).groups) == 1


def test_refusals_name_neighbouring_groups_with_a_reason():
    b = GroupBuilder()
    x = b.conv(b.input(7, 7, 512), 512, 3)
    y = b.conv(x, 512, 3)
    plan = make_planner("search", GENERIC_CPU)(b.graph())
    assert [group.nodes for group in plan.groups] == [(x,), (y,)]
    (refusal,) = plan.rejected
    assert refusal.nodes == (x, y)
    assert refusal.reason.startswith("no gain: ")
    assert " times what is needed" in refusal.reason


def test_graphs_with_opaque_nodes():
    b = GroupBuilder()
    x = b.conv(b.input(28, 28, 32), 32)
    y = b.conv(x, 32)
    z = b.conv(y, 32, epilogue=(Step("add", (0, x)),))
    graph = b.graph()
    nodes = tuple(Node(n.name, "opaque", n.inputs) if n.name == y else n for n in graph.nodes)
    graph = ConvGraph(nodes, graph.tensors, graph.inputs, graph.params, graph.outputs)
    for name in ("search", "greedy", "none"):
        plan = make_planner(name, H200)(graph)
        check_partition(graph, plan)
        assert [group.nodes for group in plan.groups] == [(x,), (z,)]


def test_groups_come_in_an_order_that_runs():
    for seed in range(30):
        graph = random_graph(seed)
        plan = plan_search(Pricer(Dag(graph), random_prices(seed)), Effort())
        done = set(graph.inputs) | set(graph.params)
        for group in plan.groups:
            sub = graph.subgraph(group.nodes)
            assert set(sub.inputs) <= done
            done |= set(group.nodes)
        schedule_units(graph, [group.nodes for group in plan.groups])


@pytest.mark.parametrize(
    ("graph", "mode"),
    [
        (blocks.convolutions(8, 8, 3), "single"),
        (blocks.convolutions(8, 8, 3, 1, 3), "straight"),
        (blocks.bottleneck(8, 32, 8), "straight"),
        (blocks.fire(8, 16, 8, 16), "split+merge"),
        (blocks.dense_layers(8, 8, 1), "straight"),
    ],
)
def test_modes(graph, mode):
    assert fusion_mode(graph) == mode


def test_modes_of_siblings_and_joins():
    b = GroupBuilder()
    x = b.input(8, 8, 8)
    left, right = b.conv(x, 8), b.conv(x, 8)
    assert fusion_mode(b.graph(left, right)) == "split"
    joined = b.concat(left, right)
    assert fusion_mode(b.graph(joined)) == "merge"
