"""Dense convolutions on CUDA as products of warp tiles.

The plain compute nest of a tile program leaves a thread the whole reduction; at batch 1 that is a
chain of thousands of loads. Here the warps of a block share positions, channels and the reduction
(warp_split.py), the operands of several steps are loaded together in 16-byte pieces, weights
straight from L2 in the order in which they are packed, and the parts of the result go to shared
memory, where the store nest sums them and applies the epilogue. What is common to the two kinds is
here; see product_half.py and product_float.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.products import (
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
class Product(ABC):
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
        return product_shape(self.node, self.emitter.group, extents, held, self.in_global)

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
            self.body(lead, thread, result)

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
    def jobs(self, thread: Expr) -> Iterator[Job]:
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

    def operand(self, value: Expr) -> Expr:
        """An element of the input with the prologue applied."""
        if not self._prologue:
            return value
        if not self.shape.half:
            return apply_steps(self._prologue, value, _no_operand)
        value = apply_steps(self._prologue, tirx.Cast("float32", value), _no_operand)
        return tirx.Cast("float16", value)

    def pair(self) -> Any:
        """Loop over two elements: arithmetic on vectors of two is nothing that TVM can do."""
        return (T.unroll if self._prologue else T.vectorized)(i64(0), i64(2))

    @property
    def in_global(self) -> bool:
        """Is the input in global memory, so that it is worth loading ahead as the weights are?"""
        return self.view.region is None

    @contextmanager
    def if_valid(self, step: Expr) -> Iterator[None]:
        """Around the arithmetic of a step that may lie behind the last one."""
        with ExitStack() as stack:
            if self.split.parts * self.split.steps != self.shape.steps:
                stack.enter_context(T.If(step < self.shape.steps))
                stack.enter_context(T.Then())
            yield

    def tap(self, step: Expr) -> tuple[Expr, Expr, Expr]:
        """(kernel row, kernel column, step within the channels) of a step, the last one's of those
        that lie behind it (loaded ahead, never used)."""
        step = tirx.min(step, i64(self.shape.steps - 1))
        kw = 1 if self.narrow else self.node.window.kernel[1]
        blocks = self.shape.blocks
        tap, block = tirx.floordiv(step, blocks), tirx.floormod(step, blocks)
        return tirx.floordiv(tap, kw), tirx.floormod(tap, kw), block

    def load_input_element(
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
            last = self.shape.blocks * (self.shape.depth // NARROW) - 1
            x = x.plus(Pos(tirx.floordiv(channel, NARROW), 0, last))
            channel = tirx.floormod(channel, NARROW)
        return self._load(At(lead, origin, y, x), channel)

    def _load(self, at: At, channel: Expr) -> Expr:
        buffer, index = self.emitter.place(self.view, self.node.inputs[0], at, channel)
        return buffer[tuple(index)]

    def weight_block(self, block: Expr, lead: tuple[Expr, ...]) -> tuple[tuple[Expr, Expr], Expr]:
        """The tap and the block of output channels of a block of columns."""
        tall, wide = self.phases
        count = self.shape.columns // lanes_of(self.node, self.emitter.group) // (tall * wide)
        phase = tirx.min(tirx.floordiv(block, count), i64(tall * wide - 1))
        block = tirx.floormod(block, count)
        if not self.full:
            block = block + lead[3] * count
        return (tirx.floordiv(phase, wide), tirx.floormod(phase, wide)), block

    def rounds(
        self,
        job: Job,
        load_weights: Callable[[int, Expr, Job], None],
        load_input: Callable[[int, Expr, Job], None],
        multiply: Callable[[int, Expr], None],
    ) -> None:
        """Emit the rounds of one job; a round is ``unroll`` steps. What comes from global memory is
        loaded into operand buffer 0 or 1 for the next round while the other is used, what lies in
        shared memory when it is needed."""
        split = self.split
        count = split.steps // split.unroll
        start = job.part * split.steps

        def load(buffer: int, step: Expr) -> None:
            load_weights(buffer, step, job)
            if self.in_global:
                load_input(buffer, step, job)

        def compute(buffer: int, step: Expr) -> None:
            if not self.in_global:
                load_input(0, step, job)
            multiply(buffer, step)

        load(0, start)
        if count > 1:
            with T.serial(i64(0), i64(count // 2)) as pair:
                for b in range(2):
                    step = start + (pair * 2 + b) * split.unroll
                    load(1 - b, step + split.unroll)
                    compute(b, step)
        if count % 2:
            compute(0, start + (count - 1) * split.unroll)

    @abstractmethod
    def body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        """Emit what a thread does; ``result`` takes the parts."""


def _whole(buffer: Any, lead: tuple[Expr, ...]) -> Any:
    """All of a buffer, or all of one tile of it."""
    rest = [slice(i64(0), extent) for extent in buffer.ty.shape[len(lead) :]]
    return buffer[(*lead, *rest)]


def fill(buffer: Any, size: int) -> None:
    """Set the accumulators to zero."""
    with T.unroll(i64(0), i64(size)) as i:
        T.buffer_store(buffer, tirx.FloatImm("float32", 0.0), [i])


def registers(size: int, dtype: str) -> Any:
    """Registers of a thread."""
    return T.sblock_alloc_buffer((i64(size),), dtype, scope="local")


def _no_operand(tensor: str) -> Expr:
    raise AssertionError(f"a prologue that reads {tensor} is applied to a staged copy")
