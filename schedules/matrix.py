"""Dense convolutions on CUDA as products of warp tiles: tensor cores (float16) or SIMT (float32).

The plain compute nest of a tile program leaves a thread the whole reduction; at batch 1 that is a
chain of thousands of loads. Here the warps of a block share positions, channels and the reduction
(warp_split.py), the operands of several steps are loaded together in 16-byte pieces, weights
straight from L2 in the order in which they are packed, and the parts of the result go to shared
memory, where the store nest sums them and applies the epilogue.

float16: ``mma.m16n8k16`` sums over 16 channels in any order, so a step of 32 channels gives lane q
of a row of four the 8 channels from 8 q on: one 16-byte load of activations or weights holds its
operands of two mma, and neither ldmatrix nor a particular place of the operand is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.region import Region, input_region
from optifx_tvm.graph import ConvGraph, Node
from optifx_tvm.schedules.nests import Accumulated, NestEmitter
from optifx_tvm.schedules.packing import LANES, is_matrix_packed
from optifx_tvm.schedules.positions import At, Expr, Pos, View, i64
from optifx_tvm.schedules.warp_split import HALF_DEPTH, WarpSplit, choose_split
from optifx_tvm.schedules.windows import tap_position

WARP = 32
VECTOR = 4
"""Channels of a 16-byte piece of float32."""
HALF_VECTOR = 8


def is_matrix(group: ConvGraph, node: Node, held: int, slices: int) -> bool:
    """Can ``node`` be computed here? ``held`` output channels per slice."""
    if node.op != "conv2d" or node.groups != 1 or node.weight is None:
        return False
    if group.tensors[node.weight].dtype == "float16":
        return is_matrix_packed(node, group) and (slices == 1 or held % HALF_VECTOR == 0)
    depth = group.shape(node.weight)[3]
    return depth % VECTOR == 0 and (slices == 1 or held % LANES == 0)


@dataclass(frozen=True)
class Job:
    """One warp tile and part of the reduction."""

    row_tile: Expr
    column_tile: Expr
    part: Expr
    lane: Expr
    valid: Expr | None
    """None: always."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around the product and, apart, around the stores: TVM takes all of shared memory for one
        buffer, so it puts a barrier between the two, which must not be in a condition."""
        with ExitStack() as stack:
            if self.valid is not None:
                stack.enter_context(T.If(self.valid))
                stack.enter_context(T.Then())
            yield


@dataclass(frozen=True)
class Product:
    """One convolution of one tile as a product, while it is emitted."""

    emitter: NestEmitter
    node: Node
    view: View
    region: Region
    full: bool
    warps: int
    box: Region

    @cached_property
    def half(self) -> bool:
        """float16 on tensor cores?"""
        return self.emitter.group.tensors[self.node.inputs[0]].dtype == "float16"

    @cached_property
    def depth(self) -> int:
        """Input channels."""
        assert self.node.weight is not None
        return self.emitter.group.shape(self.node.weight)[3]

    @cached_property
    def step(self) -> int:
        """Input channels of one step."""
        return HALF_DEPTH if self.half else VECTOR

    @cached_property
    def total(self) -> int:
        """Steps of the whole reduction."""
        kh, kw = self.node.window.kernel
        return kh * kw * -(-self.depth // self.step)

    @cached_property
    def channels(self) -> int:
        """Output channels of the tile."""
        return self.emitter.held(self.node.name, self.full)

    @cached_property
    def positions(self) -> int:
        """Output positions of the tile."""
        return self.box.rows.extent * self.box.cols.extent

    @cached_property
    def split(self) -> WarpSplit:
        """How the warps share it."""
        return choose_split(
            self.positions, self.channels, self.total, self.step, self.warps, self.half
        )

    def emit(self, block: str) -> Accumulated:
        """Emit the nest; returns what reads the result at (lead, [row, column, channel])."""
        emitter, split = self.emitter, self.split
        shape = (
            split.parts,
            split.row_tiles * split.rows,
            split.column_tiles * split.columns,
        )
        extents = tuple(i64(e) for e in (*emitter.lead_extents, *shape))
        result = IRBuilder.name(
            block, T.sblock_alloc_buffer(extents, "float32", scope="shared.dyn")
        )
        with T.thread_binding(i64(0), i64(self.warps * WARP), thread="threadIdx.x") as thread:
            with T.sblock(block):
                outer = zip(emitter.lead_extents, emitter.lead, strict=True)
                lead = tuple(T.axis.spatial(i64(e), v) for e, v in outer)
                thread = T.axis.spatial(i64(self.warps * WARP), thread)
                self._declare(lead, result)
                (self._half_body if self.half else self._simt_body)(lead, thread, result)

        def read(lead: tuple[Expr, ...], spatial: list[Expr]) -> Expr:
            position = spatial[0] * self.box.cols.extent + spatial[1]
            parts = [
                emitter.load(result, [*lead, i64(p), position, spatial[2]])
                for p in range(split.parts)
            ]
            return sum(parts[1:], parts[0])

        return read

    def _declare(self, lead: tuple[Expr, ...], result: Any) -> None:
        view, weight = self.view.buffer, self.emitter.globals[self.node.weight or ""]
        own = lead if self.view.region is not None else ()
        T.reads(_whole(view, own), _whole(weight, ()))
        T.writes(_whole(result, lead))

    @contextmanager
    def _jobs(self, thread: Expr) -> Iterator[Job]:
        """Loop over the jobs of a warp."""
        split, warps = self.split, self.warps
        warp, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
        turns = -(-split.jobs // warps)
        with ExitStack() as stack:
            job = warp
            if turns > 1:
                job = stack.enter_context(T.serial(i64(0), i64(turns))) * warps + warp
            valid = job < split.jobs if split.jobs % warps else None
            tile, part = tirx.floordiv(job, split.parts), tirx.floormod(job, split.parts)
            row_tile = tirx.floormod(tile, split.row_tiles)
            yield Job(row_tile, tirx.floordiv(tile, split.row_tiles), part, lane, valid)

    @contextmanager
    def _steps(self, part: Expr) -> Iterator[Callable[[Expr], Expr]]:
        """Loop over the groups of steps of a part: gives (step of the group) -> step."""
        split = self.split
        rounds = split.steps // split.unroll
        with ExitStack() as stack:
            first = part * split.steps
            if rounds > 1:
                first = first + stack.enter_context(T.serial(i64(0), i64(rounds))) * split.unroll
            yield lambda u: first + u

    @contextmanager
    def _if_valid(self, step: Expr) -> Iterator[None]:
        """Around the arithmetic of a step that may lie behind the last one."""
        with ExitStack() as stack:
            if self.split.parts * self.split.steps != self.total:
                stack.enter_context(T.If(step < self.total))
                stack.enter_context(T.Then())
            yield

    def _tap(self, step: Expr) -> tuple[Expr, Expr, Expr]:
        """(kernel row, kernel column, step within the channels) of a step."""
        if self.split.parts * self.split.steps != self.total:
            step = tirx.min(step, i64(self.total - 1))
        kw, blocks = self.node.window.kernel[1], -(-self.depth // self.step)
        tap, block = tirx.floordiv(step, blocks), tirx.floormod(step, blocks)
        return tirx.floordiv(tap, kw), tirx.floormod(tap, kw), block

    def _load_input(
        self, lead: tuple[Expr, ...], position: Expr, tap: tuple[Expr, Expr, Expr], channel: Expr
    ) -> Expr:
        """The element of the input that ``position`` reads through a tap."""
        rows, cols = self.box.rows.extent, self.box.cols.extent
        padded = self.split.row_tiles * self.split.rows
        if padded > self.positions:
            position = tirx.min(position, i64(self.positions - 1))
        row = Pos(tirx.floordiv(position, cols), 0, rows - 1)
        col = Pos(tirx.floormod(position, cols), 0, cols - 1)
        origin = input_region(self.node, self.region)
        y, _, _ = tap_position(
            self.node, 0, row, self.box.rows, self.region.rows, origin.rows, tap[0]
        )
        x, _, _ = tap_position(
            self.node, 1, col, self.box.cols, self.region.cols, origin.cols, tap[1]
        )
        at = At(lead, origin, y, x)
        buffer, index = self.emitter.place(self.view, self.node.inputs[0], at, channel)
        return buffer[tuple(index)]

    def _half_body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        tiles, columns = split.rows // 16, split.columns // 8
        acc = T.sblock_alloc_buffer((i64(tiles * columns * 4),), "float32", scope="local")
        loaded = T.sblock_alloc_buffer((i64(split.unroll * tiles * 16),), "float16", scope="local")
        a = T.sblock_alloc_buffer((i64(16),), "float16", scope="local")
        b = T.sblock_alloc_buffer((i64(split.unroll * columns * 8),), "float16", scope="local")
        weight = self.emitter.globals[self.node.weight or ""]
        blocks = int(weight.ty.shape[0])
        with self._jobs(thread) as job:
            row, quad = tirx.floordiv(job.lane, 4), tirx.floormod(job.lane, 4)
            with job.guard():
                _fill(acc, tiles * columns * 4)
                with self._steps(job.part) as step_of:
                    with T.unroll(i64(0), i64(split.unroll)) as u:
                        tap = self._tap(step_of(u))
                        with T.unroll(i64(0), i64(columns)) as j:
                            block = job.column_tile * columns + j
                            if not self.full:
                                block = block + lead[3] * (self.channels // 8)
                            block = tirx.min(block, i64(blocks - 1))
                            with T.vectorized(i64(0), i64(8)) as v:
                                value = weight[block, tap[0], tap[1], tap[2], row, quad * 8 + v]
                                T.buffer_store(b, value, [(u * columns + j) * 8 + v])
                        channel = tap[2] * HALF_DEPTH + quad * 8
                        if self.depth % HALF_DEPTH:
                            # Their weights are zero; any finite value will do.
                            channel = tirx.min(channel, i64(self.depth - 8))
                        with T.unroll(i64(0), i64(2 * tiles)) as i:
                            position = job.row_tile * split.rows + i * 8 + row
                            with T.vectorized(i64(0), i64(8)) as v:
                                value = self._load_input(lead, position, tap, channel + v)
                                T.buffer_store(loaded, value, [(u * 2 * tiles + i) * 8 + v])
                    with T.unroll(i64(0), i64(split.unroll)) as u, self._if_valid(step_of(u)):
                        with T.unroll(i64(0), i64(tiles)) as i:
                            # Registers of an mma: (row, low), (row + 8, low), (row, high), ...
                            for k in range(2):
                                for register in range(4):
                                    high, lower = divmod(register, 2)
                                    source = ((u * tiles + i) * 2 + lower) * 8 + (k * 4 + high * 2)
                                    with T.vectorized(i64(0), i64(2)) as v:
                                        T.buffer_store(
                                            a, loaded[source + v], [k * 8 + register * 2 + v]
                                        )
                            with T.unroll(i64(0), i64(columns)) as j:
                                for k in range(2):
                                    T.evaluate(
                                        _mma(
                                            a,
                                            i64(k * 8),
                                            b,
                                            (u * columns + j) * 8 + k * 4,
                                            acc,
                                            (i * columns + j) * 4,
                                        )
                                    )
            with job.guard():
                with T.unroll(i64(0), i64(2 * tiles)) as i, T.unroll(i64(0), i64(columns)) as j:
                    with T.vectorized(i64(0), i64(2)) as v:
                        index = [
                            *lead,
                            job.part,
                            job.row_tile * split.rows + i * 8 + row,
                            job.column_tile * split.columns + j * 8 + quad * 2 + v,
                        ]
                        register = (tirx.floordiv(i, 2) * columns + j) * 4 + tirx.floormod(i, 2) * 2
                        T.buffer_store(result, acc[register + v], index)

    def _simt_body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        down = WARP // split.lanes
        rows, pieces = split.rows // down, split.columns // split.lanes // VECTOR
        columns = pieces * VECTOR
        acc = T.sblock_alloc_buffer((i64(rows * columns),), "float32", scope="local")
        a = T.sblock_alloc_buffer((i64(split.unroll * rows * VECTOR),), "float32", scope="local")
        b = T.sblock_alloc_buffer((i64(split.unroll * columns * VECTOR),), "float32", scope="local")
        weight = self.emitter.globals[self.node.weight or ""]
        blocks = int(weight.ty.shape[0])

        def channel_of(column_tile: Expr, piece: Expr, lane: Expr) -> Expr:
            across = tirx.floormod(lane, split.lanes)
            return column_tile * split.columns + piece * (split.lanes * VECTOR) + across * VECTOR

        with self._jobs(thread) as job:
            row = job.row_tile * split.rows + tirx.floordiv(job.lane, split.lanes)
            with job.guard():
                _fill(acc, rows * columns)
                with self._steps(job.part) as step_of:
                    with T.unroll(i64(0), i64(split.unroll)) as u:
                        tap = self._tap(step_of(u))
                        for piece in range(pieces):
                            channel = channel_of(job.column_tile, i64(piece), job.lane)
                            if not self.full:
                                channel = channel + lead[3] * self.channels
                            block = tirx.min(tirx.floordiv(channel, LANES), i64(blocks - 1))
                            first = tirx.floormod(channel, LANES)
                            with T.unroll(i64(0), i64(VECTOR)) as k:
                                with T.vectorized(i64(0), i64(VECTOR)) as v:
                                    index = [block, tap[0], tap[1], tap[2] * VECTOR + k, first + v]
                                    to = (u * VECTOR + k) * columns + piece * VECTOR + v
                                    T.buffer_store(b, weight[tuple(index)], [to])
                        with T.unroll(i64(0), i64(rows)) as i:
                            with T.vectorized(i64(0), i64(VECTOR)) as v:
                                value = self._load_input(
                                    lead, row + i * down, tap, tap[2] * VECTOR + v
                                )
                                T.buffer_store(a, value, [(u * rows + i) * VECTOR + v])
                    with T.unroll(i64(0), i64(split.unroll)) as u, self._if_valid(step_of(u)):
                        with ExitStack() as stack:
                            k = stack.enter_context(T.unroll(i64(0), i64(VECTOR)))
                            i = stack.enter_context(T.unroll(i64(0), i64(rows)))
                            n = stack.enter_context(T.unroll(i64(0), i64(columns)))
                            old = acc[i * columns + n]
                            left = a[(u * rows + i) * VECTOR + k]
                            T.buffer_store(
                                acc,
                                old + left * b[(u * VECTOR + k) * columns + n],
                                [i * columns + n],
                            )
            with job.guard(), T.unroll(i64(0), i64(rows)) as i:
                for piece in range(pieces):
                    with T.vectorized(i64(0), i64(VECTOR)) as v:
                        channel = channel_of(job.column_tile, i64(piece), job.lane)
                        index = [*lead, job.part, row + i * down, channel + v]
                        T.buffer_store(result, acc[i * columns + piece * VECTOR + v], index)


def _whole(buffer: Any, lead: tuple[Expr, ...]) -> Any:
    """All of a buffer, or all of one tile of it."""
    rest = [slice(i64(0), extent) for extent in buffer.ty.shape[len(lead) :]]
    return buffer[(*lead, *rest)]


def _fill(buffer: Any, size: int) -> None:
    with T.unroll(i64(0), i64(size)) as i:
        T.buffer_store(buffer, tirx.FloatImm("float32", 0.0), [i])


def _mma(a: Any, a_at: Expr, b: Any, b_at: Expr, acc: Any, at: Expr) -> Expr:
    return tirx.call_intrin(
        "float32", "tirx.ptx_legacy.mma", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
        a.data, a_at, b.data, b_at, acc.data, at, False,
    )  # fmt: skip
