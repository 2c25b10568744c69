"""Time kinds of block on an NVIDIA GPU at the sizes of the networks: ours, cuDNN, torch.compile.

    python scripts/bench_blocks.py --blocks fire inception --output blocks_gpu.json

The blocks are those of ``blocks.py``. Everybody has channels-last inputs and outputs of the
precision in question (cudnn-nchw: NCHW). Each contender is captured in a CUDA graph of 20 calls in
a row; the figure is the median GPU time of a replay over 20, over several rounds in which the
contenders take turns: weights and activations are in L2, unlike in a network. "cudnn" calls torch's
fused convolution + bias (+ residual) + ReLU where cuDNN has it, with cudnn.benchmark on; TF32 is
off. Outputs, of fresh inputs and into poisoned memory, are compared with torch in float64.

The floor is the larger of compulsory bytes (inputs, parameters and output once) over the DRAM
bandwidth and FLOP of convolutions and products over the peak of the precision, both of the
target's DeviceSpec, plus nothing for a launch. As data are in L2, a share above 1 is possible where
the bytes decide.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import tvm
from blocks import BLOCKS, KINDS, SMALL_BLOCKS, Block, work
from gpu_builds import FAILURES, BlockCase, Order, build, first_line, workers
from gpu_timing import TOLERANCE, Contender, capture, check, is_lost, machine, time_in_turns
from rich.console import Console
from rich.table import Table
from torch_blocks import PEERS, peer_call, reference, warm_block
from tvm import relax

from optifx_tvm.device import DeviceSpec
from optifx_tvm.target import resolve_target

OURS = "ours"
_CALLS = 20
"""In one graph."""


def main() -> int:
    """Parse the command line, run, print a table, write JSON after every block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--blocks", nargs="+", default=list(KINDS), choices=KINDS, help="kinds of block")
    option("--small", action="store_true", help="small sizes, to see that it works")
    option("--batch", type=int, default=1)
    option("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    option("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    option("--rounds", type=int, default=3)
    option("--seconds", type=float, default=0.06, help="timed, of one contender")
    option("--target", default=json.dumps({"kind": "cuda", "arch": "sm_90"}))
    option("--artifacts", type=Path, default=None, help="folder of compiled kernels")
    option("--compile-only", action="store_true", help="fill --artifacts; no GPU")
    option("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="compilers")
    option("--output", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    blocks = [b for b in (SMALL_BLOCKS if args.small else BLOCKS) if b.kind in args.blocks]
    cases = [BlockCase(block, args.batch, dtype) for block in blocks for dtype in args.dtypes]
    if args.compile_only:
        return compile_only(cases, args)
    torch = importlib.import_module("torch")
    if not (torch.cuda.is_available() and tvm.cuda(0).exist):
        parser.error("no GPU found by torch and TVM; without one only --compile-only works")
    return run(cases, args, torch)


def compile_only(cases: list[BlockCase], args: argparse.Namespace) -> int:
    """Compile the kernels of every block; 1 if one failed."""
    orders = [Order(case, "search", args.target, args.artifacts) for case in cases]
    with workers(args.jobs) as pool:
        built = list(pool.map(build, orders))
    for case, result in zip(cases, built, strict=True):
        outcome = result.error or f"{result.seconds:.1f} s, nvcc run {result.nvcc_runs} times"
        print(f"{case.block.kind}: {case.block.name} {case.dtype}: {outcome}")
    return 1 if any(result.error for result in built) else 0


def run(cases: list[BlockCase], args: argparse.Namespace, torch: Any) -> int:
    """Build everything, then measure every block; 1 if one of our results is wrong or missing."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record = {**machine(args.target, torch), "rows": []}
    with tempfile.TemporaryDirectory(prefix="bench_blocks_") as folder:
        libraries = [Path(folder, f"{index}.so") for index in range(len(cases))]
        with workers(args.jobs) as pool:
            orders = [
                Order(case, "search", args.target, args.artifacts, library)
                for case, library in zip(cases, libraries, strict=True)
            ]
            built = [pool.submit(build, order) for order in orders]
            if "inductor" in args.peers:
                warming = [pool.submit(warm_block, c.block, c.batch, c.dtype) for c in cases]
                failed = [first_line(e) for e in (f.exception() for f in warming) if e is not None]
                print("\n".join(failed), file=sys.stderr)
            results = [future.result() for future in built]
        for case, library, result in zip(cases, libraries, results, strict=True):
            row = measure(case, library, result.error, args, torch)
            record["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.output:
                args.output.write_text(json.dumps(record, indent=1))
            if row.get("lost"):
                print("this process has lost the GPU: giving up", file=sys.stderr)
                return 1
    report(record["rows"])
    return 0 if all(row["contenders"][OURS].get("right") for row in record["rows"]) else 1


def measure(
    case: BlockCase, library: Path, build_error: str, args: argparse.Namespace, torch: Any
) -> dict:
    """Capture the contenders of one block, check their outputs, time them in turns."""
    if "inductor" in args.peers:
        torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = [(case.batch, *shape) for shape in case.block.inputs]
    data = [torch.randn(shape, device="cuda") for shape in shapes]
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        expected = reference(case.block, data)
    given = [x.to(getattr(torch, case.dtype)) for x in data]
    row: dict = {"kind": case.block.kind, "block": case.block.name, "dtype": case.dtype}
    row |= {"batch": case.batch, "floor_us": round(floor_us(case, args.target), 3)}
    results: dict[str, dict] = {}
    contenders: dict[str, Contender] = {}
    for name in (OURS, *args.peers):
        results[name] = {}
        try:
            if name != OURS:
                contender = _peer(name, case.block, given, torch)
            elif build_error:
                raise RuntimeError(build_error)
            else:
                contender = _ours(library, given, torch)
            results[name] = check(contender, given, expected, TOLERANCE[case.dtype], torch)
            contenders[name] = contender
        except FAILURES as error:
            results[name]["error"] = first_line(error)
            if is_lost(torch):
                return {**row, "contenders": results, "lost": True}
    replays = {name: contender.replay for name, contender in contenders.items()}
    for name, times in time_in_turns(replays, args.rounds, args.seconds, torch).items():
        results[name] |= {"us": round(statistics.median(times) / _CALLS, 3), "samples": len(times)}
    row["contenders"] = results
    peers = {name: r["us"] for name, r in results.items() if name != OURS and "us" in r}
    if results[OURS].get("right") and "us" in results[OURS]:
        us = results[OURS]["us"]
        row["floor_share"] = round(row["floor_us"] / us, 3)
        if peers:
            row["best_peer"] = min(peers, key=lambda name: peers[name])
            row["peer_over_ours"] = round(min(peers.values()) / us, 3)
    return row


def floor_us(case: BlockCase, target: str) -> float:
    """The least time that the target's DRAM and arithmetic allow, in microseconds."""
    device = DeviceSpec.from_target(resolve_target(target))
    flops, size = work(case.block, case.batch, case.dtype)
    peak = device.fp32_flops if case.dtype == "float32" else device.fp16_flops
    return max(flops / peak, size / device.dram_bytes_per_s) * 1e6


def _ours(library: Path, data: list[Any], torch: Any) -> Contender:
    virtual = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cuda(0))
    main, read = virtual["main"], tuple(x.clone() for x in data)
    shared = [tvm.runtime.from_dlpack(x) for x in read]
    graph, output, _ = capture(lambda: main(*shared), torch, _CALLS)
    owners = (virtual, shared, graph, output)
    return Contender(graph.replay, read, torch.from_dlpack(output), 0, owners)


def _peer(name: str, block: Block, data: list[Any], torch: Any) -> Contender:
    call, read, size = peer_call(name, block, data)
    graph, output, peak = capture(call, torch, _CALLS)
    return Contender(graph.replay, read, output, size + peak, (call, graph))


def report(rows: list[dict]) -> None:
    """One table a precision: microseconds, ratio, share of the floor."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        names = list(chosen[0]["contenders"])
        table = Table("kind", "block", *names, "peer/ours", "of floor", title=dtype)
        for row in chosen:
            cells = [_cell(row["contenders"][name]) for name in names]
            keys = ("peer_over_ours", "floor_share")
            shown = [f"{row[key]:.2f}" if key in row else "-" for key in keys]
            table.add_row(row["kind"], row["block"], *cells, *shown)
        ratios = [row["peer_over_ours"] for row in chosen if "peer_over_ours" in row]
        if ratios:
            mean = f"{statistics.geometric_mean(ratios):.2f}"
            table.add_row("geometric mean", "", *("" for _ in names), mean, "")
        Console(width=140).print(table)


def _cell(result: dict) -> str:
    """The time, or that it failed; wrong results are marked."""
    if "us" not in result:
        return "failed"
    return f"{result['us']:.1f}" + ("" if result["right"] else " WRONG")


if __name__ == "__main__":
    sys.exit(main())
