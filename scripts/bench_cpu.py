"""Time networks on the CPU: ours (fused and unfused), TVM's default pipeline, onnxruntime.

    python scripts/bench_cpu.py --networks squeezenet1_1 resnet18 --output bench.json

All run the same weights and input in one process with the same number of threads, one after the
other in several rounds; the figure is the median of all timed runs. Outputs are compared with
onnxruntime's first: a network whose relative L2 error exceeds 1e-5 is reported as wrong and ends
the script with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax

from optifx_tvm import zoo
from optifx_tvm.pipelines import pipeline
from optifx_tvm.target import resolve_target
from optifx_tvm.zoo.onnx_export import to_onnx

TOLERANCE = 1e-5
PLANNERS = ("search", "none")


def main() -> int:
    """Parse the command line, run, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(zoo.names()), choices=zoo.names())
    parser.add_argument("--target", default="llvm", help="default: llvm for this host")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="a round of one contender")
    parser.add_argument("--skip-default", action="store_true", help="leave out TVM's pipeline")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)  # read when TVM's pool starts
    target = resolve_target(args.target)
    rows = []
    for name in args.networks:
        rows.append(measure(name, target, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report(rows)
    if args.output:
        args.output.write_text(json.dumps({**machine(target, args), "networks": rows}, indent=1))
    return 0 if all(row["relative_error"] < TOLERANCE for row in rows) else 1


def machine(target: tvm.target.Target, args: argparse.Namespace) -> dict:
    """What a figure depends on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "cpu": platform.processor() or platform.machine(),
        "target": str(target),
        "threads": args.threads,
        "versions": {p: version(p) for p in ("apache-tvm", "apache-tvm-ffi", "onnxruntime")},
    }


def measure(name: str, target: tvm.target.Target, args: argparse.Namespace) -> dict:
    """Compile all contenders of one network, compare outputs, time them in turns."""
    mod = zoo.build(name)
    shape = [int(e) for e in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")
    row: dict = {"network": name}
    contenders: dict[str, Callable[[], object]] = {}
    contenders["onnxruntime"], reference = onnxruntime_runner(mod, data, args.threads)
    errors = []
    for planner in PLANNERS:
        start = time.perf_counter()
        executable = tvm.compile(mod, target, relax_pipeline=pipeline(target, planner=planner))
        row[f"compile_{planner}_s"] = round(time.perf_counter() - start, 1)
        contenders[planner], result = vm_runner(executable, data)
        errors.append(float(np.linalg.norm(result - reference) / np.linalg.norm(reference)))
    row["relative_error"] = max(errors)
    if not args.skip_default:
        default = tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))
        contenders["tvm_default"], _ = vm_runner(default, data)
    row |= {f"{k}_ms": round(v * 1e3, 3) for k, v in time_in_turns(contenders, args).items()}
    return row


def vm_runner(executable, data: np.ndarray) -> tuple[Callable[[], object], np.ndarray]:
    """A call of the compiled network, and its output."""
    vm = relax.VirtualMachine(executable, tvm.cpu())
    tensor = tvm.runtime.tensor(data)
    return lambda: vm["main"](tensor), vm["main"](tensor).numpy()


def onnxruntime_runner(
    mod: tvm.IRModule, data: np.ndarray, threads: int
) -> tuple[Callable[[], object], np.ndarray]:
    """A call of onnxruntime with the same weights, and its output."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        to_onnx(mod).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: data}
    return lambda: session.run(None, feed), session.run(None, feed)[0]


def time_in_turns(
    contenders: dict[str, Callable[[], object]], args: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of each contender; each round starts with untimed calls, so that the threads
    of the previous contender have gone to sleep. One call a round is enough for a contender whose
    call is longer than a round, and it stops once it has had the time of all rounds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, call in contenders.items():
            if sum(times[name]) > args.rounds * args.seconds:
                continue
            start = time.perf_counter()
            call()
            if time.perf_counter() - start < args.seconds:
                call()
            end = time.perf_counter() + args.seconds
            while not times[name] or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def report(rows: list[dict]) -> None:
    """Print a table with ratios; above 1 ours is faster."""
    table = Table(
        "network", "ours ms", "unfused", "ORT", "TVM", "ORT/ours", "TVM/ours", "none/ours"
    )
    ratios: dict[str, list[float]] = {"onnxruntime": [], "tvm_default": [], "none": []}
    for row in rows:
        ours = row["search_ms"]
        for key, found in ratios.items():
            if f"{key}_ms" in row:
                found.append(row[f"{key}_ms"] / ours)
        times = [row.get(f"{k}_ms") for k in ("search", "none", "onnxruntime", "tvm_default")]
        shown = [f"{t:.2f}" if t else "-" for t in times]
        last = [f"{found[-1]:.2f}" if found else "-" for found in ratios.values()]
        table.add_row(row["network"], *shown, *last)
    means = [f"{statistics.geometric_mean(f):.2f}" if f else "-" for f in ratios.values()]
    table.add_row("geometric mean", "", "", "", "", *means)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
