from __future__ import annotations

from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Rejected
from optifx_tvm.search.dag import Dag
from optifx_tvm.search.enumeration import connected_sets, enumerate_candidates
from optifx_tvm.search.pricing import refusal
from tests.support.groups import RELU, GroupBuilder


def _diamond() -> tuple[ConvGraph, list[str]]:
    b = GroupBuilder()
    top = b.conv(b.input(8, 8, 8), 8)
    left, right = b.conv(top, 8), b.conv(top, 8)
    bottom = b.eltwise(left, Step("add", (0, right)))
    return b.graph(), [top, left, right, bottom]


def _enumerate(graph: ConvGraph, max_size: int = 12):
    dag = Dag(graph)
    return list(enumerate_candidates(graph, lambda names: refusal(dag, dag.mask(names)), max_size))


def test_a_diamond_has_twelve_legal_candidates():
    """4 single nodes, 4 edges and the pair of siblings, 2 convex triples, everything; a triple
    with both ends but one side only is not convex."""
    graph, (top, left, right, bottom) = _diamond()
    found = _enumerate(graph)
    legal = [item for item in found if not isinstance(item, Rejected)]
    refused = [item for item in found if isinstance(item, Rejected)]
    assert len(legal) == len(set(legal)) == 12
    assert {len(names) for names in legal} == {1, 2, 3, 4}
    assert (left, right) in legal
    assert (top, bottom) not in legal
    assert [(r.nodes, r.reason) for r in refused] == [
        ((top, left, bottom), f"not convex: a path leaves the group through {right}"),
        ((top, right, bottom), f"not convex: a path leaves the group through {left}"),
    ]


def test_a_chain_has_its_intervals():
    b = GroupBuilder()
    x = b.input(8, 8, 8)
    for _ in range(5):
        x = b.conv(x, 8)
    assert len(_enumerate(b.graph())) == 15
    assert len(_enumerate(b.graph(), max_size=2)) == 9


def test_readers_of_one_input_are_siblings_but_readers_of_one_param_are_not():
    b = GroupBuilder()
    x, y = b.input(8, 8, 8), b.input(8, 8, 8)
    scale = Step("multiply", (0, b.param(8)))
    nodes = [b.eltwise(x, scale), b.eltwise(x, RELU), b.eltwise(y, scale)]
    graph = b.graph(*nodes)
    assert {names for names in _enumerate(graph) if len(names) > 1} == {(nodes[0], nodes[1])}


def test_opaque_nodes_are_never_in_a_candidate_and_break_convexity():
    graph, (top, left, right, bottom) = _diamond()
    nodes = tuple(Node(n.name, "opaque", n.inputs) if n.name == right else n for n in graph.nodes)
    dag = Dag(ConvGraph(nodes, graph.tensors, graph.inputs, graph.params, graph.outputs))
    found = {dag.members(mask) for mask in connected_sets(dag, 12)}
    assert not any(right in names for names in found)
    reason = refusal(dag, dag.mask([top, left, bottom]))
    assert reason == f"not convex: a path leaves the group through {right}"
    assert refusal(dag, dag.mask([right])) == f"{right} is not a fusible operator"


def test_each_set_comes_once_in_the_same_order():
    graph, _ = _diamond()
    dag = Dag(graph)
    first = list(connected_sets(dag, 12))
    assert len(first) == len(set(first))
    assert first == list(connected_sets(Dag(graph), 12))
    assert all(dag.is_connected(mask) for mask in first)


def test_size_is_a_reason():
    b = GroupBuilder()
    x = b.input(8, 8, 8)
    for _ in range(13):
        x = b.eltwise(x, RELU)
    dag = Dag(b.graph())
    assert refusal(dag, dag.everything) == "13 operators, a group has at most 12"
