"""A network compiled unfused, with the search's plan and with a random one, against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.target import Target

from optifx_tvm.frontend import import_model
from optifx_tvm.partition import Planner
from optifx_tvm.pipelines import pipeline
from tests.support.random_plans import random_partition

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
"""Largest relative L2 error of an output."""
FEW = 64
"""The norm of so few values may cancel: in half precision they are allowed 4 times as much."""
PLANS = ("none", "search", "random")
MACHINES = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
"""16, 8 and 4 lanes: different register blocks."""


def machine(seed: int) -> Target:
    """A target for this host that depends on the seed. LLVM's optimiser, which is not what is
    tested, would take most of the time: it is off."""
    from tvm.target.codegen import llvm_cpu_has_features, llvm_get_system_cpu

    host = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})
    known = [
        mcpu
        for mcpu, feature in zip(MACHINES, ("avx512f", "avx2", "sse4.2"), strict=True)
        if llvm_cpu_has_features(feature, host)
    ]
    if not known:
        return Target({"kind": "llvm", "opt-level": 0})
    return Target({"kind": "llvm", "opt-level": 0, "mcpu": known[seed % len(known)]})


def tolerance(dtype: str, size: int) -> float:
    """Largest relative L2 error of an output of ``size`` values."""
    return TOLERANCE[dtype] * (4 if dtype == "float16" and size < FEW else 1)


def differences(
    model: onnx.ModelProto,
    feed: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    seed: int,
    dtype: str = "float32",
    plans: Sequence[str] = PLANS,
) -> dict[str, float]:
    """Errors of the outputs that differ too much: "plan, output" -> relative L2 error."""
    target = machine(seed)
    mod = import_model(model)
    errors = {}
    for plan in plans:
        planner: str | Planner = plan
        if plan == "random":
            planner = partial(
                random_partition, seed=seed, merges=1.0 + seed % 3, largest=6 + seed % 4
            )
        results = run(mod, feed, pipeline(target, dtype=dtype, planner=planner), target)
        for (name, wanted), got in zip(expected.items(), results, strict=True):
            error = relative_error(got, wanted)
            if not error < tolerance(dtype, wanted.size):
                errors[f"{plan}, {name}"] = error
    return errors


def run(
    mod: tvm.IRModule, feed: Mapping[str, np.ndarray], passes: tvm.transform.Pass, target: Target
) -> list[np.ndarray]:
    """The outputs of ``mod`` compiled with ``passes``."""
    executable = tvm.compile(mod, target, relax_pipeline=passes)
    vm = relax.VirtualMachine(executable, tvm.cpu())
    found = vm["main"](*(tvm.runtime.tensor(value) for value in feed.values()))
    return [found.numpy()] if isinstance(found, tvm.runtime.Tensor) else [x.numpy() for x in found]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """L2 error over L2 norm; infinite for other shapes or types and for what is not finite."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not np.isfinite(got).all():
        return float("inf")
    wide = wanted.astype("float64")
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))
