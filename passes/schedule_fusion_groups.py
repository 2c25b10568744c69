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

from optifx_tvm.analysis.channels import ChannelError, channel_plan
from optifx_tvm.analysis.region import RegionError, tile_space
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.passes.lower_fusion_groups import group_of, with_group_attrs
from optifx_tvm.progress import report
from optifx_tvm.records import Database
from optifx_tvm.schedules.registry import schedule_group


@tvm.transform.module_pass(opt_level=0, name="ScheduleFusionGroups")
@dataclass(frozen=True)
class ScheduleFusionGroups:
    """Schedule every fusion group's kernel for ``target``."""

    target: Target | None = None
    """None: the current target (``with target:``)."""
    database: Database | None = None
    """Tuned tiles; a record that does not fit its group is ignored."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the module; the input is not changed."""
        target = self.target or Target.current(allow_none=False)
        mod = mod.clone()
        kernels = [
            (var, func)
            for var, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and "tirx.is_scheduled" not in func.attrs
        ]
        for index, (var, func) in enumerate(kernels):
            report("schedule", index, len(kernels))
            found = group_of(func)
            if found is None:
                continue
            group, tile = found
            scheduled = schedule_group(group, self.recorded_tile(group, target) or tile, target)
            if scheduled is not None:
                kernel = with_group_attrs(scheduled, func)
                mod.update_func(var, kernel.with_attr("tirx.is_scheduled", True))
        return mod

    def recorded_tile(self, group: ConvGraph, target: Target) -> Tile | None:
        """The tile on record, if there is one and the group can have it."""
        tile = self.database.best_tile(group, target) if self.database else None
        if tile is None:
            return None
        try:
            tile_space(group, (tile.height, tile.width))
            channel_plan(group, tile.channel_slices)
        except (RegionError, ChannelError):
            return None
        return tile
