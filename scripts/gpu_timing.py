"""Calls captured in torch CUDA graphs, and the GPU time of their replays.

Works for whatever launches on torch's current stream or on that of TVM: both capture alike.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import tvm
import tvm_ffi

_WARM_UP = 4
_BURST_US = 20_000
"""Length of one burst of replays, within 3 to 20 replays."""


TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
"""Relative L2 error above which a result is called wrong."""


@dataclass
class Contender:
    """A call captured in a CUDA graph."""

    replay: Callable[[], None]
    data: tuple[Any, ...]
    """The torch tensors that it reads."""
    output: Any
    """The torch tensor that it writes."""
    memory_bytes: int
    """Weights, input, and what is in use at most during a call."""
    owners: tuple[Any, ...]
    """Keep what the graph reads alive."""


def check(
    contender: Contender, data: Sequence[Any], expected: Any, tolerance: float, torch: Any
) -> dict:
    """Replay on other inputs first, then on ``data`` with the output poisoned; compare."""
    with torch.no_grad():
        for own in contender.data:
            own.normal_()
        contender.replay()
        for own, given in zip(contender.data, data, strict=True):
            own.copy_(given)
        contender.output.fill_(float("nan"))
        contender.replay()
        torch.cuda.synchronize()
        found = contender.output.double().cpu().reshape(expected.shape)
        error = float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
    return {"relative_error": error, "right": error < tolerance}


def machine(target: str, torch: Any) -> dict:
    """What a figure depends on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    versions = {"tvm": tvm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {"tvm_ffi": tvm_ffi.__version__, "cudnn": torch.backends.cudnn.version()}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "gpu_driver": subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0],
        "target": target,
        "versions": versions,
    }


def capture(call: Callable[[], Any], torch: Any, calls: int = 1) -> tuple[Any, Any, int]:
    """A CUDA graph of ``calls`` in a row, the last one's result, and the most bytes that torch
    allocated for it."""
    with torch.no_grad():
        torch.cuda.synchronize()  # other streams do not wait for copies made in the default one
        with tvm_ffi.use_torch_stream(torch.cuda.stream(torch.cuda.Stream())):
            for _ in range(_WARM_UP):
                call()  # its result is dropped: TVM's pool must have one left for the capture
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
            for _ in range(calls - 1):
                call()
            output = call()
    torch.cuda.synchronize()
    return graph, output, torch.cuda.max_memory_allocated() - before


def time_in_turns(
    replays: Mapping[str, Callable[[], None]], rounds: int, seconds: float, torch: Any
) -> dict[str, list[float]]:
    """Microseconds of each replay; ``seconds`` of one contender in all its rounds together.

    Every turn starts with an untimed burst.
    """
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            usual = min(_burst(replay, 3, torch))
            count = max(3, min(20, int(_BURST_US / usual)))
            end = time.perf_counter() + seconds / rounds
            times[name] += _burst(replay, count, torch)
            while time.perf_counter() < end:
                times[name] += _burst(replay, count, torch)
    return times


def _burst(replay: Callable[[], None], count: int, torch: Any) -> list[float]:
    """Microseconds between the ends of replays that follow each other without a gap.

    The GPU is never idle in between, so what it takes to launch them is not part of the time.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events:
        replay()
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    return [first.elapsed_time(second) * 1e3 for first, second in pairs]


def is_lost(torch: Any) -> bool:
    """Did a kernel end this process's use of the GPU (an illegal access, for example)?"""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
