"""The fusion plan of a model as plain values, without generating code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.target import Target

from optifx_tvm import passes
from optifx_tvm.analysis.footprint import footprint
from optifx_tvm.build import check_options
from optifx_tvm.device import DeviceSpec
from optifx_tvm.frontend import import_model
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Group, Partition, Planner
from optifx_tvm.search.planners import make_planner
from optifx_tvm.target import resolve_target


def explain(
    model: Any,
    target: str | dict[str, object] | Target | None = None,
    *,
    dtype: str | None = None,
    input_shapes: str | Mapping[str, Sequence[int]] | None = None,
    planner: str | Planner = "search",
) -> dict[str, Any]:
    """What ``compile`` would fuse with the same arguments, as values that JSON can hold.

    ``groups``: in running order, each with ``operators``, ``mode``, ``tile`` (rows, columns,
    channel slices), ``recompute`` (operations done over operations needed), ``predicted_us`` and
    ``kept_on_chip_bytes`` (results that never reach main memory);
    ``unfused_kernels`` and ``fused_kernels``: kernels without and with the plan; ``refused``: sets
    of ``operators`` that were considered, each with its ``reason``; ``planner_seconds``;
    ``predicted_us`` and ``kept_on_chip_bytes``: of all groups; ``complete``: False where the
    search's budget ended it.

    Raises an OptiFXError where model, target or option are at fault.
    """
    check_options(dtype, planner)
    resolved = resolve_target(target)
    module = import_model(model, input_shapes=input_shapes, dtype=dtype)
    device = DeviceSpec.from_target(resolved)
    choose = make_planner(planner, device)
    plans: list[tuple[ConvGraph, Partition]] = []

    def recording(graph: ConvGraph) -> Partition:
        plans.append((graph, choose(graph)))
        return plans[-1][1]

    steps = [passes.CanonicalizeConv(dtype=dtype), passes.AFusion(resolved, recording)]
    with resolved:
        tvm.transform.Sequential(steps)(module)
    partitions = [partition for _, partition in plans]
    groups = [_group(graph, group, device) for graph, part in plans for group in part.groups]
    return {
        "groups": groups,
        "unfused_kernels": sum(len(group.nodes) for part in partitions for group in part.groups),
        "fused_kernels": sum(len(part.groups) for part in partitions),
        "refused": [
            {"operators": _operators(graph, refusal.nodes), "reason": refusal.reason}
            for graph, part in plans
            for refusal in part.rejected
        ],
        "planner_seconds": sum(part.seconds for part in partitions),
        "predicted_us": sum(part.predicted_us for part in partitions),
        "kept_on_chip_bytes": sum(group["kept_on_chip_bytes"] for group in groups),
        "complete": all(part.complete for part in partitions),
    }


def _group(graph: ConvGraph, group: Group, device: DeviceSpec) -> dict[str, Any]:
    tile, sub = group.tile, graph.subgraph(group.nodes)
    return {
        "operators": _operators(graph, group.nodes),
        "mode": group.mode,
        "tile": [tile.height, tile.width, tile.channel_slices],
        "recompute": footprint(sub, tile, device).recompute,
        "predicted_us": group.predicted_us,
        "kept_on_chip_bytes": sum(
            graph.tensors[node].bytes for node in group.nodes if node not in sub.outputs
        ),
    }


def _operators(graph: ConvGraph, nodes: Sequence[str]) -> list[str]:
    return [name for node in nodes for name in graph.by_name[node].source or (node,)]
