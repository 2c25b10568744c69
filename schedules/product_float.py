"""float32 products on the ordinary cores.

The lanes of a warp are a grid over the positions and channels of its tile; a lane has a register
tile of positions x channels (in pieces of four) and takes four input channels a step.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.products import FLOAT_STEP, LANES
from optifx_tvm.schedules.positions import Expr, i64
from optifx_tvm.schedules.product import WARP, Job, Product, fill, registers

VECTOR = FLOAT_STEP
"""Channels of a 16-byte piece."""


class FloatProduct(Product):
    """See the module."""

    def body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        down = WARP // split.lanes
        rows, pieces = split.rows // down, split.columns // split.lanes // VECTOR
        columns = pieces * VECTOR
        acc = registers(rows * columns, "float32")
        ahead = 2 if self.in_global else 1
        a = registers(ahead * split.unroll * rows * VECTOR, "float32")
        b = registers(2 * split.unroll * columns * VECTOR, "float32")
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
                tap = self.tap(step + u)
                for piece in range(pieces):
                    channel, where = channel_of(job, piece), tap[:2]
                    if not self.full and self.phases == (1, 1):
                        channel = channel + lead[3] * self.shape.columns
                    block, first = tirx.floordiv(channel, LANES), tirx.floormod(channel, LANES)
                    if self.phases != (1, 1):
                        where, block = self.weight_block(block, lead)
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
                tap = self.tap(step + u)
                with (
                    T.unroll(i64(0), i64(rows)) as i,
                    T.vectorized(i64(0), i64(VECTOR)) as v,
                ):
                    position, channel = row_of(job) + i * down, tap[2] * VECTOR + v
                    value = self.load_input_element(lead, position, tap, channel)
                    to = ((buffer * split.unroll + u) * rows + i) * VECTOR + v
                    T.buffer_store(a, value, [to])

        def multiply(buffer: int, step: Expr) -> None:
            held = buffer if self.in_global else 0
            with (
                T.unroll(i64(0), i64(split.unroll)) as u,
                self.if_valid(step + u),
                T.unroll(i64(0), i64(VECTOR)) as k,
                T.unroll(i64(0), i64(rows)) as i,
                T.unroll(i64(0), i64(columns)) as n,
            ):
                left = self.operand(a[((held * split.unroll + u) * rows + i) * VECTOR + k])
                right = b[((buffer * split.unroll + u) * VECTOR + k) * columns + n]
                at = i * columns + n
                T.buffer_store(acc, acc[at] + left * right, [at])

        with self.jobs(thread) as job:
            with job.guard():
                fill(acc, rows * columns)
                self.rounds(job, load_weights, load_input, multiply)
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
