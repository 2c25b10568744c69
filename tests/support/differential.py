"""A network compiled unfused, with the search's plan and with a random one, against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
PLANS = ("none", "search", "random")


def differences(
    model: onnx.ModelProto,
    feed: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    seed: int,
    dtype: str = "float32",
    target: Target | None = None,
    plans: Sequence[str] = PLANS,
) -> dict[str, float]:
    """The relative L2 error of every plan's every output: "plan output" -> error."""
    target = target or Target("llvm")
    mod = import_model(model)
    errors = {}
    for plan in plans:
        planner: str | Planner = plan
        if plan == "random":
            planner = lambda graph: random_partition(graph, seed, merges=1.5)  # noqa: E731
        results = run(mod, feed, pipeline(target, dtype=dtype, planner=planner), target)
        for (name, wanted), got in zip(expected.items(), results, strict=True):
            errors[f"{plan} {name}"] = relative_error(got, wanted)
    return errors


def run(
    mod: tvm.IRModule, feed: Mapping[str, np.ndarray], passes: tvm.transform.Pass, target: Target
) -> list[np.ndarray]:
    """The outputs of ``mod`` compiled with ``passes``."""
    executable = tvm.compile(mod, target, relax_pipeline=passes)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(value) for value in feed.values()))
    return [
        x.numpy() for x in (found if isinstance(found, list | tuple | tvm.ir.Array) else [found])
    ]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """L2 error over L2 norm; infinite for other shapes or types and for what is not finite."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not np.isfinite(got).all():
        return float("inf")
    wide = wanted.astype("float64")
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))
