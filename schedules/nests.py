"""The nests of a tile program: buffers, reads and writes, whatever the operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.channels import channel_plan
from optifx_tvm.analysis.placement import Placement
from optifx_tvm.analysis.products import LANES, is_product, padded_depth, weight_depth
from optifx_tvm.analysis.region import Region, Region1D, tile_space
from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.packing import packed_weight_shape
from optifx_tvm.schedules.positions import At, Expr, Pos, View, all_of, constant, i64
from optifx_tvm.schedules.steps import apply_steps

VECTOR = 4
"""Channels that a thread of a GPU handles together."""
RESULT = "_product"
"""What the name of a product and its result ends with."""
Accumulated = Callable[[tuple[Expr, ...], list[Expr]], Expr]
"""What reads the result of a compute nest at (outer indices, [row, column, channel])."""


class Product(Protocol):
    """A convolution that is emitted as one nest for all channels (product.py)."""

    def emit(self, block: str) -> Accumulated:
        """Emit the nest."""
        ...

    @property
    def clocks(self) -> float:
        """Estimate of its time."""
        ...


@dataclass(frozen=True)
class Nest:
    """One load, store or border nest, and the compute nest that feeds it."""

    block: str
    kind: str
    """"conv", "grouped", "depthwise", "pool" (with a compute nest), "product" (of warp
    tiles), "elementwise", "load" or "border"."""
    extents: tuple[int, int, int]
    """Rows, columns and channels that the nest covers in one tile."""
    writes_tile: bool
    """Does it write an on-chip tile (rather than an output)?"""
    compute: str | None = None
    reduction: tuple[int, ...] = ()
    """Extents of the compute nest's reduction loops: (kh, kw) or (kh, kw, channels)."""


@dataclass(frozen=True)
class Target:
    """Where a node's values go."""

    buffer: Any
    region: Region | None
    """Region of the tile buffer, None for an output in global memory."""
    offset: int = 0
    """First channel: not 0 for a slice of a concat."""
    fill: float | None = None
    """What positions outside the image hold; None if nobody reads them."""
    is_slice: bool = False
    """Is this one part of a tile that others complete?"""
    epilogue: tuple[Step, ...] = ()
    """Of the concat that is written in place."""


@dataclass(frozen=True)
class Source:
    """How the values of one tensor come about, for ``NestEmitter.write``."""

    tensor: str
    region: Region
    full: bool
    """All channels, or the tile's slice of them."""
    kind: str
    value: Callable[[At, Expr, Expr | None], Expr]
    """(position, absolute channel, accumulator element or None) -> float32 value."""
    compute: Callable[[str, Region, int, int], tuple[Accumulated, tuple[int, ...]]] | None = None
    """(block, box, first channel, channels) -> accumulator and reduction extents."""
    product: Callable[[Region], Product] | None = None
    """box -> product, instead of ``compute``."""


class NestEmitter(Placement):
    """Emits nests into the current IRBuilder frame."""

    def __init__(self, group: ConvGraph, tile: Tile, warps: int = 0) -> None:
        super().__init__(group, products=warps > 0)
        self.warps = warps
        self.clocks = 0.0
        self.space = tile_space(group, (tile.height, tile.width))
        self.plan = channel_plan(group, tile.channel_slices)
        batch = group.shape(group.nodes[-1].name)[0]
        self.lead_extents = (batch, *self.space.count, tile.channel_slices)
        self.lead: tuple[Expr, ...] = ()
        self.globals: dict[str, Any] = {}
        self.tiles: dict[str, View] = {}
        self.staged: dict[tuple, View] = {}
        self.nests: list[Nest] = []
        self.reads: list[Any] = []

    def declare(self) -> None:
        """Declare the parameters: inputs, params (weights packed), outputs."""
        group = self.group
        packed = {n.weight: packed_weight_shape(n, group) for n in group.nodes if n.weight}
        for name in (*group.inputs, *group.params, *group.outputs):
            spec = group.tensors[name]
            shape = tuple(i64(e) for e in packed.get(name, spec.shape))
            suffix = "_out" if name in group.outputs else ""
            self.globals[name] = T.arg(name + suffix, T.buffer(shape, spec.dtype))

    def held(self, tensor: str, full: bool) -> int:
        """Channels of ``tensor`` that one tile holds."""
        channels = self.group.shape(tensor)[3]
        return channels if full else channels // self.lead_extents[3]

    def as_product(self, node: Node) -> bool:
        """Is ``node`` computed as a product of warp tiles?"""
        if not self.warps:
            return False
        full = self.plan[node.name].full
        held = self.held(node.name, full)
        if node.op == "conv2d_transpose":
            region = self.space.regions[node.name]
            for axis, stride in zip((region.rows, region.cols), node.window.strides, strict=True):
                if axis.base % stride or axis.step % stride:
                    return False
        return is_product(node, self.group, held, 1 if full else self.lead_extents[3])

    def padding_depth(self, node: Node) -> int:
        """Channels by which the input of ``node`` must be padded for its product."""
        if not self.as_product(node):
            return 0
        return padded_depth(node, self.group) - weight_depth(node, self.group)

    def tile(self, name: str, tensor: str, region: Region, full: bool, more: int = 0) -> View:
        """Allocate a tile buffer, with ``more`` channels than the tensor has."""
        channels = self.held(tensor, full) + more
        shape = (*self.lead_extents, region.rows.extent, region.cols.extent, channels)
        dtype = self.group.tensors[tensor].dtype
        buffer = T.sblock_alloc_buffer(tuple(i64(e) for e in shape), dtype)
        # CUDA declares shared memory by this name, and a file may do so with one type only.
        buffer = IRBuilder.name(f"{name}_{dtype}", buffer)
        return View(buffer, region, None if full else channels)

    def own_tile(self, node: Node) -> View:
        """The tile buffer of ``node``'s result, allocated when first asked for (a concat's by the
        first part that writes its slice)."""
        if node.name not in self.tiles:
            region, full = self.space.regions[node.name], self.plan[node.name].full
            if self.tile_fill(node.name) is None:
                region = self.box(node.name, region)
            self.tiles[node.name] = self.tile(f"{node.name}_tile", node.name, region, full)
        return self.tiles[node.name]

    # Reads

    def load(self, buffer: Any, indices: list[Expr]) -> Expr:
        """An element in float32; remembered for the block's read region."""
        value = buffer[tuple(indices)]
        self.reads.append(value)
        return value if buffer.ty.dtype == "float32" else tirx.Cast("float32", value)

    def in_image(self, at: At) -> tuple[Pos, Pos]:
        """The position in the image."""
        found = []
        for i, (axis, pos) in enumerate(((at.region.rows, at.row), (at.region.cols, at.col))):
            last = axis.step * (self.space.count[i] - 1) + axis.base
            start = Pos(at.lead[1 + i] * axis.step + axis.base, axis.base, last)
            found.append(start.plus(pos))
        return found[0], found[1]

    def conditions(self, tensor: str, at: At) -> list[Expr]:
        """What must hold for ``at`` to be inside the image of ``tensor``."""
        row, col = self.in_image(at)
        height, width = self.group.shape(tensor)[1:3]
        return row.inside(height) + col.inside(width)

    def read(self, view: View, tensor: str, at: At, channel: Expr) -> Expr:
        """Element of ``tensor`` at ``at`` (channel absolute) in float32."""
        return self.load(*self.place(view, tensor, at, channel))

    def place(self, view: View, tensor: str, at: At, channel: Expr) -> tuple[Any, list[Expr]]:
        """Buffer and index of an element of ``tensor``. Positions are clamped into what exists; a
        clamped value is never used."""
        if view.region is None:
            row, col = self.in_image(at)
            height, width = self.group.shape(tensor)[1:3]
            where = (row.expr, col.expr) if at.guarded else (row.clamp(height), col.clamp(width))
            return view.buffer, [at.lead[0], *where, channel]
        row = at.row + (at.region.rows.base - view.region.rows.base)
        col = at.col + (at.region.cols.base - view.region.cols.base)
        if view.slice_extent is not None:
            channel = channel - at.lead[3] * view.slice_extent
        where = (row.clamp(view.region.rows.extent), col.clamp(view.region.cols.extent))
        return view.buffer, [*at.lead, *where, channel]

    def view(self, tensor: str) -> View:
        """Where ``tensor`` can be read."""
        return self.tiles.get(tensor) or View(self.globals[tensor])

    def operand(self, tensor: str, at: At, channel: Expr) -> Expr:
        """Element of a prologue or epilogue operand."""
        shape = self.group.shape(tensor)
        if len(shape) == 1:
            return self.load(self.globals[tensor], [channel])
        if shape[1:3] == (1, 1):
            if tensor in self.group.inputs:
                image = at.lead[0] if shape[0] > 1 else i64(0)
                return self.load(self.globals[tensor], [image, i64(0), i64(0), channel])
            pixel, origin = Region1D(0, 0, 1), Pos(i64(0), 0, 0)
            at = At(at.lead, Region(pixel, pixel), origin, origin)
        return self.read(self.view(tensor), tensor, at, channel)

    # Nests

    def nest(
        self,
        name: str,
        extents: tuple[int, ...],
        reduction: tuple[int, ...],
        body: Callable[[tuple[Expr, ...], list[Expr], list[Expr]], None],
    ) -> None:
        """Loops over (row, column, channel, reduction...) and one block around ``body``."""
        with ExitStack() as stack:
            loops = list(stack.enter_context(T.grid(*(i64(e) for e in (*extents, *reduction)))))
            stack.enter_context(T.sblock(name))
            outer = zip(self.lead_extents, self.lead, strict=True)
            lead = tuple(T.axis.spatial(i64(e), v) for e, v in outer)
            spatial = [T.axis.spatial(i64(e), v) for e, v in zip(extents, loops[:3], strict=True)]
            inner = zip(reduction, loops[3:], strict=True)
            reduce = [T.axis.reduce(i64(e), v) for e, v in inner]
            self.reads = []
            body(lead, spatial, reduce)

    def box(self, tensor: str, region: Region) -> Region:
        """The part of ``region`` worth computing: on an axis with a single tile the positions
        outside the image are known now and left to the border nests. Of a region that is all
        outside (a convolution that reads nothing but padding) one position remains."""
        axes = []
        for i, axis in enumerate((region.rows, region.cols)):
            if self.space.count[i] == 1:
                low = min(max(axis.base, 0), axis.end - 1)
                high = min(axis.end, self.group.shape(tensor)[1 + i])
                axis = Region1D(0, low, max(high - low, 1))
            axes.append(axis)
        return Region(axes[0], axes[1])

    def write(self, name: str, source: Source, target: Target) -> None:
        """Emit the nests that write the values of ``source`` to ``target``: one for the channels
        in whole blocks of 16 (on a GPU 4) and one for the rest, then the borders."""
        channels = self.held(source.tensor, source.full)
        box = self.box(source.tensor, source.region)
        granule = VECTOR if self.warps else LANES
        main = channels // granule * granule
        whole: Accumulated | None = None
        if source.product:
            product = name + RESULT
            found = source.product(box)
            whole = found.emit(product)
            self.clocks += found.clocks
            extents = (box.rows.extent, box.cols.extent, channels)
            self.nests.append(Nest(product, "product", extents, False))
        for suffix, first, extent in (("", 0, main), ("_tail", main, channels - main)):
            if not extent:
                continue
            block, acc, reduction = name + suffix, None, ()
            if source.compute:
                acc, reduction = source.compute(f"{block}_acc", box, first, extent)
            elif whole:
                acc = _from_channel(whole, first)
            extents = (box.rows.extent, box.cols.extent, extent)
            self.nest(block, extents, (), partial(self.store, source, target, box, first, acc))
            compute = f"{block}_acc" if source.compute else None
            writes_tile = target.region is not None
            self.nests.append(Nest(block, source.kind, extents, writes_tile, compute, reduction))
        if target.region and target.fill is not None:
            self.borders(name, target, box, channels)

    def store(
        self,
        source: Source,
        target: Target,
        box: Region,
        first: int,
        acc: Accumulated | None,
        lead: tuple[Expr, ...],
        spatial: list[Expr],
        _: list[Expr],
    ) -> None:
        """Body of a store nest: epilogue, then the element of the tile or the output."""
        row, col = (
            Pos(spatial[0], 0, box.rows.extent - 1),
            Pos(spatial[1], 0, box.cols.extent - 1),
        )
        at = At(lead, box, row, col)
        is_tile = target.region is not None
        wanted = (
            self.conditions(source.tensor, at) if not is_tile or target.fill is not None else []
        )
        at = At(lead, box, row, col, guarded=bool(wanted))
        held = spatial[2] + first if first else spatial[2]
        channel = held
        if not source.full:
            channel = held + lead[3] * self.held(source.tensor, full=False)
        head = None if acc is None else acc(lead, spatial)
        value = source.value(at, channel, head)
        read = partial(self.operand, at=at, channel=channel + target.offset)
        value = apply_steps(target.epilogue, value, read)
        dtype = target.buffer.ty.dtype
        if isinstance(value, tirx.Cast) and value.value.ty.dtype == dtype:
            value = value.value  # a mere copy
        elif dtype != "float32":
            value = tirx.Cast(dtype, value)
        condition = all_of(wanted)
        if target.region is not None:
            if condition is not None:
                value = tirx.if_then_else(condition, value, constant(target.fill or 0.0, dtype))
            index = [
                *lead,
                spatial[0] + (box.rows.base - target.region.rows.base),
                spatial[1] + (box.cols.base - target.region.cols.base),
                held + target.offset,
            ]
            if target.is_slice:
                # Schedule wants to see a read region covered by writers in an order in which their
                # slices stay contiguous, which a concat's parts need not do: each writer is
                # declared to write all channels. Nothing but that check reads the declaration.
                channels = slice(i64(0), target.buffer.ty.shape[-1])
                T.reads(*self.reads)
                T.writes(target.buffer[(*index[:-1], channels)])
            T.buffer_store(target.buffer, value, index)
            return
        rows, cols = self.in_image(at)
        index = [lead[0], rows.expr, cols.expr, channel + target.offset]
        if condition is None:
            T.buffer_store(target.buffer, value, index)
            return
        T.reads(*self.reads)
        T.writes(target.buffer[tuple(index)])
        with T.If(condition), T.Then():
            T.buffer_store(target.buffer, value, index)

    def pad_channels(self, name: str, view: View, count: int) -> None:
        """Write zeros to the last ``count`` channels of a tile."""
        region = view.region
        assert region is not None
        first = int(view.buffer.ty.shape[-1]) - count

        def body(lead, spatial, _):
            index = [*lead, *spatial[:2], spatial[2] + first]
            T.reads()
            T.writes(view.buffer[(*index[:-1], slice(i64(0), view.buffer.ty.shape[-1]))])
            T.buffer_store(view.buffer, constant(0.0, view.buffer.ty.dtype), index)

        extents = (region.rows.extent, region.cols.extent, count)
        self.nest(f"{name}_channels", extents, (), body)
        self.nests.append(Nest(f"{name}_channels", "border", extents, True))

    def borders(self, name: str, target: Target, box: Region, channels: int) -> None:
        """Write the padding value to the strips of the target's region around ``box``."""
        region = target.region
        assert region is not None and target.fill is not None
        top, left = box.rows.base - region.rows.base, box.cols.base - region.cols.base
        bottom, right = top + box.rows.extent, left + box.cols.extent
        strips = {
            "top": (0, 0, top, region.cols.extent),
            "bottom": (bottom, 0, region.rows.extent - bottom, region.cols.extent),
            "left": (top, 0, bottom - top, left),
            "right": (top, right, bottom - top, region.cols.extent - right),
        }
        fill = constant(target.fill, target.buffer.ty.dtype)
        for side, (row, col, rows, cols) in strips.items():
            if rows <= 0 or cols <= 0:
                continue

            def body(lead, spatial, _, row=row, col=col):
                index = [spatial[0] + row, spatial[1] + col, spatial[2] + target.offset]
                T.buffer_store(target.buffer, fill, [*lead, *index])

            extents = (rows, cols, channels)
            self.nest(f"{name}_{side}", extents, (), body)
            self.nests.append(Nest(f"{name}_{side}", "border", extents, True))


def _from_channel(acc: Accumulated, first: int) -> Accumulated:
    """``acc`` for a nest whose channel 0 is its channel ``first``."""

    def read(lead: tuple[Expr, ...], at: list[Expr]) -> Expr:
        return acc(lead, [*at[:2], at[2] + first if first else at[2]])

    return read
