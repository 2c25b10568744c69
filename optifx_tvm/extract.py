"""Relax dataflow block -> ConvGraph, with the maps that a rewriter needs.

Runs on the form that CanonicalizeConv makes. Anything else is carried as opaque nodes, so every
well-formed module can be extracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from optifx_tvm.errors import ModelError
from optifx_tvm.extract_ops import Op, parse_block
from optifx_tvm.extract_stages import Stage, form_stages
from optifx_tvm.graph import ConvGraph, Node, Step, TensorSpec


@dataclass(frozen=True)
class Extraction:
    """A ConvGraph and what its names stand for in the Relax function."""

    graph: ConvGraph
    values: Mapping[str, relax.Expr]
    """Tensor of the graph -> variable or constant. A per-channel constant may have any shape
    that broadcasts like the (C,) that the graph says, for example (1, 1, 1, C)."""
    operators: Mapping[str, tuple[Op, ...]]
    """Node -> the operators (bindings) that it covers, in an order that runs. Casts may be
    covered by several nodes; bindings that no node covers are not needed any more."""


def dataflow_blocks(func: relax.Function) -> list[relax.DataflowBlock]:
    """The dataflow blocks of a function, in order."""
    if not isinstance(func.body, relax.SeqExpr):
        return []
    return [block for block in func.body.blocks if isinstance(block, relax.DataflowBlock)]


def extract_graph(mod: tvm.IRModule, function: str = "main") -> Extraction:
    """The ConvGraph of the one dataflow block of ``function``.

    Raises ModelError if there is no such function, or not exactly one dataflow block in it.
    """
    found = [
        func
        for global_var, func in mod.functions_items()
        if global_var.name_hint == function and isinstance(func, relax.Function)
    ]
    if not found:
        names = ", ".join(sorted(global_var.name_hint for global_var in mod.get_global_vars()))
        raise ModelError(f"no Relax function {function} in the module; it has: {names}")
    blocks = dataflow_blocks(found[0])
    if len(blocks) != 1:
        raise ModelError(
            f"function {function} has {len(blocks)} dataflow blocks, extraction needs exactly one: "
            "run relax.transform.ConvertToDataflow first"
        )
    return extract_block(blocks[0], found[0].params)


def extract_block(
    block: relax.DataflowBlock, function_params: Sequence[relax.Var] = ()
) -> Extraction:
    """The ConvGraph of ``block``. ``function_params`` (any shapes) may serve as weights."""
    parsed = parse_block(block, function_params)
    stages = form_stages(parsed.ops, parsed.specs)
    nodes = tuple(_node(stage, parsed.specs) for stage in stages)
    exits = [stage.exit for stage in stages]
    results = {op.name for op in exits}
    reads = tuple(dict.fromkeys(t for node in nodes for t in node.reads))
    params = tuple(t for t in reads if t in set(parsed.params))
    names = (*reads, *(op.name for op in exits if op.name not in reads))
    graph = ConvGraph(
        nodes=nodes,
        tensors={name: parsed.specs[name] for name in names},
        inputs=tuple(t for t in reads if t not in results and t not in set(params)),
        params=params,
        outputs=tuple(op.name for op in exits if op.is_output),
    )
    return Extraction(
        graph=graph,
        values={name: parsed.values[name] for name in names},
        operators={stage.exit.name: stage.ops for stage in stages},
    )


def _node(stage: Stage, specs: Mapping[str, TensorSpec]) -> Node:
    head, result = stage.head, stage.exit
    source = tuple(op.source for op in stage.ops)
    if head is None:
        entry = _entry(stage.epilogue, specs)
        return Node(
            name=result.name,
            op="elementwise",
            inputs=(entry,),
            epilogue=_steps(stage.epilogue, entry),
            source=source,
        )
    inputs = tuple(t for t in head.reads if t != head.weight)
    prologue: tuple[Step, ...] = ()
    if stage.prologue:
        entry = _entry(stage.prologue, specs)
        prologue = _steps(stage.prologue, entry)
        inputs = (entry,)
    return Node(
        name=result.name,
        op=head.kind,
        inputs=inputs,
        window=head.window,
        weight=head.weight,
        groups=head.groups,
        prologue=prologue,
        epilogue=_steps(stage.epilogue, head.name),
        source=source,
    )


def _entry(chain: Sequence[Op], specs: Mapping[str, TensorSpec]) -> str:
    """The first tensor of full shape that a chain reads from outside itself."""
    inside = {op.name for op in chain}
    shape = chain[-1].spec.shape
    return next(t for op in chain for t in op.reads if t not in inside and specs[t].shape == shape)


def _steps(chain: Sequence[Op], entry: str) -> tuple[Step, ...]:
    """The operators' steps as one list: value 0 is ``entry``, then the results in order."""
    value_of = {entry: 0}
    steps: list[Step] = []
    for op in chain:
        before = len(steps)
        for step in op.steps:
            args = tuple(
                value_of.get(a, a)
                if isinstance(a, str)
                else a + before
                if isinstance(a, int)
                else a
                for a in step.args
            )
            steps.append(Step(step.op, args))
        value_of[op.name] = len(steps)
    return tuple(steps)
