"""Why neighbouring groups of a plan were not fused: what a person asks first about a plan."""

from __future__ import annotations

import time

from optifx_tvm.analysis.footprint import footprint
from optifx_tvm.device import DeviceSpec
from optifx_tvm.partition import Group, Rejected
from optifx_tvm.search.dag import Dag, bits
from optifx_tvm.search.greedy import EPSILON, closes_cycle
from optifx_tvm.search.pricing import Pricer

MOST = 40


def refusals(
    pricer: Pricer, groups: tuple[Group, ...], device: DeviceSpec, deadline: float
) -> tuple[Rejected, ...]:
    """For neighbouring groups the reason that they are two kernels; those between which most bytes
    go through memory first. Pairs not looked at before ``deadline`` (``time.thread_time``) are left
    out."""
    dag = pricer.dag
    masks = [dag.mask(group.nodes) for group in groups]
    price = {mask: group.predicted_us for mask, group in zip(masks, groups, strict=True)}
    owner = {i: mask for mask in masks for i in bits(mask)}
    pairs = {
        (min(mask, other), max(mask, other))
        for mask in masks
        for other in {owner[i] for i in bits(dag.around(mask))}
    }
    ranked = sorted(pairs, key=lambda pair: (-_between(dag, *pair), pair))
    found: list[Rejected] = []
    for a, b in ranked:
        if len(found) == MOST or time.thread_time() > deadline:
            break
        reason = _reason(pricer, device, owner, a | b, price[a] + price[b])
        if reason:
            found.append(Rejected(dag.members(a | b), reason))
    return tuple(found)


def _reason(
    pricer: Pricer, device: DeviceSpec, owner: dict[int, int], union: int, apart: float
) -> str | None:
    """Why ``union`` is not a group of the plan; None if that is not known."""
    found = pricer.price(union)
    if isinstance(found, Rejected):
        return found.reason
    if closes_cycle(pricer.dag, owner, union):
        return "another group would have to run between its operators"
    if found.us < apart - EPSILON:
        return None
    group = pricer.dag.graph.subgraph(pricer.dag.members(union))
    again = footprint(group, found.tile, device).recompute
    extra = f", it computes {again:.2f} times what is needed" if again > 1.005 else ""
    return f"no gain: {found.us:.1f} us fused, {apart:.1f} us apart{extra}"


def _between(dag: Dag, a: int, b: int) -> int:
    """Bytes of what one of two groups reads of the other's results, or both read."""
    graph = dag.graph
    reads = [{t for node in dag.nodes(mask) for t in node.reads} for mask in (a, b)]
    made = [set(dag.members(mask)) for mask in (a, b)]
    common = (reads[0] & (reads[1] | made[1])) | (reads[1] & made[0])
    params = set(graph.params)
    return sum(graph.tensors[t].bytes for t in sorted(common) if t not in params)
