"""ScheduleFusionGroups: the tile programs of fusion groups get their schedules.

Runs after LowerFusionGroups; nothing needs to run between, TIR passes may. Each kernel is rebuilt
for the target with its template's default configuration and marked as scheduled, so that TVM's own
schedulers leave it alone. Kernels without a template for the target stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from optifx_tvm.passes.lower_fusion_groups import group_of, with_group_attrs
from optifx_tvm.schedules.registry import schedule_group


@tvm.transform.module_pass(opt_level=0, name="ScheduleFusionGroups")
@dataclass(frozen=True)
class ScheduleFusionGroups:
    """Schedule every fusion group's kernel for ``target``."""

    target: Target | None = None
    """None: the current target (``with target:``)."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the module; the input is not changed."""
        target = self.target or Target.current(allow_none=False)
        mod = mod.clone()
        for var, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or "tirx.is_scheduled" in func.attrs:
                continue
            found = group_of(func)
            if found is None:
                continue
            scheduled = schedule_group(*found, target)
            if scheduled is not None:
                kernel = with_group_attrs(scheduled, func)
                mod.update_func(var, kernel.with_attr("tirx.is_scheduled", True))
        return mod
