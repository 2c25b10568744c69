"""CUDA schedule for any PrimFunc: correct, a thread per output element, no tuning.

Phase 1  inline element-wise producers
Phase 2  compute each reduction in registers inside its element-wise consumer, where they match
Phase 3  every remaining nest becomes a kernel: spatial loops fused and dealt out to threads,
         reductions serial in a thread

It takes what TVM's dlight may refuse (convolutions that look like a matrix-vector product, thin
grouped convolutions) so that no function ever reaches the code generator without threads.
"""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

THREADS = 256


def is_bound(func: tirx.PrimFunc) -> bool:
    """Has the function thread-bound loops already?"""
    found = False

    def loop(node: tirx.For) -> None:
        nonlocal found
        found |= node.kind == tirx.ForKind.THREAD_BINDING

    def attribute(node: tirx.AttrStmt) -> None:
        nonlocal found
        found |= node.attr_key in ("thread_extent", "virtual_thread")

    tvm_ffi.structural_walk(func.body, ((tirx.For, loop), (tirx.AttrStmt, attribute)))
    return found


def is_convolution_like(func: tirx.PrimFunc) -> bool:
    """Does it reduce a product over a window: does a block read an element at a position that is
    a function of both an output and a reduction index, and another element besides?"""
    found = False

    def block(node: s_tir.SBlock) -> None:
        nonlocal found
        spatial = [v.var for v in node.iter_vars if v.iter_type == tirx.IterVar.DataPar]
        reduced = [v.var for v in node.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
        if not spatial or not reduced:
            return
        reads: list[TensorLoad] = []
        tvm_ffi.structural_walk(node.body, (TensorLoad, reads.append))
        others = [load for load in reads if not load.source.same_as(node.writes[0].source)]
        mixed = any(
            _uses(index, spatial) and _uses(index, reduced)
            for load in others
            for index in load.indices
        )
        found |= mixed and len(others) > 1

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, block))
    return found


def _uses(expr, variables: list) -> bool:
    found = False

    def visit(var) -> None:
        nonlocal found
        found |= any(var.same_as(v) for v in variables)

    tvm_ffi.structural_walk(expr, (tirx.Var, visit))
    return found


def schedule_fallback(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind every nest of ``func``, which has no thread-bound loops, to threads."""
    # Of func itself: fuse would change the original of a copy made by with_attr, in place.
    sch = s_tir.Schedule(func)
    try:
        _inline(sch)
        for block in reversed(_blocks(sch)):
            if not _is_placed(sch, block):
                _bind(sch, block)
        ((_, scheduled),) = sch.mod.functions_items()
        body = scheduled.body
    except s_tir.ScheduleError:
        # Nests that share loops, blocks in an order that only makes sense as written.
        body = _serial(func.body)
    return func.with_body(body)


def _blocks(sch: s_tir.Schedule) -> list:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _inline(sch: s_tir.Schedule) -> None:
    """Phase 1: what is not element-wise, or an output, refuses and stays."""
    for block in _blocks(sch):
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def _is_placed(sch: s_tir.Schedule, block) -> bool:
    """Is the block inside a bound loop (of its consumer) already?"""
    return any(sch.get(loop).thread_binding is not None for loop in sch.get_loops(block))


def _bind(sch: s_tir.Schedule, block) -> None:
    """Phases 2 and 3 for one nest."""
    reductions = []
    if not _loops(sch, block)[1]:
        loops = sch.get_loops(block)
        for producer in sch.get_producers(block):
            if loops and _feeds_one_to_one(sch, producer, block):
                sch.compute_at(producer, loops[-1], preserve_unit_loops=True)
                sch.set_scope(producer, 0, "local")
                reductions.append(producer)
    spatial, reduced = _loops(sch, block)
    if spatial:
        sch.reorder(*spatial, *reduced)
    else:
        spatial = [sch.add_unit_loop(reduced[0] if reduced else block)]
    outer, inner = sch.split(sch.fuse(*spatial), [None, THREADS])
    sch.bind(outer, "blockIdx.x")
    sch.bind(inner, "threadIdx.x")
    if reduced:
        sch.decompose_reduction(block, reduced[0])
    for producer in reductions:
        sch.decompose_reduction(producer, _loops(sch, producer)[1][0])


def _loops(sch: s_tir.Schedule, block) -> tuple[list, list]:
    """Spatial and reduction loops. A block of TE has one loop for every iterator, in their order;
    compute_at puts it, with them, under others."""
    kinds = [v.iter_type for v in sch.get(block).iter_vars]
    loops = list(sch.get_loops(block))
    if len(loops) < len(kinds):
        return loops, []
    own = zip(loops[len(loops) - len(kinds) :], kinds, strict=True)
    reduced = [loop for loop, kind in own if kind == tirx.IterVar.CommReduce]
    return [loop for loop in loops if not any(loop.same_as(r) for r in reduced)], reduced


def _feeds_one_to_one(sch: s_tir.Schedule, producer, consumer) -> bool:
    """Is ``producer`` a reduction of which ``consumer`` alone reads every element, each for one
    element of its own?"""
    if not _loops(sch, producer)[1] or len(sch.get_consumers(producer)) != 1:
        return False
    block = sch.get(consumer)
    buffer = sch.get(producer).writes[0].source
    reads: list[TensorLoad] = []
    tvm_ffi.structural_walk(block.body, (TensorLoad, reads.append))
    axes = [v.var for v in block.iter_vars if not _is_one(v.dom.extent)]

    def is_whole(load: TensorLoad) -> bool:
        pairs = zip(load.indices, buffer.ty.shape, strict=True)
        used = [index for index, extent in pairs if not _is_one(extent)]
        return len(used) == len(axes) and all(any(i.same_as(a) for a in axes) for i in used)

    return all(is_whole(load) for load in reads if load.source.same_as(buffer))


def _is_one(extent) -> bool:
    return isinstance(extent, tirx.IntImm) and extent.value == 1


def _serial(body: tirx.Stmt) -> tirx.Stmt:
    """Each statement of the root block as a kernel of one thread."""

    def launch(stmt: tirx.Stmt) -> tirx.Stmt:
        for tag in ("threadIdx.x", "blockIdx.x"):
            binding = tirx.IterVar(None, tirx.Var("", "int64"), 1, tag)
            zero, one = tirx.IntImm("int64", 0), tirx.IntImm("int64", 1)
            kind = tirx.ForKind.THREAD_BINDING
            stmt = tirx.For(tirx.Var("one", "int64"), zero, one, kind, stmt, binding)
        return stmt

    def divide(block: s_tir.SBlock) -> s_tir.SBlock:
        if block.name_hint != "root":
            return block
        inner = block.body
        nests = inner.seq if isinstance(inner, tirx.SeqStmt) else [inner]
        kernels = [launch(nest) for nest in nests]
        body = tirx.SeqStmt(kernels) if len(kernels) > 1 else kernels[0]
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint,
            body, block.init, block.alloc_buffers,
            block.match_buffers, block.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_map(body, (s_tir.SBlock, divide))
