"""Time networks on an NVIDIA GPU: ours, ours with fusion off, cuDNN, torch.compile, TVM's default.

    python scripts/bench_networks.py --networks squeezenet1_1 --output networks_gpu.json

Everybody runs the same weights and input in one process, each inference captured in one CUDA graph;
the figure is the median GPU time of its replays, over several rounds in which the contenders take
turns. Outputs, of a fresh input and into poisoned memory, are compared with torch in float64. Needs
torch, torchvision and, for NASNet, timm. TF32 is off; "cudnn" are torch's modules in eager mode
with batch norms folded and cudnn.benchmark on. In float16 our network takes and gives float32.

Without a GPU, --compile-only --artifacts DIR compiles our CUDA sources with nvcc beforehand and
keeps the results in DIR by a hash of the source, for a run with the same --artifacts DIR.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from cuda_kernels import KernelCache, constant_bytes, cuda_texts
from gpu_timing import capture, is_lost, time_in_turns
from measure_networks import planned_bytes
from rich.console import Console
from rich.table import Table
from torch_networks import (
    NETWORKS,
    PEERS,
    forget_compiled,
    missing_packages,
    torch_call,
    torch_network,
    zoo_weights,
)
from tvm import relax
from tvm.target import Target

from optifx_tvm import zoo
from optifx_tvm.build import pass_context
from optifx_tvm.errors import OptiFXError
from optifx_tvm.pipelines import pipeline
from optifx_tvm.target import resolve_target

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
"""Relative L2 error above which a result is called wrong."""
OURS, UNFUSED = "ours", "ours-unfused"
PLANNERS = {OURS: "search", UNFUSED: "none"}
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OptiFXError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a contender that can't do a network may raise: it is recorded, and the others go on."""


@dataclass(frozen=True)
class Case:
    """One network at one batch size and precision."""

    network: str
    batch: int
    dtype: str


@dataclass
class Contender:
    """An inference captured in a CUDA graph."""

    replay: Callable[[], None]
    data: Any
    """The torch tensor that it reads."""
    output: Any
    """The torch tensor that it writes."""
    memory_bytes: int
    """Weights, input, and what is in use at most during an inference."""
    owners: tuple[Any, ...]
    """Keep what the graph reads alive."""


def main() -> int:
    """Parse the command line, run, print tables, write JSON after every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    option("--batch", nargs="+", type=int, default=[1, 8])
    option("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    option("--peers", nargs="*", default=list(PEERS[:3]), choices=[*PEERS, "tvm-default"])
    option("--rounds", type=int, default=3)
    option("--seconds", type=float, default=0.3, help="timed, of one contender")
    option("--target", default=None, help="default: the GPU's arch, else sm_90")
    option("--artifacts", type=Path, default=None, help="folder of compiled kernels")
    option("--compile-only", action="store_true", help="fill --artifacts; no GPU")
    option("--jobs", type=int, default=2, help="--compile-only: nvcc's at a time")
    option("--output", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    target = resolve_target(args.target or {"kind": "cuda", "arch": _arch()})
    # nvcc compiles a network's kernels one after the other unless told otherwise.
    os.environ.setdefault("NVCC_APPEND_FLAGS", "--split-compile=0")
    kernels = KernelCache(args.artifacts, target)
    kernels.install()
    cases = [Case(n, b, d) for n in args.networks for d in args.dtypes for b in args.batch]
    if args.compile_only:
        if args.artifacts is None:
            parser.error("--compile-only needs --artifacts DIR")
        return compile_only(cases, target, kernels, args.jobs)
    if missing := missing_packages(args.networks):
        parser.error(f"these packages are needed and missing: {', '.join(missing)} (pip install)")
    torch = importlib.import_module("torch")
    if not (torch.cuda.is_available() and tvm.cuda(0).exist):
        parser.error("no GPU found by torch and TVM; without one only --compile-only works")
    status = run(cases, target, args, torch)
    print(f"nvcc: {kernels.missed} run, {kernels.found} spared", file=sys.stderr)
    return status


def _arch() -> str:
    gpu = tvm.cuda(0)
    return f"sm_{gpu.compute_version.replace('.', '')}" if gpu.exist else "sm_90"


def compile_only(cases: list[Case], target: Target, kernels: KernelCache, jobs: int) -> int:
    """Compile the kernels of every case; 1 if nvcc refused one."""
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for case in cases:
            for planner in PLANNERS.values():
                texts = cuda_texts(build_ours(case, target, planner)[0])
                waiting += [(case, planner, pool.submit(kernels.compile, text)) for text in texts]
        for case, planner, future in waiting:
            error = future.exception()
            failed += error is not None
            result = f"FAILED: {_line(error)}" if error else f"{len(future.result()) / 1e6:.1f} MB"
            print(f"{case.network} {case.dtype} b{case.batch} {planner}: {result}", flush=True)
    return 1 if failed else 0


def build_ours(case: Case, target: Target, planner: str) -> tuple[relax.VMExecutable, int]:
    """Our executable, without a CUDA graph of its own, and the bytes of its memory."""
    module = zoo.build(case.network, batch=case.batch)
    dtype = None if case.dtype == "float32" else case.dtype
    own_graph = {"relax.backend.use_cuda_graph": False}
    with tvm.transform.PassContext(config=own_graph), pass_context(target), target:
        lowered = pipeline(target, dtype=dtype, planner=planner)(module)
        executable = tvm.compile(lowered, target, relax_pipeline=None)
    return executable, planned_bytes(lowered) + constant_bytes(lowered)


def build_default(case: Case, target: Target) -> tuple[relax.VMExecutable, int]:
    """The same by TVM's default pipeline; in float16 all of it, accumulators too."""
    module = zoo.build(case.network, batch=case.batch, dtype=case.dtype)
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": False}), target:
        lowered = relax.get_default_pipeline(target)(module)
        executable = tvm.compile(lowered, target, relax_pipeline=None)
    return executable, planned_bytes(lowered) + constant_bytes(lowered)


def run(cases: list[Case], target: Target, args: argparse.Namespace, torch: Any) -> int:
    """Measure every case; 1 if one of our results is wrong or missing."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record = {**machine(target, torch), "rows": [], "geometric_means": {}}
    modules: dict[str, Any] = {}
    for case in cases:
        if case.network not in modules:
            modules = {case.network: torch_network(case.network, zoo_weights(case.network))}
        row = measure(case, modules[case.network], target, args, torch)
        record["rows"].append(row)
        record["geometric_means"] = means(record["rows"])
        print(json.dumps(row), file=sys.stderr, flush=True)
        if args.output:
            args.output.write_text(json.dumps(record, indent=1))
        if row.get("lost"):
            print("the GPU can't be used any more by this process: giving up", file=sys.stderr)
            break
    report(record["rows"], record["geometric_means"])
    right = all(row["contenders"][name].get("right") for row in record["rows"] for name in PLANNERS)
    return 0 if right else 1


def machine(target: Target, torch: Any) -> dict:
    """What a figure depends on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    versions = {"tvm": tvm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {"tvm_ffi": tvm_ffi.__version__, "cudnn": torch.backends.cudnn.version()}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "gpu_driver": subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0],
        "target": str(target),
        "versions": versions,
    }


def measure(case: Case, module: Any, target: Target, args: argparse.Namespace, torch: Any) -> dict:
    """Build the contenders of one case, check their outputs, time them in turns."""
    forget_compiled(args.peers)
    torch.manual_seed(0)
    size = zoo.build(case.network, bind=False)["main"].params[0].ty.shape[2]
    data = torch.randn(case.batch, 3, int(size), int(size), device="cuda")
    with torch.no_grad():
        expected = module.to("cuda", torch.float64)(data.double()).cpu()
        module.to("cpu", torch.float32)  # exact: the weights were float32
    row: dict = {"network": case.network, "batch": case.batch, "dtype": case.dtype}
    results: dict[str, dict] = {}
    contenders: dict[str, Contender] = {}
    for name in (*PLANNERS, *args.peers):
        start = time.perf_counter()
        results[name] = {}
        try:
            contender = make(name, case, module, data, target, torch)
            results[name]["build_s"] = round(time.perf_counter() - start, 1)
            results[name] |= check(contender, data, expected, TOLERANCE[case.dtype], torch)
            contenders[name] = contender
        except _FAILURES as error:
            results[name]["error"] = _line(error)
            if is_lost(torch):
                return {**row, "contenders": results, "lost": True}
    replays = {name: contender.replay for name, contender in contenders.items()}
    for name, times in time_in_turns(replays, args.rounds, args.seconds, torch).items():
        results[name] |= {"us": round(statistics.median(times), 2), "samples": len(times)}
        results[name]["memory_mb"] = round(contenders[name].memory_bytes / 1e6, 1)
    return {**row, "contenders": results, **ratios(results)}


def make(name: str, case: Case, module: Any, data: Any, target: Target, torch: Any) -> Contender:
    """Build and capture one contender; ``data`` is float32, NCHW, on the GPU."""
    half = case.dtype == "float16"
    if name in PEERS:
        call, read, size = torch_call(name, module, data.half() if half else data)
        owners: tuple[Any, ...] = (call,)
    else:
        default = name == "tvm-default"
        executable, size = (
            build_default(case, target) if default else build_ours(case, target, PLANNERS[name])
        )
        machine = relax.VirtualMachine(executable, tvm.cuda(0))
        read = data.half() if default and half else data.clone()
        main, shared = machine["main"], tvm.runtime.from_dlpack(read)
        call, owners = (lambda: main(shared)), (machine, shared)
    graph, output, peak = capture(call, torch)
    view = output if isinstance(output, torch.Tensor) else torch.from_dlpack(output)
    # TVM's own allocations are planned, not seen by torch; the others' are the other way round.
    memory = size + read.nbytes + (peak if name in PEERS else 0)
    return Contender(graph.replay, read, view, memory, (*owners, graph, output))


def check(contender: Contender, data: Any, expected: Any, tolerance: float, torch: Any) -> dict:
    """Replay on another input first, then on ``data`` with the output poisoned; compare."""
    with torch.no_grad():
        contender.data.normal_()
        contender.replay()
        contender.data.copy_(data)
        contender.output.fill_(float("nan"))
        contender.replay()
        torch.cuda.synchronize()
        found = contender.output.double().cpu().reshape(expected.shape)
        error = float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
    return {"relative_error": error, "right": error < tolerance}


def _line(error: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def ratios(results: dict[str, dict]) -> dict:
    """Best peer over ours and unfused over ours; nothing where ours is wrong or missing."""
    ours, unfused = results[OURS], results[UNFUSED]
    peers = {n: r["us"] for n, r in results.items() if n not in PLANNERS and "us" in r}
    if not ours.get("right") or "us" not in ours:
        return {}
    found: dict = {}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        found |= {"best_peer": best, "peer_over_ours": round(peers[best] / ours["us"], 3)}
    if unfused.get("right") and "us" in unfused:
        found["unfused_over_ours"] = round(unfused["us"] / ours["us"], 3)
    return found


def means(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Geometric means of both ratios, by precision and batch size, with how many networks."""
    found: dict[str, dict[str, float]] = {}
    for dtype, batch in sorted({(row["dtype"], row["batch"]) for row in rows}):
        chosen = [row for row in rows if (row["dtype"], row["batch"]) == (dtype, batch)]
        entry: dict[str, float] = {}
        for key in ("peer_over_ours", "unfused_over_ours"):
            if values := [row[key] for row in chosen if key in row]:
                entry[key] = round(statistics.geometric_mean(values), 3)
                entry[f"{key}_networks"] = len(values)
        found[f"{dtype} batch {batch}"] = entry
    return found


def report(rows: list[dict], geometric_means: dict[str, dict[str, float]]) -> None:
    """One table for every precision and batch size: microseconds (MB), ratios, errors."""
    for label, entry in geometric_means.items():
        chosen = [row for row in rows if f"{row['dtype']} batch {row['batch']}" == label]
        names, keys = list(chosen[0]["contenders"]), ("peer_over_ours", "unfused_over_ours")
        table = Table("network", *names, "peer/ours", "unfused/ours", "error", title=label)
        for row in chosen:
            results = row["contenders"]
            shown = [f"{row[key]:.2f}" if key in row else "-" for key in keys]
            error = results[OURS].get("relative_error")
            shown.append("-" if error is None else f"{error:.0e}")
            table.add_row(row["network"], *(_cell(results.get(n, {})) for n in names), *shown)
        shown = [f"{entry[key]:.2f}" if key in entry else "-" for key in keys]
        table.add_row("geometric mean", *("" for _ in names), *shown, "")
        Console(width=150).print(table)


def _cell(result: dict) -> str:
    """Time and memory, or that it failed; wrong results are marked."""
    if "us" not in result:
        return "failed" if "error" in result else "-"
    mark = "" if result["right"] else " WRONG"
    return f"{result['us']:.0f} ({result['memory_mb']:.0f} MB){mark}"


if __name__ == "__main__":
    sys.exit(main())
