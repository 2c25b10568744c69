"""Run every kind of block under compute-sanitizer: memcheck and racecheck. Needs an NVIDIA GPU.

    python scripts/sanitize.py --output sanitizer.json

The blocks are the small ones of ``blocks.py`` in both precisions. Workers compile them first; then
each tool watches, for each kind, a process that loads the kernels and runs them once, with neither
torch nor CUDA graphs nor a memory pool that would hide an access out of bounds. Ends with status 1
if a tool reports an error, or if a block can't be built or run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from blocks import KINDS, SMALL_BLOCKS
from gpu_builds import BlockCase, Order, build, workers
from rich.console import Console
from rich.table import Table
from tvm import relax

TOOLS = ("memcheck", "racecheck")
_DTYPES = ("float32", "float16")
_FOUND = 86
"""Exit status of the tool if it has found something."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


@dataclass(frozen=True)
class Kernels:
    """A block's library and the shapes that its entry takes."""

    library: Path
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


def main() -> int:
    """Parse the command line, build, run the tools, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--blocks", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--target", default=json.dumps({"kind": "cuda", "arch": "sm_90"}))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers")
    parser.add_argument("--watched", type=int, default=4, help="processes under a tool at a time")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--execute", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.execute:
        return execute(json.loads(args.execute))
    if not tvm.cuda(0).exist:
        parser.error("no GPU found by TVM")
    with tempfile.TemporaryDirectory(prefix="sanitize_") as folder:
        kernels, errors = _build(args, Path(folder))
        pairs = [(kind, tool) for kind in kernels for tool in args.tools]
        with ThreadPoolExecutor(args.watched) as pool:
            rows = list(pool.map(lambda pair: watch(pair[1], pair[0], kernels[pair[0]]), pairs))
    report(rows)
    print("\n".join(errors), file=sys.stderr)
    if args.output:
        args.output.write_text(json.dumps({"rows": rows, "errors": errors}, indent=1))
    return 1 if errors or any(row["errors"] != 0 for row in rows) else 0


def _build(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Kernels]], list[str]]:
    """The libraries by kind of block, and what could not be built."""
    cases = [BlockCase(b, 1, d) for b in SMALL_BLOCKS if b.kind in args.blocks for d in _DTYPES]
    libraries = [folder / f"{index}.so" for index in range(len(cases))]
    orders = [
        Order(case, "search", args.target, None, library)
        for case, library in zip(cases, libraries, strict=True)
    ]
    found: dict[str, list[Kernels]] = {}
    errors: list[str] = []
    with workers(args.jobs) as pool:
        built = list(pool.map(build, orders))
    for case, library, result in zip(cases, libraries, built, strict=True):
        if result.error:
            errors.append(f"{case.block.name} {case.dtype}: {result.error}")
            continue
        shapes = tuple((1, *shape) for shape in case.block.inputs)
        found.setdefault(case.block.kind, []).append(Kernels(library, case.dtype, shapes))
    return found, errors


def watch(tool: str, kind: str, kernels: list[Kernels]) -> dict:
    """Run the libraries of one kind in a process under ``tool``; ``errors``: None if it failed."""
    listing = json.dumps([[str(k.library), k.dtype, k.shapes] for k in kernels])
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    command += [sys.executable, __file__, "--execute", listing]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = reported_errors(done.stdout, done.returncode)
    row: dict = {"kind": kind, "tool": tool, "programs": len(kernels), "errors": errors}
    if errors != 0:
        row["output"] = (done.stdout + done.stderr)[-2000:]
        print(row["output"], file=sys.stderr, flush=True)
    return row


def reported_errors(output: str, status: int) -> int | None:
    """Errors in a tool's summary; None if there is no summary or the status contradicts it."""
    counts = [int(count) for count in _SUMMARY.findall(output)]
    if not counts or (status != 0 and sum(counts) == 0):
        return None
    return sum(counts)


def execute(listing: list) -> int:
    """Load and run libraries once; 1 if an output is not finite. Runs under the tool."""
    rng = np.random.default_rng(0)
    device = tvm.cuda(0)
    for library, dtype, shapes in listing:
        module = tvm.runtime.load_module(library)
        virtual = relax.VirtualMachine(module, device, memory_cfg="naive")
        data = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        output = virtual["main"](*(tvm.runtime.tensor(x, device) for x in data)).numpy()
        if not np.isfinite(output).all():
            print(f"{library} gives values that are not finite", file=sys.stderr)
            return 1
    return 0


def report(rows: list[dict]) -> None:
    """Print the table: errors by kind and tool."""
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    table = Table("kind", "programs", *tools, title="errors reported by compute-sanitizer")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        chosen = {row["tool"]: row for row in rows if row["kind"] == kind}
        counts = [chosen[tool]["errors"] for tool in tools]
        cells = ["failed" if count is None else str(count) for count in counts]
        table.add_row(kind, str(chosen[tools[0]]["programs"]), *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
