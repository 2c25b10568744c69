"""Tile programs: a fusion group and a tile as one schedulable TensorIR function.

Overlapped tiling is written into the program. Four outer loops (image of the batch, tile row, tile
column, channel slice) head a sequence of plain nests over (row, column, channel) of one tile: a
*load* copies an input region on chip (padding and prologue applied), a *compute* nest reduces into
an fp32 accumulator, a *store* nest applies the epilogue and writes an intermediate tile or the
output. Halo recompute is explicit: a producer's nest simply covers the region that its consumers
need. Positions of an intermediate outside its image are written with the padding value of the
operator that reads it. A concat has no nest where its producers can write their slices in place,
and no buffer where it is only read through staged copies (DenseNet).

llvm, CUDA SIMT and tensor-core templates are schedules of this same function. Its parameters are
the group's inputs, params (weights packed, see packing.py) and outputs, so the signature depends on
the group alone and any tile can be swapped in later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.channels import channel_plan, is_depthwise, passes_slice
from optifx_tvm.analysis.region import Region, Region1D, input_region, tile_space
from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.packing import LANES, packed_weight_shape
from optifx_tvm.schedules.steps import apply_steps, f32

SLACK = 31
"""Columns that an accumulator may compute beyond its region, so that a register block need not
divide the width: reads are clamped into the image, the surplus is never stored."""
LOWEST = float(np.finfo(np.float32).min)
"""Padding value of max pooling."""

Expr = Any  # TIR expressions: TVM's Python layer has no precise static types


@dataclass(frozen=True)
class Nest:
    """One load, store or border nest, and the compute nest that feeds it."""

    block: str
    kind: str
    """"conv", "grouped", "depthwise", "pool" (with a compute nest), "elementwise", "load" or
    "border"."""
    extents: tuple[int, int, int]
    """Rows, columns and channels that the nest covers in one tile."""
    writes_tile: bool
    """Does it write an on-chip tile (rather than an output)?"""
    compute: str | None = None
    reduction: tuple[int, ...] = ()
    """Extents of the compute nest's reduction loops: (kh, kw) or (kh, kw, channels)."""


@dataclass(frozen=True)
class TileProgram:
    """The function and what a template needs to know about it."""

    func: tirx.PrimFunc
    nests: tuple[Nest, ...]
    """In the order in which they run."""
    tiles: int
    """Iterations of the four outer loops: independent tiles."""


def needs_padding(node: Node, group: ConvGraph) -> bool:
    """Does a valid output of ``node`` read positions outside its input image?"""
    if node.op in ("elementwise", "concat"):
        return False
    w = node.window
    source, result = group.shape(node.inputs[0]), group.shape(node.name)
    for i in range(2):
        reach = (w.kernel[i] - 1) * w.dilation[i]
        if node.op == "conv2d_transpose":
            first = -((reach - w.padding[i]) // w.strides[i])
            last = (result[1 + i] - 1 + w.padding[i]) // w.strides[i]
        else:
            first = -w.padding[i]
            last = (result[1 + i] - 1) * w.strides[i] - w.padding[i] + reach
        if first < 0 or last >= source[1 + i]:
            return True
    return False


def build_tile_program(
    group: ConvGraph, tile: Tile, name: str = "main", outer: str = "serial"
) -> TileProgram:
    """The tile program of ``group`` (any names; it must have passed ``tile_space`` and
    ``channel_plan`` for ``tile``, else their errors are raised).

    ``outer`` says how the tiles run: "serial", "parallel" (llvm) or "blockIdx.x" (CUDA). It is
    given here because Schedule.parallel and Schedule.bind refuse a loop in which a buffer has
    several writers, as the slices of a concat do.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        emitter = _Emitter(group, tile)
        emitter.declare()
        tiles = math.prod(emitter.lead_extents)
        with _outer_loop(outer, tiles) as g:
            emitter.lead = _unravel(g, emitter.lead_extents)
            for node in group.nodes:
                emitter.emit(node)
    return TileProgram(builder.get(), tuple(emitter.nests), tiles)


def _outer_loop(kind: str, extent: int) -> Any:
    if kind == "blockIdx.x":
        return T.thread_binding(_i64(0), _i64(extent), thread=kind)
    return {"serial": T.serial, "parallel": T.parallel}[kind](_i64(0), _i64(extent))


def _unravel(index: Expr, extents: tuple[int, ...]) -> tuple[Expr, ...]:
    """The multi-index of a flat index (last axis fastest)."""
    found = []
    for i, extent in enumerate(extents):
        rest = math.prod(extents[i + 1 :])
        value = index if rest == 1 else tirx.floordiv(index, rest)
        found.append(value if i == 0 else tirx.floormod(value, extent))
    return tuple(found)


@dataclass(frozen=True)
class _Pos:
    """An index expression with its static bounds (inclusive)."""

    expr: Expr
    low: int
    high: int

    def __add__(self, k: int) -> _Pos:
        return _Pos(self.expr + k if k else self.expr, self.low + k, self.high + k)

    def __mul__(self, k: int) -> _Pos:
        return _Pos(self.expr * k if k != 1 else self.expr, self.low * k, self.high * k)

    def __floordiv__(self, k: int) -> _Pos:
        if k == 1:
            return self
        return _Pos(tirx.floordiv(self.expr, k), self.low // k, self.high // k)

    def plus(self, other: _Pos) -> _Pos:
        return _Pos(self.expr + other.expr, self.low + other.low, self.high + other.high)

    def clamp(self, extent: int) -> Expr:
        """The expression, kept in [0, extent) where its bounds don't guarantee that."""
        expr = self.expr
        if self.low < 0:
            expr = tirx.max(expr, _i64(0))
        if self.high >= extent:
            expr = tirx.min(expr, _i64(extent - 1))
        return expr

    def inside(self, extent: int) -> list[Expr]:
        """The conditions for being in [0, extent) that the bounds don't guarantee."""
        low = [self.expr >= 0] if self.low < 0 else []
        return low + ([self.expr < extent] if self.high >= extent else [])


@dataclass(frozen=True)
class _View:
    """Where a tensor's values are read: a tile buffer, or (region None) global memory."""

    buffer: Any
    region: Region | None = None
    slice_extent: int | None = None
    """Channels of the slice that the tile buffer holds; None: all channels."""


@dataclass(frozen=True)
class _At:
    """A position: row and column relative to the start of ``region`` in the current tile."""

    lead: tuple[Expr, ...]
    region: Region
    row: _Pos
    col: _Pos
    guarded: bool = False
    """Is it only evaluated inside the image (so that reads need no clamping)?"""


@dataclass(frozen=True)
class _Target:
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
class _Source:
    """How the values of one tensor come about, for ``_Emitter.write``."""

    tensor: str
    region: Region
    full: bool
    """All channels, or the tile's slice of them."""
    kind: str
    value: Callable[[_At, Expr, Expr | None], Expr]
    """(position, absolute channel, accumulator element or None) -> float32 value."""
    compute: Callable[[str, Region, int, int], tuple[Any, tuple[int, ...]]] | None = None
    """(block, box, first channel, channels) -> accumulator and reduction extents."""


def _i64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _constant(value: float, dtype: str) -> tirx.FloatImm:
    """A constant, the lowest float32 as the lowest number of ``dtype``."""
    return tirx.FloatImm(dtype, max(value, float(np.finfo(str(dtype)).min)))


def _all(conditions: list[Expr]) -> Expr | None:
    result = None
    for condition in conditions:
        result = condition if result is None else tirx.all(result, condition)
    return result


def _fill(node: Node) -> float:
    return LOWEST if node.op == "max_pool2d" else 0.0


class _Emitter:
    """Emits the nests of one group into the current IRBuilder frame."""

    def __init__(self, group: ConvGraph, tile: Tile) -> None:
        self.group = group
        self.space = tile_space(group, (tile.height, tile.width))
        self.plan = channel_plan(group, tile.channel_slices)
        batch = group.shape(group.nodes[-1].name)[0]
        self.lead_extents = (batch, *self.space.count, tile.channel_slices)
        self.order = {node.name: i for i, node in enumerate(group.nodes)}
        self.lead: tuple[Expr, ...] = ()
        self.globals: dict[str, Any] = {}
        self.tiles: dict[str, _View] = {}
        self.staged: dict[tuple, _View] = {}
        self.nests: list[Nest] = []
        self.reads: list[Any] = []

    def declare(self) -> None:
        """Declare the parameters: inputs, params (weights packed), outputs."""
        group = self.group
        packed = {n.weight: packed_weight_shape(n, group) for n in group.nodes if n.weight}
        for name in (*group.inputs, *group.params, *group.outputs):
            spec = group.tensors[name]
            shape = tuple(_i64(e) for e in packed.get(name, spec.shape))
            suffix = "_out" if name in group.outputs else ""
            self.globals[name] = T.arg(name + suffix, T.buffer(shape, spec.dtype))

    # Where values live -----------------------------------------------------------------------

    def readers(self, tensor: str) -> list[Node]:
        """Nodes of the group that read ``tensor``."""
        return [self.group.by_name[c] for c in self.group.consumers[tensor]]

    def tile_fill(self, tensor: str) -> float | None:
        """What tile ``tensor`` holds outside its image: what its first padding reader wants."""
        for reader in self.readers(tensor):
            if (
                tensor in reader.inputs
                and not reader.prologue
                and needs_padding(reader, self.group)
            ):
                return _fill(reader)
        return None

    def is_staged(self, node: Node) -> bool:
        """Must ``node`` read its input through a copy (prologue, padding of its own)?"""
        if node.op == "concat" or not (node.prologue or needs_padding(node, self.group)):
            return False
        source = node.inputs[0]
        in_group = source in self.group.by_name
        return bool(node.prologue) or not in_group or self.tile_fill(source) != _fill(node)

    def is_gathered(self, node: Node) -> bool:
        """Is this concat only read through staged copies, so that it needs no buffer?"""
        return (
            node.op == "concat"
            and node.name not in self.group.outputs
            and not node.epilogue
            and all(
                self.is_staged(r) and node.name not in r.operands for r in self.readers(node.name)
            )
        )

    def concat_of(self, node: Node) -> Node | None:
        """The concat whose slice ``node`` can write in place, if any."""
        readers = self.readers(node.name)
        if len(readers) != 1 or node.name in self.group.outputs or node.op == "concat":
            return None
        (concat,) = readers
        whole = (
            concat.op == "concat"
            and concat.inputs.count(node.name) == 1
            and node.name not in concat.operands
            and not self.is_gathered(concat)
            # Its epilogue runs with the part: what that reads must have been computed by then.
            and all(self.order.get(t, -1) < self.order[node.name] for t in concat.operands)
        )
        return concat if whole else None

    def offset(self, concat: Node, index: int) -> int:
        """First channel of the index-th part of a concat."""
        return sum(self.group.shape(t)[3] for t in concat.inputs[:index])

    def held(self, tensor: str, full: bool) -> int:
        """Channels of ``tensor`` that one tile holds."""
        channels = self.group.shape(tensor)[3]
        return channels if full else channels // self.lead_extents[3]

    def tile(self, name: str, tensor: str, region: Region, full: bool) -> _View:
        """Allocate a tile buffer."""
        channels = self.held(tensor, full)
        shape = (*self.lead_extents, region.rows.extent, region.cols.extent, channels)
        dtype = self.group.tensors[tensor].dtype
        buffer = T.sblock_alloc_buffer(tuple(_i64(e) for e in shape), dtype)
        # CUDA declares shared memory by this name, and a file may do so with one type only.
        buffer = IRBuilder.name(f"{name}_{dtype}", buffer)
        return _View(buffer, region, None if full else channels)

    def own_tile(self, node: Node) -> _View:
        """The tile buffer of ``node``'s result, allocated when first asked for (a concat's by the
        first part that writes its slice)."""
        if node.name not in self.tiles:
            region, full = self.space.regions[node.name], self.plan[node.name].full
            if self.tile_fill(node.name) is None:
                region = self.box(node.name, region)
            self.tiles[node.name] = self.tile(f"{node.name}_tile", node.name, region, full)
        return self.tiles[node.name]

    # Reads -----------------------------------------------------------------------------------

    def load(self, buffer: Any, indices: list[Expr]) -> Expr:
        """An element in float32; remembered for the block's read region."""
        value = buffer[tuple(indices)]
        self.reads.append(value)
        return value if buffer.ty.dtype == "float32" else tirx.Cast("float32", value)

    def in_image(self, at: _At) -> tuple[_Pos, _Pos]:
        """The position in the image."""
        found = []
        for i, (axis, pos) in enumerate(((at.region.rows, at.row), (at.region.cols, at.col))):
            last = axis.step * (self.space.count[i] - 1) + axis.base
            start = _Pos(at.lead[1 + i] * axis.step + axis.base, axis.base, last)
            found.append(start.plus(pos))
        return found[0], found[1]

    def conditions(self, tensor: str, at: _At) -> list[Expr]:
        """What must hold for ``at`` to be inside the image of ``tensor``."""
        row, col = self.in_image(at)
        height, width = self.group.shape(tensor)[1:3]
        return row.inside(height) + col.inside(width)

    def read(self, view: _View, tensor: str, at: _At, channel: Expr) -> Expr:
        """Element of ``tensor`` at ``at`` (channel absolute). Positions are clamped into what
        exists; a clamped value is never used."""
        if view.region is None:
            row, col = self.in_image(at)
            height, width = self.group.shape(tensor)[1:3]
            where = (row.expr, col.expr) if at.guarded else (row.clamp(height), col.clamp(width))
            return self.load(view.buffer, [at.lead[0], *where, channel])
        row = at.row + (at.region.rows.base - view.region.rows.base)
        col = at.col + (at.region.cols.base - view.region.cols.base)
        if view.slice_extent is not None:
            channel = channel - at.lead[3] * view.slice_extent
        where = (row.clamp(view.region.rows.extent), col.clamp(view.region.cols.extent))
        return self.load(view.buffer, [*at.lead, *where, channel])

    def view(self, tensor: str) -> _View:
        """Where ``tensor`` can be read."""
        return self.tiles.get(tensor) or _View(self.globals[tensor])

    def operand(self, tensor: str, at: _At, channel: Expr) -> Expr:
        """Element of a prologue or epilogue operand."""
        shape = self.group.shape(tensor)
        if len(shape) == 1:
            return self.load(self.globals[tensor], [channel])
        if shape[1:3] == (1, 1) and tensor in self.group.inputs:
            image = at.lead[0] if shape[0] > 1 else _i64(0)
            return self.load(self.globals[tensor], [image, _i64(0), _i64(0), channel])
        return self.read(self.view(tensor), tensor, at, channel)

    # Nests -----------------------------------------------------------------------------------

    def nest(
        self,
        name: str,
        extents: tuple[int, ...],
        reduction: tuple[int, ...],
        body: Callable[[tuple[Expr, ...], list[Expr], list[Expr]], None],
    ) -> None:
        """Loops over (row, column, channel, reduction...) and one block around ``body``."""
        with ExitStack() as stack:
            loops = list(stack.enter_context(T.grid(*(_i64(e) for e in (*extents, *reduction)))))
            stack.enter_context(T.sblock(name))
            outer = zip(self.lead_extents, self.lead, strict=True)
            lead = tuple(T.axis.spatial(_i64(e), v) for e, v in outer)
            spatial = [T.axis.spatial(_i64(e), v) for e, v in zip(extents, loops[:3], strict=True)]
            inner = zip(reduction, loops[3:], strict=True)
            reduce = [T.axis.reduce(_i64(e), v) for e, v in inner]
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

    def write(self, name: str, source: _Source, target: _Target) -> None:
        """Emit the nests that write the values of ``source`` to ``target``: one for the channels
        in whole blocks of 16 and one for the rest, then the borders."""
        channels = self.held(source.tensor, source.full)
        box = self.box(source.tensor, source.region)
        main = channels // LANES * LANES
        for suffix, first, extent in (("", 0, main), ("_tail", main, channels - main)):
            if not extent:
                continue
            block, acc, reduction = name + suffix, None, ()
            if source.compute:
                acc, reduction = source.compute(f"{block}_acc", box, first, extent)
            extents = (box.rows.extent, box.cols.extent, extent)
            self.nest(block, extents, (), partial(self.store, source, target, box, first, acc))
            compute = f"{block}_acc" if source.compute else None
            writes_tile = target.region is not None
            self.nests.append(Nest(block, source.kind, extents, writes_tile, compute, reduction))
        if target.region and target.fill is not None:
            self.borders(name, target, box, channels)

    def store(
        self,
        source: _Source,
        target: _Target,
        box: Region,
        first: int,
        acc: Any,
        lead: tuple[Expr, ...],
        spatial: list[Expr],
        _: list[Expr],
    ) -> None:
        """Body of a store nest: epilogue, then the element of the tile or the output."""
        row, col = (
            _Pos(spatial[0], 0, box.rows.extent - 1),
            _Pos(spatial[1], 0, box.cols.extent - 1),
        )
        at = _At(lead, box, row, col)
        is_tile = target.region is not None
        wanted = (
            self.conditions(source.tensor, at) if not is_tile or target.fill is not None else []
        )
        at = _At(lead, box, row, col, guarded=bool(wanted))
        held = spatial[2] + first if first else spatial[2]
        channel = held
        if not source.full:
            channel = held + lead[3] * self.held(source.tensor, full=False)
        head = None if acc is None else self.load(acc, [*lead, *spatial])
        value = source.value(at, channel, head)
        operand = lambda t: self.operand(t, at, channel + target.offset)  # noqa: E731
        value = apply_steps(target.epilogue, value, operand)
        dtype = target.buffer.ty.dtype
        value = value if dtype == "float32" else tirx.Cast(dtype, value)
        condition = _all(wanted)
        if target.region is not None:
            if condition is not None:
                value = tirx.if_then_else(condition, value, _constant(target.fill or 0.0, dtype))
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
                channels = slice(_i64(0), target.buffer.ty.shape[-1])
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

    def borders(self, name: str, target: _Target, box: Region, channels: int) -> None:
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
        fill = _constant(target.fill, target.buffer.ty.dtype)
        for side, (row, col, rows, cols) in strips.items():
            if rows <= 0 or cols <= 0:
                continue

            def body(lead, spatial, _, row=row, col=col):
                index = [spatial[0] + row, spatial[1] + col, spatial[2] + target.offset]
                T.buffer_store(target.buffer, fill, [*lead, *index])

            extents = (rows, cols, channels)
            self.nest(f"{name}_{side}", extents, (), body)
            self.nests.append(Nest(f"{name}_{side}", "border", extents, True))

    # Operators -------------------------------------------------------------------------------

    def emit(self, node: Node) -> None:
        """Emit everything that computes ``node``."""
        region = self.space.regions[node.name]
        full = self.plan[node.name].full
        is_output, gathered = node.name in self.group.outputs, self.is_gathered(node)
        has_tile = bool(self.readers(node.name)) and not gathered and not self.concat_of(node)
        fill = self.tile_fill(node.name)
        if has_tile:
            self.own_tile(node)
        if node.op == "concat":
            self.emit_concat(node, has_tile)
        else:
            source = self.source(node, region, full)
            concat = self.concat_of(node)
            if concat is not None:
                part = self.offset(concat, concat.inputs.index(node.name))
                self.write(node.name, source, self.concat_target(concat, part))
            elif has_tile:
                view = self.tiles[node.name]
                self.write(node.name, source, _Target(view.buffer, view.region, fill=fill))
            else:
                self.write(node.name, source, _Target(self.globals[node.name], None))
        if is_output and has_tile:
            owned = self.space.owned[node.name]
            copy = self.copy(node.name, self.tiles[node.name], owned, full)
            self.write(f"{node.name}_copy", copy, _Target(self.globals[node.name], None))

    def concat_target(self, concat: Node, offset: int) -> _Target:
        """Where the part of ``concat`` that starts at channel ``offset`` goes."""
        if not self.readers(concat.name):
            return _Target(self.globals[concat.name], None, offset, epilogue=concat.epilogue)
        view = self.own_tile(concat)
        fill = self.tile_fill(concat.name)
        return _Target(view.buffer, view.region, offset, fill, True, concat.epilogue)

    def emit_concat(self, concat: Node, has_tile: bool) -> None:
        """Copy the parts that were not written in place."""
        if not has_tile and concat.name not in self.group.outputs:
            return
        region, full = self.space.regions[concat.name], self.plan[concat.name].full
        for index, part in enumerate(concat.inputs):
            node = self.group.by_name.get(part)
            if node is not None and self.concat_of(node) is concat:
                continue
            source = self.copy(part, self.view(part), region, full)
            target = self.concat_target(concat, self.offset(concat, index))
            self.write(f"{concat.name}_part{index}", source, target)

    def copy(self, tensor: str, view: _View, region: Region, full: bool) -> _Source:
        """Values of a tensor as they are."""
        value = lambda at, channel, _: self.read(view, tensor, at, channel)  # noqa: E731
        return _Source(tensor, region, full, "elementwise", value)

    def source(self, node: Node, region: Region, full: bool) -> _Source:
        """How the values of ``node`` come about."""
        view, tensor = self.input_view(node), node.inputs[0]

        def value(at: _At, channel: Expr, head: Expr | None) -> Expr:
            if head is None:
                head = self.read(view, tensor, at, channel)
            if node.op == "avg_pool2d":
                head = head / self.pool_divisor(node, at)
            return apply_steps(node.epilogue, head, lambda t: self.operand(t, at, channel))

        if node.op == "elementwise":
            return _Source(node.name, region, full, "elementwise", value)
        kind = "pool" if node.op.endswith("pool2d") else "conv"
        if kind == "conv" and node.groups > 1:
            kind = "depthwise" if is_depthwise(self.group, node) else "grouped"
        compute = partial(self.compute, node, view, region, full)
        return _Source(node.name, region, full, kind, value, compute)

    def input_view(self, node: Node) -> _View:
        """Where ``node`` reads its input; emits the staged copy if it needs one."""
        tensor = node.inputs[0]
        if not self.is_staged(node):
            return self.view(tensor)
        key = (tensor, node.prologue, _fill(node) if needs_padding(node, self.group) else None)
        if key in self.staged:
            return self.staged[key]
        region, full = None, False
        for other in self.readers(tensor):
            fill = _fill(other) if needs_padding(other, self.group) else None
            if not self.is_staged(other) or (tensor, other.prologue, fill) != key:
                continue
            need = input_region(other, self.space.regions[other.name])
            region = need if region is None else region.hull(need)
            sliced = passes_slice(self.group, other) and not self.plan[other.name].full
            full = full or not sliced
        assert region is not None, "regions of one tensor's readers have a hull"
        if key[2] is None:
            region = self.box(tensor, region)
        pieces, concat = (tensor,), self.group.by_name.get(tensor)
        if concat is not None and self.is_gathered(concat):
            # A slice of the joined channels is no slice of each part: gather all of them.
            pieces, full = concat.inputs, True
        name = f"{tensor}_staged{len(self.staged)}"
        view = self.tile(name, tensor, region, full)
        offset = 0
        for index, piece in enumerate(pieces):
            target = _Target(view.buffer, region, offset, key[2], len(pieces) > 1)
            source = self.stage(piece, node.prologue, region, full, offset)
            self.write(f"{name}_{index}", source, target)
            offset += self.group.shape(piece)[3]
        self.staged[key] = view
        return view

    def stage(
        self, tensor: str, prologue: tuple[Step, ...], region: Region, full: bool, offset: int
    ) -> _Source:
        """Values of ``tensor`` with a prologue applied; ``offset`` is its first channel in the
        tensor that the prologue's operands describe."""
        view = self.view(tensor)

        def value(at: _At, channel: Expr, _: Expr | None) -> Expr:
            operand = lambda t: self.operand(t, at, channel + offset)  # noqa: E731
            return apply_steps(prologue, self.read(view, tensor, at, channel), operand)

        return _Source(tensor, region, full, "load", value)

    def pool_divisor(self, node: Node, at: _At) -> Expr:
        """How many positions average pooling divides by at ``at``."""
        w, size = node.window, self.group.shape(node.inputs[0])[1:3]
        divisor: Expr = f32(1.0)
        for i, pos in enumerate(self.in_image(at)):
            before, after = w.padding[i], w.padding[2 + i]
            low, high = (-before, size[i] + after) if w.count_include_pad else (0, size[i])
            start = pos * w.strides[i] + (-before)
            taps = [start + k * w.dilation[i] for k in range(w.kernel[i])]
            if taps[0].low >= low and taps[-1].high < high:
                count: Expr = f32(float(w.kernel[i]))
            elif w.dilation[i] == 1:
                first = tirx.max(start.expr, _i64(low))
                last = tirx.min(start.expr + w.kernel[i], _i64(high))
                count = tirx.Cast("float32", tirx.max(last - first, _i64(1)))
            else:
                inside = [_all([t.expr >= low, t.expr < high]) for t in taps]
                ones = [tirx.Select(c, f32(1.0), f32(0.0)) for c in inside]
                count = tirx.max(sum(ones[1:], ones[0]), f32(1.0))
            divisor = divisor * count
        return divisor

    def compute(
        self,
        node: Node,
        view: _View,
        region: Region,
        full: bool,
        block: str,
        box: Region,
        first: int,
        extent: int,
    ) -> tuple[Any, tuple[int, ...]]:
        """Emit the reduction of a convolution or pooling over ``box``, channels
        [first, first + extent) of what the tile holds; returns accumulator and reduction."""
        shape = self.group.shape(node.name)
        held = self.held(node.name, full)
        is_conv, is_max = node.weight is not None, node.op == "max_pool2d"
        depth = packed_weight_shape(node, self.group)[3] if is_conv else 1
        reduction = tuple(self.taps(node, i) for i in range(2)) + ((depth,) if depth > 1 else ())
        columns = box.cols.extent + SLACK
        acc_shape = (*self.lead_extents, box.rows.extent, columns, extent)
        acc = IRBuilder.name(
            block, T.sblock_alloc_buffer(tuple(_i64(e) for e in acc_shape), "float32")
        )
        origin = input_region(node, region)

        def body(lead, spatial, reduce):
            held_channel = spatial[2] + first if first else spatial[2]
            channel = held_channel if full else held_channel + lead[3] * held
            rows = self.tap(node, 0, _Pos(spatial[0], 0, box.rows.extent - 1), box.rows,
                            region.rows, origin.rows, reduce[0])  # fmt: skip
            cols = self.tap(node, 1, _Pos(spatial[1], 0, columns - 1), box.cols,
                            region.cols, origin.cols, reduce[1])  # fmt: skip
            at = _At(lead, origin, rows[0], cols[0])
            source_channel = channel
            if is_conv:
                source_channel = reduce[2] if depth > 1 else _i64(0)
                if node.groups > 1:
                    per_group = shape[3] // node.groups
                    index = channel if per_group == 1 else tirx.floordiv(channel, per_group)
                    source_channel = index * depth + source_channel if depth > 1 else index
            value = self.read(view, node.inputs[0], at, source_channel)
            if is_conv:
                block_index = tirx.floordiv(channel, LANES)
                lane = tirx.floormod(channel, LANES)
                k = reduce[2] if depth > 1 else _i64(0)
                weight = self.globals[node.weight or ""]
                value = value * self.load(weight, [block_index, rows[1], cols[1], k, lane])
            valid = _all(rows[2] + cols[2])
            if valid is not None:
                value = tirx.if_then_else(valid, value, f32(0.0))
            index = [*lead, *spatial]
            with T.init():
                T.buffer_store(acc, f32(LOWEST if is_max else 0.0), index)
            old = acc[tuple(index)]
            T.buffer_store(acc, tirx.max(old, value) if is_max else old + value, index)

        self.nest(block, (box.rows.extent, columns, extent), reduction, body)
        return acc, reduction

    def taps(self, node: Node, axis: int) -> int:
        """Extent of the reduction over the window on one axis."""
        k, s = node.window.kernel[axis], node.window.strides[axis]
        phased = node.op == "conv2d_transpose" and node.window.dilation[axis] == 1
        return -(-k // s) if phased else k

    def tap(
        self,
        node: Node,
        axis: int,
        pos: _Pos,
        box: Region1D,
        region: Region1D,
        origin: Region1D,
        tap: Expr,
    ) -> tuple[_Pos, Expr, list[Expr]]:
        """For output position ``pos`` of ``box`` and reduction index ``tap``: the position in the
        input relative to ``origin``, the index into the kernel, and when the tap counts."""
        w = node.window
        k, s, d, p = w.kernel[axis], w.strides[axis], w.dilation[axis], w.padding[axis]
        count = self.taps(node, axis)
        index = _Pos(tap, 0, count - 1)
        if node.op != "conv2d_transpose":
            start = (pos + (box.base - region.base)) * s
            return (start.plus(index * d) if count > 1 else start), tap, []
        # Output o reads input (o + p - y * d) / s for the kernel rows y where that is whole.
        shifted = pos + (box.base + p)
        if d == 1:
            # Without dilation these are y = (o + p) mod s + s * j: no tap is tried in vain.
            source = (shifted // s).plus(index * -1) + -origin.base
            # truncmod of what is not negative: TVM's FlattenBuffer mixes up the offsets of two
            # floormods in one index (IterMapSimplify), and reads the wrong tap.
            phase = tirx.truncmod((pos + (box.base + p) % s).expr, _i64(s))
            kernel = phase + tap * s if s > 1 else tap
            return source, kernel, [kernel < k] if k % s else []
        numerator = shifted.plus(index * -d)
        whole = [tirx.floormod(numerator.expr, s) == 0] if s > 1 else []
        return numerator // s + -origin.base, tap, whole
