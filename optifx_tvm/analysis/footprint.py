"""What one kernel costs in resources: FLOP, recompute, bytes per memory level, on-chip memory.

Bytes are of the tensors' dtype; a multiply-add is two FLOP. Sums are over the whole kernel unless
said to be of one block. A block is one tile of one image and one channel slice.

Bytes by level:

    DRAM      every input, parameter and output once (compulsory)
    L2        per block: the input regions and weights that it reads (halos and weights are streamed
              again by every block); outputs once
    on chip   per block: what it writes to its buffers and reads back through the windows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from optifx_tvm.analysis.channels import ChannelRange, channel_plan, is_depthwise
from optifx_tvm.analysis.geometry import AxisGeometry, axis_geometry, staged_copies
from optifx_tvm.analysis.placement import Placement, pitch_of
from optifx_tvm.analysis.products import (
    ProductShape,
    is_matrix_packed,
    is_phased,
    is_product,
    product_shape,
)
from optifx_tvm.analysis.region import AxisSpace, TileSpace
from optifx_tvm.analysis.warp_split import WARPS, choose_split
from optifx_tvm.device import DeviceSpec
from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Tile

CHANNEL_PITCH = 16
"""Channels of an on-chip buffer are rounded up to this, unless there are fewer."""
STAGING_BYTES = 2 * 1024
"""Shared memory of a GPU block that may be lost between its buffers."""
REUSE = 64
"""Output channels for which a value read from on-chip memory is kept in registers."""
_HEAVY = ("sigmoid", "tanh", "exp", "erf", "sqrt", "rsqrt", "log", "power", "divide")


class Stage(NamedTuple):
    """One node in one block. (A tuple: a search makes hundreds of thousands.)"""

    node: str
    kind: str
    """"matrix" (dense convolution), "depthwise" (and other thin grouped ones), "pool" or "copy"
    (element-wise, concat)."""
    positions: int
    channels: int
    depth: int
    """Multiply-adds, or window elements, per output element."""
    flops: int
    """Of the operator, prologue and epilogue."""
    weight_bytes: int
    """Parameters that the block reads for it."""
    product: ProductShape | None
    """GPU: the product of warp tiles that computes it."""


@dataclass(frozen=True)
class Footprint:
    """Resources of one group with one tile on one device."""

    axes: tuple[AxisSpace, AxisSpace]
    """Tiles of the rows and of the columns."""
    blocks: int
    waves: int
    """Rounds in which the device's units work through the blocks, one block a unit."""
    stages: tuple[Stage, ...]
    """Of one block, in order."""
    flops: int
    """Done by all blocks."""
    flops_matrix: int
    """The part of ``flops`` that matrix units could do: dense convolutions."""
    flops_needed: int
    """What the nodes need without recompute and ragged tiles."""
    dram_bytes: int
    l2_bytes: int
    onchip_bytes: int
    buffers: Mapping[str, int]
    """On-chip buffers of one block -> bytes: results read inside the group under their names,
    staged copies of inputs under ``tensor->reader``."""
    input_bytes: Mapping[str, int]
    """Input -> bytes that one block reads of it."""
    capacity: int
    """On-chip bytes that a block may use on this device."""

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles in (height, width)."""
        return self.axes[0].count, self.axes[1].count

    @property
    def space(self) -> TileSpace:
        """Regions of every activation, including their halos; see ``halo``."""
        return TileSpace.of(*self.axes)

    @property
    def flops_simt(self) -> int:
        """FLOP that matrix units can't do."""
        return self.flops - self.flops_matrix

    @property
    def recompute(self) -> float:
        """FLOP done over FLOP needed."""
        return self.flops / max(self.flops_needed, 1)

    @property
    def shared_bytes(self) -> int:
        """Peak of on-chip memory of a block: its buffers are all alive at once."""
        return sum(self.buffers.values())

    @property
    def fits(self) -> bool:
        """Do the buffers fit?"""
        return self.shared_bytes <= self.capacity

    @property
    def weight_bytes(self) -> int:
        """Parameters that one block reads."""
        return sum(stage.weight_bytes for stage in self.stages)


def halo(group: ConvGraph, space: TileSpace) -> Mapping[str, tuple[int, int]]:
    """Activation -> rows and columns of its region beyond the tile's own share (with a single tile:
    beyond the image)."""
    found = {}
    for tensor, region in space.regions.items():
        shape = group.shape(tensor)
        rows = region.rows.extent - (region.rows.step or shape[1])
        cols = region.cols.extent - (region.cols.step or shape[2])
        found[tensor] = (max(rows, 0), max(cols, 0))
    return found


def footprint(group: ConvGraph, tile: Tile, device: DeviceSpec) -> Footprint:
    """The footprint of ``group``.

    Raises RegionError if it has no single tile space, ChannelError if its channels can't be cut.
    """
    return GroupAnalysis(group, device).footprint(tile)


class GroupAnalysis:
    """Footprints of one group for many tiles: what does not depend on the tile is found once."""

    def __init__(self, group: ConvGraph, device: DeviceSpec) -> None:
        self.group = group
        self.device = device
        self.capacity = device.block_bytes - (STAGING_BYTES if device.kind == "gpu" else 0)
        self.batch = group.shape(group.nodes[-1].name)[0]
        self.item = {t: spec.bytes // _size(spec.shape) for t, spec in group.tensors.items()}
        self.compulsory = sum(spec.bytes for spec in group.tensors.values()) - sum(
            group.tensors[n].bytes for n in group.by_name if n not in group.outputs
        )
        self.written = sum(group.tensors[t].bytes for t in group.outputs)
        self.placement = Placement(group, products=device.kind == "gpu")
        self.buffered = tuple(n.name for n in group.nodes if self.placement.has_tile(n))
        self.staged = staged_copies(group, self.placement)
        self.work = [_work(node, group) for node in group.nodes]
        self.needed = sum(
            w.per_element * _size(group.shape(w.node)) + w.per_source * _size(group.shape(w.source))
            for w in self.work
        )
        self._axes: dict[tuple[int, int], AxisGeometry] = {}
        self._plans: dict[int, Mapping[str, ChannelRange]] = {}
        self._slices: dict[int, tuple[_Share, ...]] = {}

    def footprint(self, tile: Tile) -> Footprint:
        """See ``footprint``."""
        group, plan = self.group, self._plan(tile.channel_slices)
        rows, cols = self._axis(0, tile.height), self._axis(1, tile.width)
        area = {t: extent * cols.area[t] for t, extent in rows.area.items()}
        tiles = (rows.space.count, cols.space.count)
        blocks = self.batch * tiles[0] * tiles[1] * tile.channel_slices

        stages, onchip = [], 0
        results = {}
        for work, share in zip(self.work, self._shares(tile.channel_slices), strict=True):
            positions = area[work.node]
            elements = positions * share.channels
            sources = area.get(work.source, positions) * share.source_channels
            onchip += elements * work.depth // work.reuse * self.item[work.source]
            product = None
            if share.product:
                product = share.product._replace(rows=-(-positions // work.phases))
                split = choose_split(product, WARPS[0])
                results[f"{work.node}.product"] = split.result_bytes
            flops = elements * work.per_element + sources * work.per_source
            stages.append(
                Stage(
                    work.node,
                    work.kind,
                    positions,
                    share.channels,
                    work.depth,
                    flops,
                    share.weight_bytes,
                    product,
                )
            )
        buffers = {
            name: self._bytes(name, tall * wide, plan[name].extent)
            for name, tall, wide in zip(self.buffered, rows.buffered, cols.buffered, strict=True)
        }
        for copy, tall, wide in zip(self.staged, rows.staged, cols.staged, strict=True):
            channels = group.shape(copy.tensor)[-1]
            if copy.sliced:
                channels = max(plan[reader.name].extent for reader in copy.readers)
            size = self._bytes(copy.tensor, tall * wide, channels)
            buffers[f"{copy.tensor}->{copy.readers[0].name}"] = size
        onchip += sum(buffers.values())
        buffers |= results
        inputs = {
            t: tall * wide * plan[t].extent * self.item[t]
            for t, tall, wide in zip(group.inputs, rows.inputs, cols.inputs, strict=True)
        }
        weights = sum(stage.weight_bytes for stage in stages)
        return Footprint(
            axes=(rows.space, cols.space),
            blocks=blocks,
            waves=-(-blocks // self.device.units),
            stages=tuple(stages),
            flops=blocks * sum(stage.flops for stage in stages),
            flops_matrix=blocks * sum(s.flops for s in stages if s.kind == "matrix"),
            flops_needed=self.needed,
            dram_bytes=self.compulsory,
            l2_bytes=blocks * (weights + sum(inputs.values())) + self.written,
            onchip_bytes=blocks * onchip,
            buffers=buffers,
            input_bytes=inputs,
            capacity=self.capacity,
        )

    def _axis(self, axis: int, tile: int) -> AxisGeometry:
        key = (axis, tile)
        if key not in self._axes:
            self._axes[key] = axis_geometry(
                self.group, self.placement, self.buffered, self.staged, axis, tile
            )
        return self._axes[key]

    def _plan(self, slices: int) -> Mapping[str, ChannelRange]:
        if slices not in self._plans:
            self._plans[slices] = channel_plan(self.group, slices)
        return self._plans[slices]

    def _bytes(self, tensor: str, positions: int, channels: int) -> int:
        if self.device.kind == "gpu":
            channels = pitch_of(channels, self.item[tensor])
        elif channels > CHANNEL_PITCH:
            channels = -(-channels // CHANNEL_PITCH) * CHANNEL_PITCH
        return positions * channels * self.item[tensor]

    def _shares(self, slices: int) -> tuple[_Share, ...]:
        if slices not in self._slices:
            self._slices[slices] = tuple(self._share(work, slices) for work in self.work)
        return self._slices[slices]

    def _share(self, work: _Work, slices: int) -> _Share:
        plan, whole = self._plan(slices), self.group.shape(work.node)[-1]
        channels = plan[work.node].extent
        return _Share(
            channels=channels,
            source_channels=plan[work.source].extent,
            weight_bytes=work.param_bytes * channels // whole,
            product=self._product(work, channels, slices if channels < whole else 1),
        )

    def _product(self, work: _Work, channels: int, slices: int) -> ProductShape | None:
        """The product of one position of a node, None if it is not computed as a product."""
        node, group = self.group.by_name[work.node], self.group
        if self.device.kind != "gpu" or work.kind != "matrix":
            return None
        if not is_product(node, group, channels, slices):
            return None
        if is_matrix_packed(node, group) and not self.device.has_mma:
            return None
        streamed = node.inputs[0] in group.inputs and not self.placement.is_staged(node)
        return product_shape(node, group, (1, 1), channels, streamed)


@dataclass(frozen=True)
class _Share:
    """What one block has of a node's channels."""

    channels: int
    source_channels: int
    weight_bytes: int
    product: ProductShape | None
    """Of one position."""


@dataclass(frozen=True)
class _Work:
    """What one element of a node's result costs, whatever the tile."""

    node: str
    source: str
    kind: str
    depth: int
    per_element: int
    """FLOP of operator and epilogue."""
    per_source: int
    """FLOP of the prologue per input element."""
    param_bytes: int
    reuse: int
    """Output channels for which a value read is kept in registers."""
    phases: int
    """Output positions for each row of a product."""


def _work(node: Node, group: ConvGraph) -> _Work:
    source = node.inputs[0]
    taps = node.window.kernel[0] * node.window.kernel[1]
    kind, depth, flops = "copy", 1, 0
    if node.op.startswith("conv2d"):
        per_group = group.shape(source)[-1] // node.groups
        thin = is_depthwise(group, node) or (node.groups > 1 and per_group < 4)
        strides = node.window.strides if node.op == "conv2d_transpose" else (1, 1)
        kind = "depthwise" if thin else "matrix"
        depth = max(taps * per_group // (strides[0] * strides[1]), 1)
        flops = 2 * depth
    elif node.op.endswith("pool2d"):
        kind, depth, flops = "pool", taps, taps
    params = set(group.params)
    return _Work(
        node=node.name,
        source=source,
        kind=kind,
        depth=depth,
        per_element=flops + _step_flops(node.epilogue),
        per_source=_step_flops(node.prologue),
        param_bytes=sum(group.tensors[t].bytes for t in node.reads if t in params),
        reuse=REUSE if kind == "matrix" else 1,
        phases=taps if is_phased(node) else 1,
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _step_flops(steps: tuple[Step, ...]) -> int:
    return sum(8 if step.op in _HEAVY else 1 for step in steps)
