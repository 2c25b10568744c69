"""Planners by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from optifx_tvm.cost_model.base import CostModel
from optifx_tvm.cost_model.roofline import RooflineCostModel
from optifx_tvm.cost_model.tiles import best_tile
from optifx_tvm.device import DeviceSpec
from optifx_tvm.errors import OptionError
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import PLANNERS, Partition, Planner
from optifx_tvm.search.backtracking import Effort, plan_search
from optifx_tvm.search.dag import Dag, partition_groups
from optifx_tvm.search.greedy import plan_greedy, singles
from optifx_tvm.search.pricing import Pricer
from optifx_tvm.search.refusals import refusals


def make_planner(
    planner: str | Callable[[ConvGraph], Partition],
    device: DeviceSpec,
    cost_model: CostModel | None = None,
    time_budget: float = Effort.seconds,
) -> Planner:
    """A planner for ``device``.

    ``planner``: "search" (backtracking), "greedy", "none" (every operator its own kernel), or a
    callable, which is returned as it is. ``cost_model`` defaults to the roofline of the device;
    ``time_budget`` is in seconds of the planning thread's processor time, so that a loaded machine
    gets the same plan. Raises OptionError for other names or a budget that is not positive.
    """
    if callable(planner):
        return planner
    if planner not in PLANNERS:
        raise OptionError(
            f"planner {planner!r} is not known; supported: {', '.join(PLANNERS)} or a callable"
        )
    if time_budget <= 0:
        raise OptionError(f"time budget {time_budget} s is not positive; give it in seconds")
    model = cost_model or RooflineCostModel(device)
    choose = partial(best_tile, device=device, cost_model=model)

    def plan(graph: ConvGraph) -> Partition:
        started, deadline = time.perf_counter(), time.thread_time() + time_budget
        pricer = Pricer(Dag(graph), choose)
        if planner == "none":
            return _plan_none(pricer)
        if planner == "search":
            found = plan_search(pricer, Effort(seconds=time_budget))
        else:
            found = plan_greedy(pricer, time_budget)
        rejected = refusals(pricer, found.groups, device, deadline)
        return replace(found, rejected=rejected, seconds=time.perf_counter() - started)

    return plan


def _plan_none(pricer: Pricer) -> Partition:
    started = time.perf_counter()
    groups = partition_groups(pricer.dag, ((c.mask, pricer.group(c)) for c in singles(pricer)))
    return Partition(groups, (), "none", time.perf_counter() - started)
