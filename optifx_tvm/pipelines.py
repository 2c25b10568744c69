"""The pipeline: one list of passes from an imported model to what ``tvm.compile`` builds."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.backend.cuda import pipeline as cuda
from tvm.target import Target

from optifx_tvm import passes
from optifx_tvm.partition import Planner
from optifx_tvm.records import Database
from optifx_tvm.target import is_cuda, target_or_current


def fusion_passes(
    target: Target,
    *,
    dtype: str | None = None,
    planner: str | Planner = "search",
    database: Database | None = None,
) -> list[tvm.transform.Pass]:
    """Our own passes, in order, for use between other people's in a Sequential."""
    return [
        # 1. One canonical form: NHWC, batch norms folded, explicit padding, fp16 if asked.
        passes.CanonicalizeConv(dtype=dtype),
        # 2. Choose and outline the groups.
        passes.AFusion(target=target, planner=planner),
        # 3. Group -> tile program. Before LegalizeOps, which would lower the operators one by one.
        passes.LowerFusionGroups(),
        # 4. Tile program -> scheduled kernel.
        passes.ScheduleFusionGroups(target=target, database=database),
        # 5. What was not fused must be legal for TVM: it knows transposed convolution in NCHW only.
        passes.RestoreTransposedConvLayout(),
    ]


def default_passes(target: Target) -> tvm.transform.Pass:
    """TVM's default pipeline for ``target``, on CUDA with ScheduleFallback around dlight."""
    if not is_cuda(target):
        return relax.get_default_pipeline(target)
    steps = []
    for step in (*cuda.library_dispatch_passes(target), *cuda.legalize_passes(target)):
        if step.info.name == "ApplyDefaultSchedule":
            steps.append(passes.ScheduleFallback(target, convolutions_only=True))
        steps.append(step)
    steps.append(passes.ScheduleFallback(target))
    steps += [*cuda.dataflow_lower_passes(target), *cuda.finalize_passes(target)]
    return tvm.transform.Sequential(steps)


def pipeline(
    target: Target | None = None,
    *,
    dtype: str | None = None,
    planner: str | Planner = "search",
    database: Database | None = None,
) -> tvm.transform.Pass:
    """Everything: our passes, then TVM's default pipeline for ``target`` (default: the current
    target, else llvm). Pass it to ``tvm.compile(mod, target, relax_pipeline=...)``."""

    @tvm.transform.module_pass(opt_level=0, name="OptiFX")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = target_or_current(target)
        steps = fusion_passes(chosen, dtype=dtype, planner=planner, database=database)
        with chosen:
            return tvm.transform.Sequential([*steps, default_passes(chosen)])(mod)

    return run
