"""Kernels, traffic, memory and time of planning and compiling, per network; nothing is run.

    python scripts/measure_networks.py --networks resnet50 --output networks.json

Each network is measured in a process of its own, so that its peak resident memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax

from optifx_tvm import passes, zoo
from optifx_tvm.device import DeviceSpec
from optifx_tvm.extract import extract_graph
from optifx_tvm.pipelines import default_passes, fusion_passes, pipeline
from optifx_tvm.search.planners import make_planner
from optifx_tvm.target import resolve_target


def main() -> int:
    """Parse the command line, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(zoo.names()), choices=zoo.names())
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.target)))
        return 0
    rows = []
    for name in args.networks:
        command = [sys.executable, __file__, "--one", name, "--target", args.target]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report(rows)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))
    return 0


def measure(name: str, target_name: str) -> dict:
    """All figures of one network."""
    target = resolve_target(target_name)
    start = time.perf_counter()
    mod = zoo.build(name)
    imported = time.perf_counter()
    canonical = tvm.transform.Sequential([passes.CanonicalizeConv()])(mod)
    graph = extract_graph(canonical).graph
    device = DeviceSpec.from_target(target)
    partition = make_planner("search", device)(graph)
    planned = time.perf_counter()
    tvm.compile(mod, target, relax_pipeline=pipeline(target))
    compiled = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    fused = tvm.transform.Sequential(fusion_passes(target))(mod)
    return {
        "network": name,
        "unfused_kernels": sum(len(group.nodes) for group in partition.groups),
        "fused_kernels": len(partition.groups),
        "search_complete": partition.complete,
        "planner_seconds": round(partition.seconds, 2),
        "import_seconds": round(imported - start, 1),
        "compile_seconds": round(compiled - planned, 1),
        "peak_rss_mb": peak,
        "on_chip_bytes": on_chip_bytes(graph, partition),
        "activation_bytes": planned_bytes(lower(fused, target)),
        "default_activation_bytes": planned_bytes(lower(mod, target)),
    }


def on_chip_bytes(graph, partition) -> int:
    """Bytes of intermediates that no longer reach main memory (each written once, read once)."""
    total = 0
    for group in partition.groups:
        outputs = graph.subgraph(group.nodes).outputs
        total += sum(graph.tensors[n].bytes for n in group.nodes if n not in outputs)
    return total


def lower(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """The module after what follows fusion: memory is planned."""
    with target:
        return default_passes(target)(mod)


def planned_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all activation storages that static memory planning allocates."""
    total = 0

    def visit(expr: relax.Expr) -> None:
        nonlocal total
        name = getattr(getattr(expr, "op", None), "name", "")
        if name in ("relax.memory.alloc_storage", "relax.vm.alloc_storage"):
            total += int(expr.args[0].values[0])

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return total


def report(rows: list[dict]) -> None:
    """Print the table."""
    columns = ("kernels", "plan s", "compile s", "peak MB", "on chip MB", "act. MB", "TVM act. MB")
    table = Table("network", *columns)
    for row in rows:
        table.add_row(
            row["network"],
            f"{row['unfused_kernels']} -> {row['fused_kernels']}",
            f"{row['planner_seconds']:.2f}",
            f"{row['compile_seconds']:.1f}",
            str(row["peak_rss_mb"]),
            f"{row['on_chip_bytes'] / 1e6:.1f}",
            f"{row['activation_bytes'] / 1e6:.1f}",
            f"{row['default_activation_bytes'] / 1e6:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
