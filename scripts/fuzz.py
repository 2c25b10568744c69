"""Compile random small CNNs unfused, fused by the search and fused at random, and compare every
output with onnxruntime's. What fails is reported with its seed and cut down to a small network.

    python -m scripts.fuzz --seeds 0:1000 --dtype float16

Exits with 1 if anything failed. Run it in the root of the repository: it is part of the tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import onnx
from onnx import helper
from onnx.utils import Extractor

from tests.support.differential import TOLERANCE, differences
from tests.support.random_cnn import is_lively, random_cnn, random_feed, run_onnxruntime

PLANS_TRIED = 4
"""Random plans for a network that was cut down: the one that failed may not exist any more."""


def main() -> int:
    """Parse the command line, run the seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_seeds, default=range(100), metavar="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--save", type=Path, help="folder for the reduced ONNX files")
    args = parser.parse_args()
    start, failed = time.monotonic(), 0
    pool = _Pool(args.jobs)
    for first in range(0, len(args.seeds), 20 * args.jobs):
        batch = args.seeds[first : first + 20 * args.jobs]
        faults = pool.faults(_check_seed, [(seed, args.dtype) for seed in batch])
        for seed, fault in zip(batch, faults, strict=True):
            if fault is None:
                continue
            failed += 1
            print(f"seed {seed}: {fault}", flush=True)
            small, reason = _reduced(pool, seed, args.dtype, fault)
            print(f"  reduced: {reason}\n{_listing(small)}", flush=True)
            if args.save:
                args.save.mkdir(parents=True, exist_ok=True)
                onnx.save(small, args.save / f"seed{seed}-{args.dtype}.onnx")
        seconds = time.monotonic() - start
        print(f"{first + len(batch)} networks, {failed} failed, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end or int(first) + 1))


_CRASH = "the process died"


class _Pool:
    """Processes that check networks; a network that kills its process is a fault like others."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._jobs, mp_context=context)

    def faults(self, check: Callable[..., str | None], calls: list[tuple]) -> list[str | None]:
        """What ``check`` finds, or the exception that it ends with, for each call."""
        futures = [self._executor.submit(check, *call) for call in calls]
        errors = [future.exception() for future in futures]
        if any(isinstance(error, BrokenProcessPool) for error in errors):
            self._executor = self._start()
            if len(calls) == 1:
                return [_CRASH]
            return [self.faults(check, [call])[0] for call in calls]
        return [
            future.result() if error is None else f"{type(error).__name__}: {_first_line(error)}"
            for future, error in zip(futures, errors, strict=True)
        ]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _check_seed(seed: int, dtype: str) -> str | None:
    cnn = random_cnn(seed)
    errors = differences(cnn.model, cnn.feed, cnn.expected, seed, dtype)
    return f"errors {errors}" if errors else None


def _check_model(data: bytes, seed: int, dtype: str) -> str | None:
    """The same for a reduced model, with several random plans."""
    model = onnx.load_from_string(data)
    feed = random_feed(model, seed)
    expected = run_onnxruntime(model, feed)
    if not all(map(is_lively, expected.values())):
        return None
    for other in range(seed, seed + PLANS_TRIED):
        errors = differences(model, feed, expected, other, dtype)
        if errors:
            return f"plan seed {other}: errors {errors}"
    return None


def _reduced(pool: _Pool, seed: int, dtype: str, fault: str) -> tuple[onnx.ModelProto, str]:
    """A small part that still fails: the first output that is wrong by itself, or else as few
    outputs as possible; then as many of the values before it made inputs as possible."""
    model, reason = random_cnn(seed).model, fault
    values = [name for node in model.graph.node for name in node.output]

    def keep_if_it_fails(inputs: list[str], outputs: list[str]) -> bool:
        nonlocal model, reason
        part = _part(model, inputs, outputs)
        found = pool.faults(_check_model, [(part.SerializeToString(), seed, dtype)])[0]
        if found is not None:
            model, reason = part, found
        return found is not None

    inputs, outputs = _names(model.graph.input), _names(model.graph.output)
    if not any(keep_if_it_fails(inputs, [name]) for name in values):
        for name in outputs:
            rest = [other for other in _names(model.graph.output) if other != name]
            if rest:
                keep_if_it_fails(inputs, rest)
    outputs = _names(model.graph.output)
    for name in reversed(values):
        if name not in outputs and any(name in node.output for node in model.graph.node):
            keep_if_it_fails([*_names(model.graph.input), name], outputs)
    return model, reason


def _names(values: Iterable[onnx.ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def _part(model: onnx.ModelProto, inputs: list[str], outputs: list[str]) -> onnx.ModelProto:
    part = Extractor(model).extract_model(inputs, outputs)
    read = {name for node in part.graph.node for name in node.input}
    unread = [value for value in part.graph.input if value.name not in read]
    for value in unread:
        part.graph.input.remove(value)
    return part


def _listing(model: onnx.ModelProto) -> str:
    """The nodes, for people."""
    lines = []
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        lines.append(f"    {value.name}: {shape}")
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        lines.append(f"    {', '.join(node.output)} = {node.op_type}({node.input}) {attributes}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
