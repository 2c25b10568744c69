"""ScheduleFallback: threads for PrimFuncs that nothing else schedules for a GPU.

Runs after LegalizeOps and FuseTIR, with ``convolutions_only`` before dlight's
ApplyDefaultSchedule, which fails on some convolutions, and once more after it for what dlight left
alone. Targets other than CUDA need no such schedule: their functions stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from optifx_tvm.passes.group_attrs import group_of, with_group_attrs
from optifx_tvm.schedules.fallback import is_bound, is_convolution_like, schedule_fallback
from optifx_tvm.schedules.registry import schedule_group
from optifx_tvm.target import is_cuda, target_or_current


@tvm.transform.module_pass(opt_level=0, name="ScheduleFallback")
@dataclass(frozen=True)
class ScheduleFallback:
    """Bind every PrimFunc that has no thread-bound loops to the threads of a GPU."""

    target: Target | str | dict | None = None
    """None: the current target (``with target:``), else llvm."""
    convolutions_only: bool = False
    """Only products reduced over a window; other functions are left to dlight."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the module; the input is not changed."""
        target = target_or_current(self.target)
        if not is_cuda(target):
            return mod
        mod = mod.clone()
        for var, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or is_bound(func):
                continue
            group = group_of(func)
            scheduled = None
            if group is not None:
                scheduled = schedule_group(*group, target)
            elif is_convolution_like(func) or not self.convolutions_only:
                scheduled = schedule_fallback(func)
            if scheduled is not None:
                if group is not None:
                    scheduled = with_group_attrs(scheduled, func)
                mod.update_func(var, scheduled.with_attr("tirx.is_scheduled", True))
        return mod
