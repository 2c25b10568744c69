"""Check compiled models of one ONNX model against onnxruntime, and time all of them.

Fails (exit code 1) where a relative L2 error exceeds 1e-5, or 5e-3 for a model compiled for
float16.

Usage: compare_onnxruntime.py MODEL.onnx INPUTS.npz COMPILED.so [COMPILED.so ...]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

import optifx_tvm

REPEAT, WARMUP = 30, 5
LIMITS = {"float32": 1e-5, "float16": 5e-3}


def relative_error(result: np.ndarray, reference: np.ndarray) -> float:
    """L2 norm of the difference, relative to the reference's."""
    difference = result.astype("float64") - reference.astype("float64")
    return float(np.linalg.norm(difference) / np.linalg.norm(reference.astype("float64")))


def onnxruntime_session(path: str) -> onnxruntime.InferenceSession:
    """A CPU session on the cores that this process may use."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def median_seconds(session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]) -> float:
    """Median time of one inference."""
    times = []
    for _ in range(WARMUP + REPEAT):
        start = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARMUP:])


def main() -> int:
    model_path, inputs_path, *compiled_paths = sys.argv[1:]
    with np.load(inputs_path) as archive:
        inputs = {name: archive[name] for name in archive.files}
    session = onnxruntime_session(model_path)
    reference = [np.asarray(output) for output in session.run(None, inputs)]
    print(f"{'':<24}{'median ms':>10}{'relative L2 error':>20}")
    print(f"{'onnxruntime (CPU)':<24}{median_seconds(session, inputs) * 1e3:>10.3f}")
    sound = True
    for path in compiled_paths:
        model = optifx_tvm.load(path)
        outputs = model.run(inputs)
        error = max(map(relative_error, outputs, reference))
        seconds = model.benchmark(REPEAT, WARMUP, inputs).median
        name = f"{Path(path).stem} ({model.info.target_kind})"
        print(f"{name:<24}{seconds * 1e3:>10.3f}{error:>20.2e}")
        sound &= error <= LIMITS[model.info.dtype or "float32"]
    if not sound:
        print("error: a compiled model differs from onnxruntime", file=sys.stderr)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
