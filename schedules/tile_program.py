"""Tile programs: a fusion group and a tile as one schedulable TensorIR function.

Overlapped tiling is written into the program. Four outer loops (image of the batch, tile row, tile
column, channel slice) head a sequence of plain nests over (row, column, channel) of one tile: a
*load* copies an input region on chip (padding and prologue applied), a *compute* nest reduces into
an fp32 accumulator, a *store* nest applies the epilogue and writes an intermediate tile or the
output. Halo recompute is explicit: a producer's nest simply covers the region that its consumers
need. Positions of an intermediate outside its image are written with the padding value of the
operator that reads it. A concat has no nest where its producers can write their slices in place,
and no buffer where it is only read through staged copies (DenseNet).

The llvm and CUDA templates are schedules of this same function; for CUDA, dense convolutions are
emitted at the level of warps (product.py). Its parameters are the group's inputs, params (weights
packed, see packing.py) and outputs, so the signature depends on the group alone and any tile can be
swapped in later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.channels import is_depthwise, passes_slice
from optifx_tvm.analysis.placement import LOWEST
from optifx_tvm.analysis.products import is_matrix_packed, weight_depth
from optifx_tvm.analysis.region import Region, input_region
from optifx_tvm.graph import ConvGraph, Node, Step
from optifx_tvm.partition import Tile
from optifx_tvm.schedules.nests import Accumulated, Nest, NestEmitter, Source, Target
from optifx_tvm.schedules.packing import packed_index
from optifx_tvm.schedules.positions import At, Expr, Pos, View, all_of, i64
from optifx_tvm.schedules.product import WARP
from optifx_tvm.schedules.product_float import FloatProduct
from optifx_tvm.schedules.product_half import HalfProduct
from optifx_tvm.schedules.steps import apply_steps, f32
from optifx_tvm.schedules.windows import pool_divisor, tap_position, taps

SLACK = 31
"""Columns that an accumulator may compute beyond its region, so that a register block need not
divide the width: reads are clamped into the image, the surplus is never stored."""
FIRST_WAVE = 128
"""Blocks that prefetch weights: at most those that run at once on a large GPU."""
LINE_BYTES = 128
"""Of the L2 cache."""
PREFETCH_BYTES = 64 * 1024
"""Weights below this size are not worth prefetching."""


@dataclass(frozen=True)
class TileProgram:
    """The function and what a template needs to know about it."""

    func: tirx.PrimFunc
    nests: tuple[Nest, ...]
    """In the order in which they run."""
    tiles: int
    """Iterations of the four outer loops: independent tiles."""
    warps: int = 0
    """Warps of a CUDA block, which share the dense convolutions; 0: plain nests only."""
    clocks: float = 0.0
    """Estimated time of one tile's products, in clocks of an SM."""


def build_tile_program(
    group: ConvGraph, tile: Tile, name: str = "main", outer: str = "serial", warps: int = 0
) -> TileProgram:
    """The tile program of ``group`` (any names; it must have passed ``tile_space`` and
    ``channel_plan`` for ``tile``, else their errors are raised).

    ``outer`` says how the tiles run: "serial", "parallel" (llvm) or "blockIdx.x" (CUDA). It is
    given here because Schedule.parallel and Schedule.bind refuse a loop in which a buffer has
    several writers, as the slices of a concat do. With ``warps`` > 0 dense convolutions are emitted
    as products shared by the warps of a CUDA block (product.py).
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        emitter = _Emitter(group, tile, warps)
        emitter.declare()
        tiles = math.prod(emitter.lead_extents)
        with _outer_loop(outer, tiles) as g:
            emitter.lead = unravel(g, emitter.lead_extents)
            if warps:
                emitter.prefetch_weights(g, tiles)
            for node in group.nodes:
                emitter.emit(node)
    return TileProgram(builder.get(), tuple(emitter.nests), tiles, warps, emitter.clocks)


def _outer_loop(kind: str, extent: int) -> Any:
    if kind == "blockIdx.x":
        return T.thread_binding(i64(0), i64(extent), thread=kind)
    return {"serial": T.serial, "parallel": T.parallel}[kind](i64(0), i64(extent))


def unravel(index: Expr, extents: tuple[int, ...]) -> tuple[Expr, ...]:
    """The multi-index of a flat index (last axis fastest)."""
    found = []
    for i, extent in enumerate(extents):
        rest = math.prod(extents[i + 1 :])
        value = index if rest == 1 else tirx.floordiv(index, rest)
        found.append(value if i == 0 else tirx.floormod(value, extent))
    return tuple(found)


class _Emitter(NestEmitter):
    """Emits the nests of one group, operator by operator."""

    def prefetch_weights(self, block: Expr, blocks: int) -> None:
        """Ask for the weights of products to be brought from DRAM into L2, a share by each of the
        first blocks: a warp loads them only one round ahead, which hides the latency of L2."""
        threads, first = self.warps * WARP, min(blocks, FIRST_WAVE)
        for node in self.group.nodes:
            if not self.as_product(node):
                continue
            weight = self.globals[node.weight or ""]
            shape = tuple(int(e) for e in weight.ty.shape)
            step = LINE_BYTES // np.dtype(str(weight.ty.dtype)).itemsize
            lines = -(-math.prod(shape) // step)
            if lines * LINE_BYTES < PREFETCH_BYTES:
                continue
            turns = -(-lines // (first * threads))
            with (
                T.thread_binding(i64(0), i64(threads), thread="threadIdx.x") as thread,
                T.sblock(f"{node.name}_prefetch"),
            ):
                own = T.axis.spatial(i64(blocks), block)
                lane = T.axis.spatial(i64(threads), thread)
                T.reads()
                T.writes()
                with T.serial(i64(0), i64(turns)) as turn:
                    line = (turn * first + own) * threads + lane
                    with T.If(tirx.all(own < first, line < lines)), T.Then():
                        element = weight[unravel(line * step, shape)]
                        T.evaluate(T.ptx.prefetch.global_.L2(tirx.address_of(element)))

    def emit(self, node: Node) -> None:
        """Emit everything that computes ``node``."""
        region = self.space.regions[node.name]
        full = self.plan[node.name].full
        is_output, has_tile = node.name in self.group.outputs, self.has_tile(node)
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
                self.write(node.name, source, Target(view.buffer, view.region, fill=fill))
            else:
                self.write(node.name, source, Target(self.globals[node.name], None))
        if is_output and has_tile:
            owned = self.space.owned[node.name]
            copy = self.copy(node.name, self.tiles[node.name], owned, full)
            self.write(f"{node.name}_copy", copy, Target(self.globals[node.name], None))

    def concat_target(self, concat: Node, offset: int) -> Target:
        """Where the part of ``concat`` that starts at channel ``offset`` goes."""
        if not self.readers(concat.name):
            return Target(self.globals[concat.name], None, offset, epilogue=concat.epilogue)
        view = self.own_tile(concat)
        fill = self.tile_fill(concat.name)
        return Target(view.buffer, view.region, offset, fill, True, concat.epilogue)

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

    def copy(self, tensor: str, view: View, region: Region, full: bool) -> Source:
        """Values of a tensor as they are."""

        def value(at: At, channel: Expr, _: Expr | None) -> Expr:
            return self.read(view, tensor, at, channel)

        return Source(tensor, region, full, "elementwise", value)

    def source(self, node: Node, region: Region, full: bool) -> Source:
        """How the values of ``node`` come about."""
        view, tensor = self.input_view(node), node.inputs[0]

        def value(at: At, channel: Expr, head: Expr | None) -> Expr:
            if head is None:
                head = self.read(view, tensor, at, channel)
            if node.op == "avg_pool2d":
                size = self.group.shape(tensor)[1:3]
                head = head / pool_divisor(node, self.in_image(at), size)
            return apply_steps(node.epilogue, head, partial(self.operand, at=at, channel=channel))

        if node.op == "elementwise":
            return Source(node.name, region, full, "elementwise", value)
        kind = "pool" if node.op.endswith("pool2d") else "conv"
        if kind == "conv" and node.groups > 1:
            kind = "depthwise" if is_depthwise(self.group, node) else "grouped"
        compute = partial(self.compute, node, view, region, full)
        if self.as_product(node):
            kind_of = HalfProduct if is_matrix_packed(node, self.group) else FloatProduct
            product = partial(kind_of, self, node, view, region, full, self.warps)
            return Source(node.name, region, full, kind, value, product=product)
        return Source(node.name, region, full, kind, value, compute)

    def input_view(self, node: Node) -> View:
        """Where ``node`` reads its input; emits the staged copy if it needs one."""
        tensor = node.inputs[0]
        if not self.is_staged(node):
            return self.view(tensor)
        key = self.stage_key(node)
        if key in self.staged:
            return self.staged[key]
        region, full, more = None, False, 0
        for other in self.readers(tensor):
            if not self.is_staged(other) or self.stage_key(other) != key:
                continue
            need = input_region(other, self.space.regions[other.name])
            region = need if region is None else region.hull(need)
            sliced = passes_slice(self.group, other) and not self.plan[other.name].full
            full = full or not sliced
            more = max(more, self.padding_depth(other))
        assert region is not None, "regions of one tensor's readers have a hull"
        if key[2] is None:
            region = self.box(tensor, region)
        pieces, concat = (tensor,), self.group.by_name.get(tensor)
        if concat is not None and self.is_gathered(concat):
            # A slice of the joined channels is no slice of each part: gather all of them.
            pieces, full = concat.inputs, True
        name = f"{tensor}_staged{len(self.staged)}"
        view = self.tile(name, tensor, region, full, more)
        offset = 0
        for index, piece in enumerate(pieces):
            target = Target(view.buffer, region, offset, key[2], len(pieces) > 1 or more > 0)
            source = self.stage(piece, node.prologue, region, full, offset)
            self.write(f"{name}_{index}", source, target)
            offset += self.group.shape(piece)[3]
        if more:
            self.pad_channels(name, view, more)
        self.staged[key] = view
        return view

    def stage(
        self, tensor: str, prologue: tuple[Step, ...], region: Region, full: bool, offset: int
    ) -> Source:
        """Values of ``tensor`` with a prologue applied; ``offset`` is its first channel in the
        tensor that the prologue's operands describe."""
        view = self.view(tensor)

        def value(at: At, channel: Expr, _: Expr | None) -> Expr:
            read = partial(self.operand, at=at, channel=channel + offset)
            return apply_steps(prologue, self.read(view, tensor, at, channel), read)

        return Source(tensor, region, full, "load", value)

    def compute(
        self,
        node: Node,
        view: View,
        region: Region,
        full: bool,
        block: str,
        box: Region,
        first: int,
        extent: int,
    ) -> tuple[Accumulated, tuple[int, ...]]:
        """Emit the reduction of a convolution or pooling over ``box``, channels
        [first, first + extent) of what the tile holds; returns what reads the result, and the
        extents of the reduction."""
        shape = self.group.shape(node.name)
        held = self.held(node.name, full)
        is_conv, is_max = node.weight is not None, node.op == "max_pool2d"
        depth = weight_depth(node, self.group) if is_conv else 1
        reduction = tuple(taps(node, i) for i in range(2)) + ((depth,) if depth > 1 else ())
        columns = box.cols.extent + SLACK
        acc_shape = (*self.lead_extents, box.rows.extent, columns, extent)
        acc = IRBuilder.name(
            block, T.sblock_alloc_buffer(tuple(i64(e) for e in acc_shape), "float32")
        )
        origin = input_region(node, region)

        def body(lead, spatial, reduce):
            held_channel = spatial[2] + first if first else spatial[2]
            channel = held_channel if full else held_channel + lead[3] * held
            rows = tap_position(node, 0, Pos(spatial[0], 0, box.rows.extent - 1), box.rows,
                            region.rows, origin.rows, reduce[0])  # fmt: skip
            cols = tap_position(node, 1, Pos(spatial[1], 0, columns - 1), box.cols,
                            region.cols, origin.cols, reduce[1])  # fmt: skip
            at = At(lead, origin, rows[0], cols[0])
            source_channel = channel
            if is_conv:
                source_channel = reduce[2] if depth > 1 else i64(0)
                if node.groups > 1:
                    per_group = shape[3] // node.groups
                    index = channel if per_group == 1 else tirx.floordiv(channel, per_group)
                    source_channel = index * depth + source_channel if depth > 1 else index
            value = self.read(view, node.inputs[0], at, source_channel)
            if not self.is_staged(node):
                operand = partial(self.operand, at=at, channel=source_channel)
                value = apply_steps(node.prologue, value, operand)
            if is_conv:
                k = reduce[2] if depth > 1 else i64(0)
                weight = self.globals[node.weight or ""]
                index = packed_index(node, self.group, channel, [rows[1], cols[1]], k)
                value = value * self.load(weight, index)
            valid = all_of(rows[2] + cols[2])
            if valid is not None:
                value = tirx.if_then_else(valid, value, f32(0.0))
            index = [*lead, *spatial]
            with T.init():
                T.buffer_store(acc, f32(LOWEST if is_max else 0.0), index)
            old = acc[tuple(index)]
            T.buffer_store(acc, tirx.max(old, value) if is_max else old + value, index)

        self.nest(block, (box.rows.extent, columns, extent), reduction, body)
        return lambda lead, at: self.load(acc, [*lead, *at]), reduction
