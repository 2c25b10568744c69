"""Calls captured in torch CUDA graphs, and the GPU time of their replays.

Works for whatever launches on torch's current stream or on that of TVM: both capture alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi

_WARM_UP = 4
_BURST_US = 20_000
"""Length of one burst of replays, within 3 to 20 replays."""


def capture(call: Callable[[], Any], torch: Any) -> tuple[Any, Any, int]:
    """A CUDA graph of one call, its result, and the most bytes that torch allocated for it."""
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
