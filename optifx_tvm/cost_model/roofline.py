"""A closed-form cost model: what binds (arithmetic, a memory level, idle units) plus a share of the
rest, because kernels overlap the two imperfectly."""

from __future__ import annotations

import math

from optifx_tvm.analysis.footprint import Footprint, GroupAnalysis, Stage
from optifx_tvm.analysis.warp_split import WARPS, choose_split
from optifx_tvm.device import DeviceSpec
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile

EXPOSED = {"gpu": 0.3, "cpu": 0.8}
"""Share of the times that do not bind which is not hidden behind the one that does. On a CPU the
nests of a tile run one after the other, so that little is hidden."""
LANES = 16
"""Channels that a register block of a stage covers; a rest costs as much as a whole one."""
PLAIN = 0.05
"""GPU: reached share of the float32 peak by dense convolutions that can't be products."""
GPU_EFFICIENCY = {"matrix": PLAIN, "depthwise": 0.1, "pool": 0.1, "copy": 0.2}
CPU_EFFICIENCY = {"matrix": 0.75, "depthwise": 0.5, "pool": 0.2, "copy": 0.15}
"""Reached share of the float32 peak by kind of stage. Dense convolutions of a GPU that are products
are priced in clocks (analysis/warp_split.py)."""
SHARED_CACHE = 1.01
"""CPU: factor on the arithmetic of several stages in one kernel, whose weights and tiles evict each
other from L1 (measured: 0 to 3 percent)."""
STAGE_US = 0.5
"""GPU: latency of one stage of a block (barriers, sums, epilogue)."""
PIECE_US = 0.3
"""GPU: latency of gathering one part of a concat into shared memory."""
BLOCK_US = 0.5
"""GPU: latency of a block before its first stage (first activations from L2)."""
RESIDENT = 4
"""GPU: most blocks of one SM that hide each other's latency."""

L2_BURST = 2.0
"""GPU: an SM can draw this times its share of the L2 bandwidth while others draw less."""
LONE = 1.25
"""GPU: factor on the time of a block that is alone on its SM: it waits at its own barriers."""


class RooflineCostModel:
    """Predictions for one device.

    ``t`` is the time of one block on its unit, ``n = ceil(blocks / units)`` the blocks that the
    busiest unit works through.

    | term       | GPU                                   | CPU                                   |
    |------------|---------------------------------------|---------------------------------------|
    | arithmetic | n * sum over stages of FLOP / (peak of a unit * efficiency), channels rounded |
    |            | up to 16; GPU: of a product its clocks instead; * 1.25 if a block is alone on |
    |            | its SM; CPU: * 1.01 if there are several stages                               |
    | on chip    | n * bytes / shared bandwidth of a SM  | n * 2 * buffers / L1 (or, if they     |
    |            |                                       | exceed it, L2) bandwidth of a core    |
    | streams    | n * weights and inputs of a block     | n * weights and inputs of a block     |
    |            | / (2 * share of L2 bandwidth)         | / bandwidth of where they stay; then  |
    |            |                                       | outputs                               |
    | device     | L2: all bytes; DRAM: weights once,    |                                       |
    |            | activations that exceed half of L2    |                                       |
    | latency    | ceil(n / resident) * (block + stages  | n * task                              |
    |            | + gathered parts of concats)          |                                       |
    | total      | launch + latency + max(terms) + exposed * (sum of terms - max)                |
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self._last: GroupAnalysis | None = None

    def predict(self, group: ConvGraph, tile: Tile) -> float:
        """See CostModel.predict."""
        if self._last is None or self._last.group is not group:
            self._last = GroupAnalysis(group, self.device)
        found = self._last.footprint(tile)
        if not found.fits and len(group.nodes) > 1:
            return math.inf
        half = any(spec.dtype == "float16" for spec in group.tensors.values())
        times, latency = (self._gpu if self.device.kind == "gpu" else self._cpu)(group, found, half)
        longest = max(times)
        total = longest + EXPOSED[self.device.kind] * (sum(times) - longest) + latency
        return self.device.launch_us + total * 1e6

    def _arithmetic(self, stages: tuple[Stage, ...], half: bool) -> float:
        """Seconds that one unit needs for one block's arithmetic."""
        device, seconds = self.device, 0.0
        gpu = device.kind == "gpu"
        for stage in stages:
            if stage.product:
                clocks = min(choose_split(stage.product, warps).clocks for warps in WARPS)
                seconds += clocks / device.clock
                continue
            rate = device.fp32_flops * (GPU_EFFICIENCY if gpu else CPU_EFFICIENCY)[stage.kind]
            padded = -(-stage.channels // LANES) * LANES / stage.channels
            if stage.kind == "matrix" and half and not gpu:
                rate = device.fp16_flops
            seconds += stage.flops * padded * device.units / rate
        return seconds

    def _gpu(
        self, group: ConvGraph, found: Footprint, half: bool
    ) -> tuple[tuple[float, ...], float]:
        device, n = self.device, found.waves
        resident = max(1, min(RESIDENT, n, device.onchip_bytes // (found.shared_bytes + 16384)))
        lone = 1.0 if resident > 1 else LONE
        streamed = found.weight_bytes + sum(found.input_bytes.values())
        dram = sum(
            group.tensors[t].bytes
            for t in (*group.inputs, *group.outputs)
            if group.tensors[t].bytes > device.l2_bytes / 2
        ) + sum(group.tensors[t].bytes for t in group.params)
        times = (
            n * self._arithmetic(found.stages, half) * lone,
            found.onchip_bytes / found.blocks * n * device.units / device.onchip_bytes_per_s * lone,
            n * streamed * device.units / device.l2_bytes_per_s / L2_BURST,
            found.l2_bytes / device.l2_bytes_per_s,
            dram / device.dram_bytes_per_s,
        )
        stages = sum(stage.kind != "copy" for stage in found.stages)
        pieces = sum(
            part in group.inputs
            for node in group.nodes
            if node.op == "concat"
            for part in node.inputs
        )
        block_us = BLOCK_US + STAGE_US * max(stages, 1) + PIECE_US * pieces
        latency = -(-n // resident) * block_us * 1e-6
        return times, latency

    def _cpu(
        self, group: ConvGraph, found: Footprint, half: bool
    ) -> tuple[tuple[float, ...], float]:
        device, n = self.device, found.waves
        buffers = found.shared_bytes
        params = sum(group.tensors[t].bytes for t in group.params)
        weights = found.weight_bytes * self._second_per_byte(params + buffers, private=True)
        if params + buffers <= device.l2_bytes:  # fetched once, then found in L2
            weights = weights * (n - 1) / n + params / n * self._second_per_byte(device.l3_bytes)
        inputs = sum(
            size * self._second_per_byte(group.tensors[t].bytes)
            for t, size in found.input_bytes.items()
        )
        outputs = sum(
            group.tensors[t].bytes * self._second_per_byte(group.tensors[t].bytes)
            for t in group.outputs
        )
        level = (
            device.onchip_bytes_per_s if buffers <= device.onchip_bytes else device.l2_bytes_per_s
        )
        working = sum(stage.kind != "copy" for stage in found.stages)
        times = (
            n * self._arithmetic(found.stages, half) * (SHARED_CACHE if working > 1 else 1.0),
            n * 2 * buffers * device.units / level,
            n * (weights + inputs) + outputs / min(found.blocks, device.units),
        )
        return times, n * device.task_us * 1e-6

    def _second_per_byte(self, size: int, private: bool = False) -> float:
        """Seconds a core needs per byte of something of ``size`` bytes, from where it stays."""
        device = self.device
        # What other cores wrote is found in one's own L2 only in part.
        l2 = device.l2_bytes if private else device.l2_bytes * device.units // 4
        if size <= l2:
            return device.units / device.l2_bytes_per_s
        if size <= device.l3_bytes:
            return device.units / device.l3_bytes_per_s
        return device.units / device.dram_bytes_per_s
