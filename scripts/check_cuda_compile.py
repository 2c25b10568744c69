"""Compile every fused kernel of the zoo networks with nvcc, as planned for three GPUs. No GPU.

    python scripts/check_cuda_compile.py --networks squeezenet1_1 --dtypes float16

Kernels are generated once for every distinct group, tile and architecture, compiled to cubin in
batches, and their registers, spills and shared memory read back. A kernel that nvcc refuses, or
that needs more shared memory than a block may have, ends the script with status 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tvm
from rich.console import Console
from rich.table import Table
from tvm import tirx
from tvm.target import Target

from optifx_tvm import passes, zoo
from optifx_tvm.cuda_source import Launch, NvccError, Resources, compile_cubin, cuda_source
from optifx_tvm.device import DeviceSpec
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.passes.group_attrs import group_of
from optifx_tvm.schedules.registry import schedule_group

TARGETS = {
    "orin": {"tag": "nvidia/jetson-agx-orin-64gb"},
    "rtx4090": {"tag": "nvidia/geforce-rtx-4090"},
    "h200": {"kind": "cuda", "arch": "sm_90"},
}
BATCH = 8
"""Kernels in one run of nvcc."""


@dataclass
class Kernel:
    """One distinct kernel on one device."""

    func: tirx.PrimFunc
    launches: tuple[Launch, ...] = ()
    resources: list[Resources] = field(default_factory=list)
    error: str = ""


Key = tuple[str, str, Tile]
"""Device, group as JSON, tile."""


def main() -> int:
    """Parse the command line, check, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(zoo.names()), choices=zoo.names())
    parser.add_argument("--devices", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
    parser.add_argument("--jobs", type=int, default=2, help="nvcc processes at a time")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    targets = {name: _target(name) for name in args.devices}
    kernels: dict[Key, Kernel] = {}
    rows: dict[tuple[str, str, str], list[Key]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting: list[Future[None]] = []
        for network in args.networks:
            for dtype in args.dtypes:
                started = time.perf_counter()
                for device, groups in _plans(network, dtype, targets):
                    keys = [(device, group.to_json(), tile) for group, tile in groups]
                    rows[network, dtype, device] = keys
                    fresh = _generate(dict(zip(keys, groups, strict=True)), kernels, targets)
                    waiting += [
                        pool.submit(_compile, batch, targets[device]) for batch in _batches(fresh)
                    ]
                seconds = time.perf_counter() - started
                print(f"{network} {dtype}: {seconds:.0f} s", file=sys.stderr, flush=True)
        for future in waiting:
            future.result()
    report(rows, kernels, targets)
    if args.output:
        args.output.write_text(json.dumps(_summary(rows, kernels), indent=1))
    errors = [f"{key[0]}: {kernel.error}" for key, kernel in kernels.items() if kernel.error]
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


def _target(name: str) -> Target:
    return Target(TARGETS[name]).with_host(Target("llvm"))


def _plans(
    network: str, dtype: str, targets: dict[str, Target]
) -> Iterator[tuple[str, list[tuple[ConvGraph, Tile]]]]:
    """Each device and the distinct groups planned for it."""
    canonicalize = tvm.transform.Sequential([passes.CanonicalizeConv(dtype=dtype)])
    canonical = canonicalize(zoo.build(network))
    for device, target in targets.items():
        planned = tvm.transform.Sequential([passes.AFusion(target=target)])(canonical)
        found = [group_of(func) for _, func in planned.functions_items()]
        yield device, [group for group in found if group is not None]


def _generate(
    groups: dict[Key, tuple[ConvGraph, Tile]],
    kernels: dict[Key, Kernel],
    targets: dict[str, Target],
) -> list[Kernel]:
    """Schedule what is not in ``kernels`` yet; adds it and returns it."""
    fresh = []
    for key, (group, tile) in groups.items():
        if key in kernels:
            continue
        func = schedule_group(group, tile, targets[key[0]])
        assert func is not None, "CUDA has a template for every group"
        kernels[key] = Kernel(func)
        fresh.append(kernels[key])
    return fresh


def _batches(kernels: list[Kernel]) -> Iterator[list[Kernel]]:
    """Lists of at most BATCH kernels."""
    for first in range(0, len(kernels), BATCH):
        yield kernels[first : first + BATCH]


def _compile(batch: list[Kernel], target: Target) -> None:
    """Fill in what nvcc says. A batch that fails is tried again kernel by kernel."""
    names = {f"group{i}": kernel for i, kernel in enumerate(batch)}
    device = DeviceSpec.from_target(target)
    try:
        source = cuda_source({name: k.func for name, k in names.items()}, target)
        resources = compile_cubin(source.text, device.arch)
    except (NvccError, tvm.error.InternalError) as error:
        if len(batch) == 1:
            batch[0].error = str(error)
            return
        for kernel in batch:
            _compile([kernel], target)
        return
    for name, kernel in names.items():
        kernel.launches = source.launches[name]
        kernel.resources = [resources[launch.kernel] for launch in kernel.launches]
        needed = _shared(kernel)
        if needed > device.block_bytes:
            kernel.error = (
                f"{needed} bytes of shared memory, {device.name} has {device.block_bytes}"
            )


def _shared(kernel: Kernel) -> int:
    """Most shared memory of a block."""
    pairs = zip(kernel.launches, kernel.resources, strict=True)
    return max((launch.shared_bytes + r.static_shared_bytes for launch, r in pairs), default=0)


def _summary(rows: dict[tuple[str, str, str], list[Key]], kernels: dict[Key, Kernel]) -> list[dict]:
    """One record for every network, dtype and device."""
    found = []
    for (network, dtype, device), keys in rows.items():
        chosen = [kernels[key] for key in keys]
        used = [r for kernel in chosen for r in kernel.resources]
        found.append(
            {
                "network": network,
                "dtype": dtype,
                "device": device,
                "kernels": len(chosen),
                "failed": sum(bool(kernel.error) for kernel in chosen),
                "max_registers": max((r.registers for r in used), default=0),
                "spilling": sum(r.spill_bytes > 0 for r in used),
                "max_shared_bytes": max((_shared(kernel) for kernel in chosen), default=0),
                "several_launches": sum(len(kernel.launches) > 1 for kernel in chosen),
            }
        )
    return found


def report(
    rows: dict[tuple[str, str, str], list[Key]],
    kernels: dict[Key, Kernel],
    targets: dict[str, Target],
) -> None:
    """Print the table."""
    table = Table(title="Fused kernels compiled by nvcc")
    table.add_column("network")
    table.add_column("dtype")
    table.add_column("device")
    for name in ("kernels", "failed", "max registers", "spilling", "max shared KB"):
        table.add_column(name, justify="right")
    for row in _summary(rows, kernels):
        arch = DeviceSpec.from_target(targets[row["device"]]).arch
        table.add_row(
            row["network"],
            row["dtype"],
            f"{row['device']} ({arch})",
            *(str(row[key]) for key in ("kernels", "failed", "max_registers", "spilling")),
            f"{row['max_shared_bytes'] / 1024:.0f}",
        )
    Console(width=110).print(table)
    counts = collections.Counter(key[0] for key in kernels)
    total = ", ".join(f"{count} for {device}" for device, count in counts.items())
    print(f"distinct kernels: {total}")


if __name__ == "__main__":
    sys.exit(main())
