"""float16 products on tensor cores, with float32 accumulators.

``mma.m16n8k16`` sums over 16 channels in any order, so a step of 32 channels gives lane q of a row
of four the 8 channels from 8 q on: one 16-byte load of activations or weights holds its operands of
two mma, and neither ldmatrix nor a particular place of the operand is needed.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from optifx_tvm.analysis.products import HALF_STEP, NARROW
from optifx_tvm.schedules.positions import Expr, i64
from optifx_tvm.schedules.product import Job, Product, fill, registers


class HalfProduct(Product):
    """See the module."""

    def body(self, lead: tuple[Expr, ...], thread: Expr, result: Any) -> None:
        split = self.split
        tiles, columns = split.rows // 16, split.columns // 8
        acc = registers(tiles * columns * 4, "float32")
        ahead = 2 if self.in_global else 1
        loaded = registers(ahead * split.unroll * tiles * 16, "float16")
        a = registers(16, "float16")
        b = registers(2 * split.unroll * columns * 8, "float16")
        weight = self.emitter.globals[self.node.weight or ""]
        blocks = int(weight.ty.shape[0])

        def load_weights(buffer: int, step: Expr, job: Job) -> None:
            quad, row = tirx.floormod(job.lane, 4), tirx.floordiv(job.lane, 4)
            with T.unroll(i64(0), i64(split.unroll)) as u:
                tap = self.tap(step + u)
                with T.unroll(i64(0), i64(columns)) as j:
                    block, where = job.column_tile * columns + j, tap[:2]
                    if self.phases != (1, 1):
                        where, block = self.weight_block(block, lead)
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
                tap = self.tap(step + u)
                channel = tap[2] * HALF_STEP + quad * 8
                if self.padded % HALF_STEP and not self.narrow:
                    # Their weights are zero; any finite value will do.
                    channel = tirx.min(channel, i64(self.padded - 8))
                with T.unroll(i64(0), i64(2 * tiles)) as i:
                    position = job.row_tile * split.rows + i * 8 + row
                    for first in range(0, 8, piece):
                        with T.vectorized(i64(0), i64(piece)) as v:
                            value = self.load_input_element(
                                lead, position, tap, channel + first + v
                            )
                            to = ((buffer * split.unroll + u) * 2 * tiles + i) * 8 + first + v
                            T.buffer_store(loaded, value, [to])

        def multiply(buffer: int, step: Expr) -> None:
            held = buffer if self.in_global else 0
            with (
                T.unroll(i64(0), i64(split.unroll)) as u,
                self.if_valid(step + u),
                T.unroll(i64(0), i64(tiles)) as i,
            ):
                # Registers of an mma: (row, low), (row + 8, low), (row, high), (row + 8, high).
                for k in range(2):
                    for register in range(4):
                        high, lower = divmod(register, 2)
                        source = ((held * split.unroll + u) * tiles + i) * 2 + lower
                        with self.pair() as v:
                            value = loaded[source * 8 + (k * 4 + high * 2) + v]
                            value = self.operand(value)
                            T.buffer_store(a, value, [k * 8 + register * 2 + v])
                with T.unroll(i64(0), i64(columns)) as j:
                    for k in range(2):
                        at = ((buffer * split.unroll + u) * columns + j) * 8 + k * 4
                        to = (i * columns + j) * 4
                        T.evaluate(_mma(a, i64(k * 8), b, at, acc, to))

        with self.jobs(thread) as job:
            with job.guard():
                fill(acc, tiles * columns * 4)
                self.rounds(job, load_weights, load_input, multiply)
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


def _mma(a: Any, a_at: Expr, b: Any, b_at: Expr, acc: Any, at: Expr) -> Expr:
    return tirx.call_intrin(
        "float32", "tirx.ptx_legacy.mma", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
        a.data, a_at, b.data, b_at, acc.data, at, False,
    )  # fmt: skip
