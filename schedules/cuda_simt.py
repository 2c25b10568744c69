"""CUDA template: everything but the products of warp tiles (product.py), which are emitted in their
final form: copies, element-wise nests, pooling, depthwise and grouped convolutions; float32, or
float16 with float32 arithmetic.

Phase 1  split the columns and channels of each reducing nest into register tiles, channels fastest
         over the threads (coalesced weights and stores)
Phase 2  compute each accumulator in registers inside its store nest's tile, while the nest is plain
Phase 3  fuse the tiles of a nest and deal them out to the threads of the block
Phase 4  copies, borders and element-wise nests: 4 channels a thread where they divide
Phase 5  unroll steps of the reductions: the loads of several steps are then under way together

A block is one iteration of the program's outer loop, bound to blockIdx.x by the builder. Tiles live
in ``shared.dyn``: TVM puts the barriers between the nests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm.sym import Analyzer

from optifx_tvm.analysis.placement import pitch_rule
from optifx_tvm.analysis.warp_split import RESULT_PITCH
from optifx_tvm.schedules.nests import VECTOR
from optifx_tvm.schedules.shared_memory import keep_tiles_apart
from optifx_tvm.schedules.tile_program import Nest, TileProgram

WARP = 32
MAX_TAPS = 25
"""Taps of a depthwise or pooling window that are unrolled."""
COLUMNS = (4, 2, 1)
"""Columns of a register tile to choose from."""
MAX_TURNS = 8
"""Turns of a thread in one nest that are unrolled."""
BLOCK = "blockIdx.x"
"""What the builder has bound the outer loop to."""
CHANNEL = 6
"""Index of the channel among a block's iterators: after the 4 outer ones, row and column."""


@dataclass(frozen=True)
class SimtConfig:
    """The template's choices."""

    threads: int
    columns: int
    """Most columns of a register tile (times 4 channels); a nest whose tiles would leave more than
    half of the threads without work has narrower ones."""


def default_config(program: TileProgram) -> SimtConfig:
    """The threads that share the program's products; without any, enough for the largest nest at
    4 columns each, at most 256."""
    if program.clocks:
        return SimtConfig(program.warps * WARP, COLUMNS[0])
    options = [max(_jobs(nest, columns) for nest in program.nests) for columns in COLUMNS]
    jobs = next((jobs for jobs in options if jobs >= 128), options[-1])
    threads = min(256, max(WARP, -(-jobs // WARP) * WARP))
    return SimtConfig(threads, COLUMNS[0])


def _jobs(nest: Nest, columns: int) -> int:
    rows, cols, channels = nest.extents
    width = columns if nest.compute else 1
    return rows * -(-cols // width) * -(-channels // VECTOR)


def schedule_simt(
    program: TileProgram, config: SimtConfig | None = None, tiles_in: str = "shared.dyn"
) -> tirx.PrimFunc:
    """Apply the template. ``tiles_in`` "global" is slow but needs no shared memory."""
    config = config or default_config(program)
    sch = s_tir.Schedule(program.func)
    for nest in program.nests:
        store = sch.get_sblock(nest.block)
        if nest.kind == "product":
            sch.storage_align(store, 0, -2, *RESULT_PITCH)
            continue
        if nest.writes_tile and tiles_in != "global":
            sch.set_scope(store, 0, tiles_in)
            buffer = sch.get(store).writes[0].source
            channels = int(buffer.ty.shape[-1])
            axis = -2 if channels >= VECTOR else -3
            sch.storage_align(
                store, 0, axis, *pitch_rule(channels, np.dtype(str(buffer.ty.dtype)).itemsize)
            )
        if nest.compute:
            _schedule_reduction(sch, nest, config)
        else:
            row, col, channel = sch.get_loops(store)[1:]
            widths = (2 * VECTOR, VECTOR) if _is_copy(sch.get(store)) else (VECTOR,)
            outer, _ = _split_channels(sch, channel, [store], widths)
            _unroll_turns(sch, _deal_out(sch, [row, col, outer], config.threads))
    (func,) = (f for _, f in sch.mod.functions_items())
    return _one_kernel_per_nest(func) if tiles_in == "global" else keep_tiles_apart(func)


def _one_kernel_per_nest(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Launch the nests one after the other: TVM allocates global memory between kernels only."""

    def launch(loop: tirx.For, nest: tirx.Stmt) -> tirx.For:
        old, block = loop.thread_binding, tirx.Var("block", loop.loop_var.ty)
        body = tvm_ffi.structural_map(
            nest, (tirx.Var, lambda v: block if v.same_as(loop.loop_var) else v)
        )
        binding = tirx.IterVar(None, tirx.Var("", block.ty), old.iter_type, old.thread_tag)
        return tirx.For(block, loop.min, loop.extent, loop.kind, body, binding)

    def divide(loop: tirx.For) -> tirx.Stmt:
        is_outer = loop.thread_binding is not None and loop.thread_binding.thread_tag == BLOCK
        if not is_outer or not isinstance(loop.body, tirx.SeqStmt):
            return loop
        return tirx.SeqStmt([launch(loop, nest) for nest in loop.body.seq])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, divide)))


def _split_channels(sch: s_tir.Schedule, loop, blocks: list, widths: tuple[int, ...] = (VECTOR,)):
    """Split a channel loop into (outer, lanes) by the first of ``widths`` for which all of
    ``blocks`` can have vector accesses; by the last one if none can, without them."""
    extent = int(sch.get(loop).extent)
    for width in widths:
        if extent % width == 0 and all(_is_aligned(sch.get(b), width) for b in blocks):
            outer, inner = sch.split(loop, [None, width])
            sch.vectorize(inner)
            return outer, inner
    width = widths[-1] if extent % widths[-1] == 0 else 1
    outer, inner = sch.split(loop, [None, width])
    if width > 1:
        sch.unroll(inner)
    return outer, inner


def _is_aligned(block, width: int) -> bool:
    """Are all accesses of ``width`` channels from a multiple of ``width`` on naturally aligned,
    which a GPU demands? Not so where the pitch of an input or output or the offset of a concat's
    slice is odd (tiles have aligned pitches)."""
    channel = block.iter_vars[CHANNEL].var
    vector = tirx.Var("vector", "int64") * width
    first = (tirx.Var, lambda var: vector if var.same_as(channel) else var)
    analyzer = Analyzer()
    aligned = True

    def visit(access) -> None:
        nonlocal aligned
        *outer, last = access.indices
        start = tvm_ffi.structural_map(last, first)
        if start.same_as(last):  # the same element for all lanes
            return
        found = analyzer.modular_set(start)
        buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
        is_param = buffer.ty.storage_scope == "global"
        pitch = int(buffer.ty.shape[-1]) if outer and is_param else 0
        aligned &= not (pitch % width or found.coeff % width or found.base % width)

    tvm_ffi.structural_walk(block.body, ((TensorLoad, tirx.BufferStore), visit))
    return aligned


def _is_copy(block) -> bool:
    """Does the block move float16 values as they are, so that vectors of 8 need no arithmetic?"""
    store = block.body
    while not isinstance(store, tirx.BufferStore):
        store = getattr(store, "then_case", None)
        if store is None:
            return False
    value = store.value
    if isinstance(value, Call) and value.op.name == "prim.if_then_else":
        value = value.args[1]
    plain = isinstance(value, (TensorLoad, tirx.FloatImm))
    return plain and str(store.buffer.ty.dtype) == "float16"


def _deal_out(sch: s_tir.Schedule, loops: list, threads: int):
    """Bind the fused loops to the threads; returns the loop over the turns of a thread."""
    job = sch.fuse(*loops)
    turns, thread = sch.split(job, [None, threads])
    sch.bind(thread, "threadIdx.x")
    return turns


def _unroll_turns(sch: s_tir.Schedule, turns) -> None:
    """Let the loads of several turns be under way together."""
    extent = int(sch.get(turns).extent)
    if extent > MAX_TURNS:
        rounds = -(-extent // MAX_TURNS)
        _, turns = sch.split(turns, [None, -(-extent // rounds)])
    sch.unroll(turns)


def _schedule_reduction(sch: s_tir.Schedule, nest: Nest, config: SimtConfig) -> None:
    assert nest.compute is not None
    store, compute = sch.get_sblock(nest.block), sch.get_sblock(nest.compute)
    sch.set_scope(compute, 0, "local")
    # Phase 1
    row, col, channel = sch.get_loops(store)[1:]
    columns = next(
        c
        for c in COLUMNS
        if c == 1 or (c <= config.columns and 2 * _jobs(nest, c) >= config.threads)
    )
    col_outer, col_inner = sch.split(col, [None, min(columns, nest.extents[1])])
    outer, inner = _split_channels(sch, channel, [store])
    sch.reorder(row, col_outer, outer, col_inner, inner)
    sch.unroll(col_inner)
    # Phase 2
    sch.compute_at(compute, outer, preserve_unit_loops=True)
    loops = sch.get_loops(compute)[-(3 + len(nest.reduction)) :]
    compute_row, compute_col, compute_channel, *reduction = loops
    sch.reorder(*reduction, compute_row, compute_col, compute_channel)
    sch.unroll(compute_col)
    # Lanes of a grouped convolution may read different input channels, which is no vector load.
    lanes = int(sch.get(compute_channel).extent)
    if lanes > 1 and nest.kind != "grouped" and _is_aligned(sch.get(compute), lanes):
        sch.vectorize(compute_channel)
    elif lanes > 1:
        sch.unroll(compute_channel)
    # Phase 3; only then split off the initialisation: bind refuses an accumulator with two writers
    _deal_out(sch, [row, col_outer, outer], config.threads)
    sch.decompose_reduction(compute, reduction[0])
    # Phase 5
    _unroll_reduction(sch, reduction)


def _unroll_reduction(sch: s_tir.Schedule, reduction: list) -> None:
    """Unroll some steps of a reduction, (kh, kw) or (kh, kw, channels)."""
    extents = [int(sch.get(loop).extent) for loop in reduction]
    if len(extents) == 3:
        steps = next(n for n in (8, 4, 2, 1) if extents[2] % n == 0)
        sch.unroll(sch.split(reduction[2], [None, steps])[1])
    elif extents[1] <= MAX_TAPS:
        sch.unroll(reduction[1])
        if extents[0] * extents[1] <= MAX_TAPS:
            sch.unroll(reduction[0])
