"""Time networks on an NVIDIA GPU: ours, ours with fusion off, cuDNN, torch.compile, TVM's default.

    python scripts/bench_networks.py --networks squeezenet1_1 --output networks_gpu.json

Everybody runs the same weights and input in one process, each inference captured in one CUDA graph;
the figure is the median GPU time of its replays, over several rounds in which the contenders take
turns. Outputs, of a fresh input and into poisoned memory, are compared with torch in float64. Needs
torch, torchvision and, for NASNet, timm. TF32 is off; "cudnn" are torch's modules in eager mode
with batch norms folded and cudnn.benchmark on. In float16 our network takes and gives float32.

Memory beside a time is weights, input and what is in use at most during an inference: of torch the
peak that its allocator reports while the call is captured (cuDNN's workspaces included), of ours
what TVM's static memory plan allocates, output included; neither counts code or the CUDA context.

Workers compile for everybody at first: ours and TVM's networks, and Inductor's kernels into its
caches on disk. Timing starts when the last of them that uses the GPU has ended, and is done by one
process, one contender at a time.

Without a GPU, --compile-only --artifacts DIR compiles our CUDA sources with nvcc beforehand and
keeps the results in DIR by a hash of the source, for a run with the same --artifacts DIR.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from gpu_builds import FAILURES, TVM_DEFAULT, Built, Case, Order, build, first_line, workers
from gpu_timing import (
    TOLERANCE,
    Contender,
    capture,
    check,
    is_lost,
    machine,
    time_in_turns,
)
from rich.console import Console
from rich.table import Table
from torch_networks import (
    NETWORKS,
    PEERS,
    forget_compiled,
    missing_packages,
    torch_call,
    torch_network,
    warm_inductor,
    zoo_weights,
)
from tvm import relax

from optifx_tvm import zoo

OURS, UNFUSED = "ours", "ours-unfused"
PLANNERS = {OURS: "search", UNFUSED: "none"}
BUILT = {**PLANNERS, TVM_DEFAULT: TVM_DEFAULT}
"""Contender -> planner, of those that TVM builds."""
_SLOW = ("nasnet_a_large", "densenet121", "googlenet")
"""Networks that compile longest: their workers start first."""


@dataclass(frozen=True)
class Binary:
    """An executable of ours or TVM's that a worker is building."""

    library: Path
    built: Future[Built]


def main() -> int:
    """Parse the command line, run, print tables, write JSON after every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    option("--batch", nargs="+", type=int, default=[1, 8])
    option("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    option("--peers", nargs="*", default=list(PEERS[:3]), choices=[*PEERS, TVM_DEFAULT])
    option("--rounds", type=int, default=3)
    option("--seconds", type=float, default=0.3, help="timed, of one contender")
    option("--target", default=None, help="default: the GPU's arch, else sm_90")
    option("--artifacts", type=Path, default=None, help="folder of compiled kernels")
    option("--compile-only", action="store_true", help="fill --artifacts; no GPU")
    option("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="compilers")
    option("--output", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    args.target = args.target or json.dumps({"kind": "cuda", "arch": _arch()})
    # nvcc compiles the kernels of a source one after the other unless told otherwise.
    os.environ.setdefault("NVCC_APPEND_FLAGS", "--split-compile=0")
    cases = [Case(n, b, d) for n in args.networks for d in args.dtypes for b in args.batch]
    if args.compile_only:
        if args.artifacts is None:
            parser.error("--compile-only needs --artifacts DIR")
        return compile_only(cases, args)
    if missing := missing_packages(args.networks):
        parser.error(f"these packages are needed and missing: {', '.join(missing)} (pip install)")
    torch = importlib.import_module("torch")
    if not (torch.cuda.is_available() and tvm.cuda(0).exist):
        parser.error("no GPU found by torch and TVM; without one only --compile-only works")
    return run(cases, args, torch)


def _arch() -> str:
    gpu = tvm.cuda(0)
    return f"sm_{gpu.compute_version.replace('.', '')}" if gpu.exist else "sm_90"


def compile_only(cases: list[Case], args: argparse.Namespace) -> int:
    """Compile the kernels of every case; 1 if one failed."""
    failed = 0
    with workers(args.jobs) as pool:
        waiting = [
            (case, name, pool.submit(build, Order(case, BUILT[name], args.target, args.artifacts)))
            for case in cases
            for name in _built_names(args)
        ]
        for case, name, future in waiting:
            built = future.result()
            failed += bool(built.error)
            result = built.error or f"{built.seconds:.0f} s, nvcc run {built.nvcc_runs} times"
            print(f"{case.network} {case.dtype} batch {case.batch} {name}: {result}", flush=True)
    return 1 if failed else 0


def _built_names(args: argparse.Namespace) -> list[str]:
    return [name for name in BUILT if name in PLANNERS or name in args.peers]


def run(cases: list[Case], args: argparse.Namespace, torch: Any) -> int:
    """Measure every case, while workers build for the next ones; 1 if one of our results is wrong
    or missing."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record = {**machine(args.target, torch), "rows": [], "geometric_means": {}}
    modules: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench_networks_") as folder,
        workers(args.jobs) as pool,
    ):
        warming = [
            pool.submit(warm_inductor, peer, case.network, case.batch, size(case), case.dtype)
            for case in sorted(cases, key=lambda case: case.network not in _SLOW)
            for peer in args.peers
            if peer.startswith("inductor")
        ]
        binaries: dict[tuple[Case, str], Binary] = {}
        for case in cases:
            for name in _built_names(args):
                library = Path(folder, f"{len(binaries)}.so")
                order = Order(case, BUILT[name], args.target, args.artifacts, library)
                binaries[case, name] = Binary(library, pool.submit(build, order))
        for future in warming:
            future.result()  # from here on nobody else uses the GPU
        for case in cases:
            if case.network not in modules:
                modules = {case.network: torch_network(case.network, zoo_weights(case.network))}
            row = measure(case, modules[case.network], binaries, args, torch)
            record["rows"].append(row)
            record["geometric_means"] = means(record["rows"])
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.output:
                args.output.write_text(json.dumps(record, indent=1))
            if row.get("lost"):
                print("this process has lost the GPU: giving up", file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                break
    report(record["rows"], record["geometric_means"])
    results = [row["contenders"].get(name, {}) for row in record["rows"] for name in PLANNERS]
    return 0 if all(result.get("right") for result in results) else 1


def size(case: Case) -> int:
    """Height and width of the network's usual input."""
    return int(zoo.build(case.network, bind=False)["main"].params[0].ty.shape[2])


def measure(
    case: Case,
    module: Any,
    binaries: dict[tuple[Case, str], Binary],
    args: argparse.Namespace,
    torch: Any,
) -> dict:
    """Build the contenders of one case, check their outputs, time them in turns."""
    forget_compiled(args.peers)
    torch.manual_seed(0)
    data = torch.randn(case.batch, 3, size(case), size(case), device="cuda")
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False)
    with torch.no_grad(), exact:
        expected = module.to("cuda", torch.float64)(data.double()).cpu()
        module.to("cpu", torch.float32)  # exact: the weights were float32
    row: dict = {"network": case.network, "batch": case.batch, "dtype": case.dtype}
    results: dict[str, dict] = {}
    contenders: dict[str, Contender] = {}
    for name in (*PLANNERS, *args.peers):
        start = time.perf_counter()
        results[name] = {}
        binary = binaries.get((case, name))
        try:
            if binary is None:
                contender = make_peer(name, module, data.to(getattr(torch, case.dtype)), torch)
                results[name]["build_s"] = round(time.perf_counter() - start, 1)
            else:
                half = name == TVM_DEFAULT and case.dtype == "float16"
                contender = make_built(binary, data.half() if half else data.clone(), torch)
                results[name]["build_s"] = round(binary.built.result().seconds, 1)
                results[name]["nvcc_runs"] = binary.built.result().nvcc_runs
            results[name] |= check(contender, [data], expected, TOLERANCE[case.dtype], torch)
            contenders[name] = contender
        except FAILURES as error:
            results[name]["error"] = first_line(error)
            if is_lost(torch):
                return {**row, "contenders": results, "lost": True}
    replays = {name: contender.replay for name, contender in contenders.items()}
    for name, times in time_in_turns(replays, args.rounds, args.seconds, torch).items():
        results[name] |= {"us": round(statistics.median(times), 2), "samples": len(times)}
        results[name]["memory_mb"] = round(contenders[name].memory_bytes / 1e6, 1)
    return {**row, "contenders": results, **ratios(results)}


def make_peer(name: str, module: Any, data: Any, torch: Any) -> Contender:
    """Capture a way of torch; ``data``: NCHW, on the GPU, of the precision to compute in."""
    call, read, size = torch_call(name, module, data)
    graph, output, peak = capture(call, torch)
    memory = size + read.nbytes + peak
    return Contender(graph.replay, (read,), output, memory, (call, graph))


def make_built(binary: Binary, data: Any, torch: Any) -> Contender:
    """Load and capture what a worker has built; ``data``: its input, which it goes on reading."""
    built = binary.built.result()
    if built.error:
        raise RuntimeError(built.error)
    virtual = relax.VirtualMachine(tvm.runtime.load_module(str(binary.library)), tvm.cuda(0))
    main, shared = virtual["main"], tvm.runtime.from_dlpack(data)
    graph, output, _ = capture(lambda: main(shared), torch)
    # TVM's allocations are not torch's: they are known from its plan.
    memory = built.memory_bytes + data.nbytes
    owners = (virtual, shared, graph, output)
    return Contender(graph.replay, (data,), torch.from_dlpack(output), memory, owners)


def ratios(results: dict[str, dict]) -> dict:
    """Best peer over ours and unfused over ours; nothing where ours is wrong or missing.

    A peer with an error above the tolerance is marked in the table, but counts: no leniency for us.
    """
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
