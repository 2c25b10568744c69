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

from optifx_tvm.analysis.channels import ChannelRange, channel_plan, is_depthwise, passes_slice
from optifx_tvm.analysis.placement import Placement, StageKey, pitch_of
from optifx_tvm.analysis.products import (
    ProductShape,
    is_matrix_packed,
    is_phased,
    is_product,
    product_shape,
)
from optifx_tvm.analysis.region import Region1D, TileSpace, input_region, tile_space
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

    tiles: tuple[int, int]
    """Number of tiles in (height, width)."""
    blocks: int
    waves: int
    """Rounds in which the device's units work through the blocks, one block a unit."""
    space: TileSpace
    """Regions of every activation, including their halos; see ``halo``."""
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
        self.buffered = [node.name for node in group.nodes if self.placement.has_tile(node)]
        self.staged = self._staged()
        self.work = [_work(node, group) for node in group.nodes]
        self.needed = sum(
            w.per_element * _size(group.shape(w.node)) + w.per_source * _size(group.shape(w.source))
            for w in self.work
        )
        self._geometries: dict[tuple[int, int], _Geometry] = {}
        self._plans: dict[int, Mapping[str, ChannelRange]] = {}

    def footprint(self, tile: Tile) -> Footprint:
        """See ``footprint``."""
        group, plan = self.group, self._plan(tile.channel_slices)
        geometry = self._geometry(tile)
        space, area = geometry.space, geometry.area
        rows, cols = space.count
        blocks = self.batch * rows * cols * tile.channel_slices

        stages, onchip = [], 0
        results = {}
        for work in self.work:
            channels, positions = plan[work.node].extent, area[work.node]
            elements = positions * channels
            sources = area.get(work.source, positions) * plan[work.source].extent
            reuse = REUSE if work.kind == "matrix" else 1
            onchip += elements * work.depth // reuse * self.item[work.source]
            product = None
            if self.device.kind == "gpu" and work.kind == "matrix":
                product = self._product(work.node, positions, channels, tile.channel_slices)
                if product:
                    split = choose_split(product, WARPS[0])
                    results[f"{work.node}.product"] = split.result_bytes
            stages.append(
                Stage(
                    node=work.node,
                    kind=work.kind,
                    positions=positions,
                    channels=channels,
                    depth=work.depth,
                    flops=elements * work.per_element + sources * work.per_source,
                    weight_bytes=work.param_bytes * channels // group.shape(work.node)[-1],
                    product=product,
                )
            )
        buffers = {
            name: self._bytes(name, positions, plan[name].extent)
            for name, positions in geometry.buffered.items()
        }
        for copy, positions in zip(self.staged, geometry.staged, strict=True):
            channels = group.shape(copy.tensor)[-1]
            if copy.sliced:
                channels = max(plan[reader.name].extent for reader in copy.readers)
            size = self._bytes(copy.tensor, positions, channels)
            buffers[f"{copy.tensor}->{copy.readers[0].name}"] = size
        onchip += sum(buffers.values())
        buffers |= results
        inputs = {
            t: positions * plan[t].extent * self.item[t] for t, positions in geometry.inputs.items()
        }
        weights = sum(stage.weight_bytes for stage in stages)
        return Footprint(
            tiles=space.count,
            blocks=blocks,
            waves=-(-blocks // self.device.units),
            space=space,
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

    def _geometry(self, tile: Tile) -> _Geometry:
        key = (tile.height, tile.width)
        if key not in self._geometries:
            space = tile_space(self.group, key)
            shapes = {t: self.group.shape(t)[1:3] for t in space.regions}
            regions = space.regions.items()
            extents = {t: (region.rows.extent, region.cols.extent) for t, region in regions}
            area = {
                t: _clip(region.rows, space.count[0], shapes[t][0])
                * _clip(region.cols, space.count[1], shapes[t][1])
                for t, region in regions
            }
            self._geometries[key] = _Geometry(
                space=space,
                area=area,
                buffered={  # positions outside the image are held where somebody reads them
                    t: area[t]
                    if self.placement.tile_fill(t) is None
                    else extents[t][0] * extents[t][1]
                    for t in self.buffered
                },
                staged=tuple(self._staged_positions(space, copy) for copy in self.staged),
                inputs={  # what is outside the image is not read; (N, 1, 1, C) has no region
                    t: min(extents[t][0], shapes[t][0]) * min(extents[t][1], shapes[t][1])
                    if t in extents
                    else 1
                    for t in self.group.inputs
                },
            )
        return self._geometries[key]

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

    def _product(
        self, name: str, positions: int, channels: int, slices: int
    ) -> ProductShape | None:
        """The product of one tile of a convolution, None if it can't be one."""
        node, group = self.group.by_name[name], self.group
        sliced = slices if channels < group.shape(name)[3] else 1
        if not is_product(node, group, channels, sliced):
            return None
        if is_matrix_packed(node, group) and not self.device.has_mma:
            return None
        tall = node.window.kernel[0] if is_phased(node) else 1
        streamed = node.inputs[0] in group.inputs and not self.placement.is_staged(node)
        return product_shape(node, group, (tall, -(-positions // tall)), channels, streamed)

    def _staged(self) -> list[_Copy]:
        """The staged copies: readers with the same prologue and padding value share one."""
        placement = self.placement
        found: dict[StageKey, list[Node]] = {}
        for node in self.group.nodes:
            if placement.is_staged(node):
                found.setdefault(placement.stage_key(node), []).append(node)
        copies = []
        for readers in found.values():
            tensor = readers[0].inputs[0]
            producer = self.group.by_name.get(tensor)
            gathered = producer is not None and placement.is_gathered(producer)
            sliced = not gathered and all(passes_slice(self.group, r) for r in readers)
            copies.append(_Copy(tensor, tuple(readers), sliced))
        return copies

    def _staged_positions(self, space: TileSpace, copy: _Copy) -> int:
        """Positions of one staged copy: the hull of what its readers need."""
        needs = [input_region(node, space.regions[node.name]) for node in copy.readers]
        shape = self.group.shape(copy.tensor)
        padded = self.placement.padding_value(copy.readers[0]) is not None
        positions = 1
        for i, axes in enumerate(([r.rows for r in needs], [r.cols for r in needs])):
            start, end = min(axis.base for axis in axes), max(axis.end for axis in axes)
            if not padded and space.count[i] == 1:  # nobody reads positions outside the image
                start, end = max(start, 0), min(end, shape[1 + i])
            positions *= max(end - start, 1)
        return positions


@dataclass(frozen=True)
class _Geometry:
    """What depends on the rows and columns of a tile but not on its channel slices: numbers of
    positions."""

    space: TileSpace
    area: Mapping[str, int]
    """Computed or read of every activation."""
    buffered: Mapping[str, int]
    staged: tuple[int, ...]
    inputs: Mapping[str, int]


@dataclass(frozen=True)
class _Copy:
    """A staged copy of a tensor."""

    tensor: str
    readers: tuple[Node, ...]
    sliced: bool
    """Has it just the channels that its readers compute (else all)?"""


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
    )


def _clip(axis: Region1D, count: int, size: int) -> int:
    """Positions that are computed: with a single tile those outside the image are known."""
    if count > 1:
        return axis.extent
    return max(min(axis.end, size) - max(axis.base, 0), 1)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _step_flops(steps: tuple[Step, ...]) -> int:
    return sum(8 if step.op in _HEAVY else 1 for step in steps)
