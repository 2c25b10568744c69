"""ScheduleFusionGroups: the tile programs of fusion groups get their schedules.

Runs after LowerFusionGroups; nothing needs to run between, TIR passes may. Each kernel is rebuilt
for the target, with the tile that the database has on record for it or else the planned one and its
template's default configuration, and marked as scheduled, so that TVM's own schedulers leave it
alone. Kernels without a template for the target stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from optifx_tvm.analysis.legality import tile_fault
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.passes.group_attrs import group_of, with_group_attrs
from optifx_tvm.progress import report
from optifx_tvm.records import Database
from optifx_tvm.schedules.registry import schedule_group
from optifx_tvm.target import target_or_current


@tvm.transform.module_pass(opt_level=0, name="ScheduleFusionGroups")
@dataclass(frozen=True)
class ScheduleFusionGroups:
    """Schedule every fusion group's kernel for ``target``."""

    target: Target | str | dict | None = None
    """None: the current target (``with target:``), else llvm."""
    database: Database | None = None
    """Tuned tiles; a record that does not fit its group is ignored."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the module; the input is not changed."""
        target = target_or_current(self.target)
        mod = mod.clone()
        kernels = [
            (var, func, found)
            for var, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and (found := group_of(func)) is not None
            if "tirx.is_scheduled" not in func.attrs
        ]
        for index, (var, func, found) in enumerate(kernels):
            report("schedule", index, len(kernels))
            group, tile = found
            scheduled = schedule_group(group, self.recorded_tile(group, target) or tile, target)
            if scheduled is not None:
                kernel = with_group_attrs(scheduled, func)
                mod.update_func(var, kernel.with_attr("tirx.is_scheduled", True))
        report("schedule", len(kernels), len(kernels))
        return mod

    def recorded_tile(self, group: ConvGraph, target: Target) -> Tile | None:
        """The tile on record, if there is one and the group can have it."""
        tile = self.database.best_tile(group, target) if self.database else None
        return tile if tile is not None and tile_fault(group, tile) is None else None
