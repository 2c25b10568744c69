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

from optifx_tvm.analysis.products import (
    HALF_STEP,
    LANES,
    NARROW,
    ProductShape,
    is_narrow,
    is_phased,
    lanes_of,
    padded_depth,
    product_shape,
)
from optifx_tvm.analysis.region import Region, input_region
from optifx_tvm.analysis.warp_split import WarpSplit, choose_split
from optifx_tvm.graph import Node, Step
from optifx_tvm.schedules.nests import Accumulated, NestEmitter
from optifx_tvm.schedules.positions import At, Expr, Pos, View, i64
from optifx_tvm.schedules.steps import apply_steps
from optifx_tvm.schedules.windows import tap_position

WARP = 32
VECTOR = 4
"""Channels of a 16-byte piece of float32."""
HALF_VECTOR = 8


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
    def shape(self) -> ProductShape:
        """Its size."""
        extents = self.box.rows.extent, self.box.cols.extent
        held = self.emitter.held(self.node.name, self.full)
        return product_shape(self.node, self.emitter.group, extents, held, self._in_global)

    @cached_property
    def narrow(self) -> bool:
        """Is a step a part of a kernel row?"""
        return is_narrow(self.node, self.emitter.group)

    @cached_property
    def phases(self) -> tuple[int, int]:
        """Transposed convolution: output positions for each input position."""
        return self.node.window.kernel if is_phased(self.node) else (1, 1)

    @cached_property
    def padded(self) -> int:
        """Input channels that the operand holds."""
        return padded_depth(self.node, self.emitter.group)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Positions of the tile by phases."""
        tall, wide = self.phases
        return -(-self.box.rows.extent // tall), -(-self.box.cols.extent // wide)

    @property
    def clocks(self) -> float:
        """Estimate of its time in clocks of an SM."""
        return self.split.clocks

    @cached_property
    def split(self) -> WarpSplit:
        """How the warps share it."""
        return choose_split(self.shape, self.warps)

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
        threads = i64(self.warps * WARP)
        with T.thread_binding(i64(0), threads, thread="threadIdx.x") as thread, T.sblock(block):
            outer = zip(emitter.lead_extents, emitter.lead, strict=True)
            lead = tuple(T.axis.spatial(i64(e), v) for e, v in outer)
            thread = T.axis.spatial(threads, thread)
            self._declare(lead, result)
            (self._half_body if self.shape.half else self._simt_body)(lead, thread, result)

        def read(lead: tuple[Expr, ...], spatial: list[Expr]) -> Expr:
            row, col, channel = spatial
            tall, wide = self.phases
            if tall * wide > 1:
                tap = tirx.floormod(row, tall) * wide + tirx.floormod(col, wide)
                channel = channel + tap * (self.shape.columns // (tall * wide))
                row, col = tirx.floordiv(row, tall), tirx.floordiv(col, wide)
            position = row * self.grid[1] + col
            parts = [
                emitter.load(result, [*lead, i64(p), position, channel]) for p in range(split.parts)
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

    @cached_property
    def _prologue(self) -> tuple[Step, ...]:
        """What is still to be applied to the input: here, not when it is loaded ahead."""
        return () if self.emitter.is_staged(self.node) else self.node.prologue

    def _operand(self, value: Expr) -> Expr:
        """An element of the input with the prologue applied."""
        if not self._prologue:
            return value
        if not self.shape.half:
            return apply_steps(self._prologue, value, _no_operand)
        value = apply_steps(self._prologue, tirx.Cast("float32", value), _no_operand)
        return tirx.Cast("float16", value)

    def _pair(self) -> Any:
        """Loop over two elements: arithmetic on vectors of two is nothing that TVM can do."""
        return (T.unroll if self._prologue else T.vectorized)(i64(0), i64(2))

    @property
    def _in_global(self) -> bool:
        """Is the input in global memory, so that it is worth loading ahead as the weights are?"""
        return self.view.region is None

    def _pipeline(
        self, part: Expr, load: Callable[[int, Expr], None], compute: Callable[[int, Expr], None]
    ) -> None:
        """Emit the rounds of a part, a round is ``unroll`` steps: ``load(b, step)`` fills operand
        buffer b (0 or 1) for the round that starts at a step while ``compute`` uses the other."""
        split = self.split
        rounds = split.steps // split.unroll
        first = part * split.steps
        load(0, first)
        if rounds > 1:
            with T.serial(i64(0), i64(rounds // 2)) as pair:
                for b in range(2):
                    step = first + (pair * 2 + b) * split.unroll
                    load(1 - b, step + split.unroll)
                    compute(b, step)
        if rounds % 2:
            compute(0, first + (rounds - 1) * split.unroll)

    @contextmanager
    def _if_valid(self, step: Expr) -> Iterator[None]:
        """Around the arithmetic of a step that may lie behind the last one."""
        with ExitStack() as stack:
            if self.split.parts * self.split.steps != self.shape.steps:
                stack.enter_context(T.If(step < self.shape.steps))
                stack.enter_context(T.Then())
            yield

    def _tap(self, step: Expr) -> tuple[Expr, Expr, Expr]:
        """(kernel row, kernel column, step within the channels) of a step, the last one's of those
        that lie behind it (loaded ahead, never used)."""
        step = tirx.min(step, i64(self.shape.steps - 1))
        kw = 1 if self.narrow else self.node.window.kernel[1]
        blocks = self.shape.blocks
        tap, block = tirx.floordiv(step, blocks), tirx.floormod(step, blocks)
        return tirx.floordiv(tap, kw), tirx.floormod(tap, kw), block

    def _load_input(
        self, lead: tuple[Expr, ...], position: Expr, tap: tuple[Expr, Expr, Expr], channel: Expr
    ) -> Expr:
        """The element of the input that ``position`` reads through a tap."""
        rows, cols = self.grid
        padded = self.split.row_tiles * self.split.rows
        if padded > self.shape.rows:
            position = tirx.min(position, i64(self.shape.rows - 1))
        row = Pos(tirx.floordiv(position, cols), 0, rows - 1)
        col = Pos(tirx.floormod(position, cols), 0, cols - 1)
        origin = input_region(self.node, self.region)
        if self.phases != (1, 1):
            return self._load(At(lead, origin, row, col), channel)
        y, _, _ = tap_position(
            self.node, 0, row, self.box.rows, self.region.rows, origin.rows, tap[0]
        )
        x, _, _ = tap_position(
            self.node, 1, col, self.box.cols, self.region.cols, origin.cols, tap[1]
        )
        if self.narrow:
            # ``channel`` runs on over the columns of the window.
            last = self.shape.blocks * (HALF_STEP // NARROW) - 1
            x = x.plus(Pos(tirx.floordiv(channel, NARROW), 0, last))
            channel = tirx.floormod(channel, NARROW)
        return self._load(At(lead, origin, y, x), channel)

    def _load(self, at: At, channel: Expr) -> Expr:
        buffer, index = self.emitter.place(self.view, self.node.inputs[0], at, channel)
        return buffer[tuple(index)]

    def _phase(self, block: Expr, lead: tuple[Expr, ...]) -> tuple[tuple[Expr, Expr], Expr]:
        """The tap and the block of output channels of a block of columns."""
        tall, wide = self.phases
        count = self.shape.columns // lanes_of(self.node, self.emitter.group) // (tall * wide)
        phase = tirx.min(tirx.floordiv(block, count), i64(tall * wide - 1))
        block = tirx.floormod(block, count)
        if not self.full:
            block = block + lead[3] * count
        return (tirx.floordiv(phase, wide), tirx.floormod(phase, wide)), block

    def _half_body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        tiles, columns = split.rows // 16, split.columns // 8
        acc = _registers(tiles * columns * 4, "float32")
        ahead = 2 if self._in_global else 1
        loaded = _registers(ahead * split.unroll * tiles * 16, "float16")
        a = _registers(16, "float16")
        b = _registers(2 * split.unroll * columns * 8, "float16")
        weight = self.emitter.globals[self.node.weight or ""]
        blocks = int(weight.ty.shape[0])

        def load_weights(buffer: int, step: Expr, job: Job) -> None:
            quad, row = tirx.floormod(job.lane, 4), tirx.floordiv(job.lane, 4)
            with T.unroll(i64(0), i64(split.unroll)) as u:
                tap = self._tap(step + u)
                with T.unroll(i64(0), i64(columns)) as j:
                    block, where = job.column_tile * columns + j, tap[:2]
                    if self.phases != (1, 1):
                        where, block = self._phase(block, lead)
                    elif not self.full:
                        block = block + lead[3] * (self.shape.columns // 8)
                    block = tirx.min(block, i64(blocks - 1))
                    with T.vectorized(i64(0), i64(8)) as v:
                        index = (block, *where, tap[2], row, quad * 8 + v)
                        to = ((buffer * split.unroll + u) * columns + j) * 8 + v
                        T.buffer_store(b, weight[index], [to])

        def load_input(buffer: int, step: Expr, job: Job) -> None:
            quad, row = tirx.floormod(job.lane, 4), tirx.floordiv(job.lane, 4)
            piece = NARROW if self.narrow else 8
            with T.unroll(i64(0), i64(split.unroll)) as u:
                tap = self._tap(step + u)
                channel = tap[2] * HALF_STEP + quad * 8
                if self.padded % HALF_STEP and not self.narrow:
                    # Their weights are zero; any finite value will do.
                    channel = tirx.min(channel, i64(self.padded - 8))
                with T.unroll(i64(0), i64(2 * tiles)) as i:
                    position = job.row_tile * split.rows + i * 8 + row
                    for first in range(0, 8, piece):
                        with T.vectorized(i64(0), i64(piece)) as v:
                            value = self._load_input(lead, position, tap, channel + first + v)
                            to = ((buffer * split.unroll + u) * 2 * tiles + i) * 8 + first + v
                            T.buffer_store(loaded, value, [to])

        def multiply(buffer: int, step: Expr) -> None:
            held = buffer if self._in_global else 0
            with (
                T.unroll(i64(0), i64(split.unroll)) as u,
                self._if_valid(step + u),
                T.unroll(i64(0), i64(tiles)) as i,
            ):
                # Registers of an mma: (row, low), (row + 8, low), (row, high), (row + 8, high).
                for k in range(2):
                    for register in range(4):
                        high, lower = divmod(register, 2)
                        source = ((held * split.unroll + u) * tiles + i) * 2 + lower
                        with self._pair() as v:
                            value = loaded[source * 8 + (k * 4 + high * 2) + v]
                            value = self._operand(value)
                            T.buffer_store(a, value, [k * 8 + register * 2 + v])
                with T.unroll(i64(0), i64(columns)) as j:
                    for k in range(2):
                        at = ((buffer * split.unroll + u) * columns + j) * 8 + k * 4
                        to = (i * columns + j) * 4
                        T.evaluate(_mma(a, i64(k * 8), b, at, acc, to))

        with self._jobs(thread) as job:
            with job.guard():
                _fill(acc, tiles * columns * 4)
                self._rounds(job, load_weights, load_input, multiply)
            quad, row = tirx.floormod(job.lane, 4), tirx.floordiv(job.lane, 4)
            with (
                job.guard(),
                T.unroll(i64(0), i64(2 * tiles)) as i,
                T.unroll(i64(0), i64(columns)) as j,
                T.vectorized(i64(0), i64(2)) as v,
            ):
                index = [
                    *lead,
                    job.part,
                    job.row_tile * split.rows + i * 8 + row,
                    job.column_tile * split.columns + j * 8 + quad * 2 + v,
                ]
                register = (tirx.floordiv(i, 2) * columns + j) * 4 + tirx.floormod(i, 2) * 2
                T.buffer_store(result, acc[register + v], index)

    def _rounds(
        self,
        job: Job,
        load_weights: Callable[[int, Expr, Job], None],
        load_input: Callable[[int, Expr, Job], None],
        multiply: Callable[[int, Expr], None],
    ) -> None:
        """Emit the pipeline of one job; operands in shared memory are loaded when needed."""

        def load(buffer: int, step: Expr) -> None:
            load_weights(buffer, step, job)
            if self._in_global:
                load_input(buffer, step, job)

        def compute(buffer: int, step: Expr) -> None:
            if not self._in_global:
                load_input(0, step, job)
            multiply(buffer, step)

        self._pipeline(job.part, load, compute)

    def _simt_body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        down = WARP // split.lanes
        rows, pieces = split.rows // down, split.columns // split.lanes // VECTOR
        columns = pieces * VECTOR
        acc = _registers(rows * columns, "float32")
        ahead = 2 if self._in_global else 1
        a = _registers(ahead * split.unroll * rows * VECTOR, "float32")
        b = _registers(2 * split.unroll * columns * VECTOR, "float32")
        weight = self.emitter.globals[self.node.weight or ""]
        blocks, stored = int(weight.ty.shape[0]), int(weight.ty.shape[3])

        def channel_of(job: Job, piece: int) -> Expr:
            across = tirx.floormod(job.lane, split.lanes)
            first = job.column_tile * split.columns + piece * (split.lanes * VECTOR)
            return first + across * VECTOR

        def row_of(job: Job) -> Expr:
            return job.row_tile * split.rows + tirx.floordiv(job.lane, split.lanes)

        def load_weights(buffer: int, step: Expr, job: Job) -> None:
            with T.unroll(i64(0), i64(split.unroll)) as u:
                tap = self._tap(step + u)
                for piece in range(pieces):
                    channel, where = channel_of(job, piece), tap[:2]
                    if not self.full and self.phases == (1, 1):
                        channel = channel + lead[3] * self.shape.columns
                    block, first = tirx.floordiv(channel, LANES), tirx.floormod(channel, LANES)
                    if self.phases != (1, 1):
                        where, block = self._phase(block, lead)
                    block = tirx.min(block, i64(blocks - 1))
                    with (
                        T.unroll(i64(0), i64(VECTOR)) as k,
                        T.vectorized(i64(0), i64(VECTOR)) as v,
                    ):
                        depth = tap[2] * VECTOR + k
                        if self.padded > stored:
                            depth = tirx.min(depth, i64(stored - 1))
                        to = ((buffer * split.unroll + u) * VECTOR + k) * columns + piece * VECTOR
                        index = (block, *where, depth, first + v)
                        T.buffer_store(b, weight[index], [to + v])

        def load_input(buffer: int, step: Expr, job: Job) -> None:
            with T.unroll(i64(0), i64(split.unroll)) as u:
                tap = self._tap(step + u)
                with (
                    T.unroll(i64(0), i64(rows)) as i,
                    T.vectorized(i64(0), i64(VECTOR)) as v,
                ):
                    position, channel = row_of(job) + i * down, tap[2] * VECTOR + v
                    value = self._load_input(lead, position, tap, channel)
                    to = ((buffer * split.unroll + u) * rows + i) * VECTOR + v
                    T.buffer_store(a, value, [to])

        def multiply(buffer: int, step: Expr) -> None:
            held = buffer if self._in_global else 0
            with (
                T.unroll(i64(0), i64(split.unroll)) as u,
                self._if_valid(step + u),
                T.unroll(i64(0), i64(VECTOR)) as k,
                T.unroll(i64(0), i64(rows)) as i,
                T.unroll(i64(0), i64(columns)) as n,
            ):
                left = self._operand(a[((held * split.unroll + u) * rows + i) * VECTOR + k])
                right = b[((buffer * split.unroll + u) * VECTOR + k) * columns + n]
                at = i * columns + n
                T.buffer_store(acc, acc[at] + left * right, [at])

        with self._jobs(thread) as job:
            with job.guard():
                _fill(acc, rows * columns)
                self._rounds(job, load_weights, load_input, multiply)
            with job.guard(), T.unroll(i64(0), i64(rows)) as i:
                for piece in range(pieces):
                    with T.vectorized(i64(0), i64(VECTOR)) as v:
                        index = [
                            *lead,
                            job.part,
                            row_of(job) + i * down,
                            channel_of(job, piece) + v,
                        ]
                        T.buffer_store(result, acc[i * columns + piece * VECTOR + v], index)


def _no_operand(tensor: str) -> Expr:
    raise AssertionError(f"a prologue that reads {tensor} is applied to a staged copy")


def _registers(size: int, dtype: str) -> Any:
    """Registers of a thread."""
    return T.sblock_alloc_buffer((i64(size),), dtype, scope="local")


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
