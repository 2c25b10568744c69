"""AFusion: plans the fusion of each dataflow block and outlines every group.

Runs after CanonicalizeConv (what is not in its form stays as it is) and before LowerFusionGroups.
A group becomes a private Relax function of ordinary operators with the attributes

* ``optifx.group``: the group as canonical ConvGraph JSON,
* ``optifx.tile``: JSON of its Tile,
* ``optifx.mode``: its fusion mode,

whose parameters are the group's inputs, then its params (per-channel ones as (C,)), in the order of
the JSON; it returns its output, or a tuple of its outputs in that order. Groups of equal structure
and tile share one function. The plan is kept as JSON in the module attribute ``optifx.plan``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.target import Target

from optifx_tvm.device import DeviceSpec
from optifx_tvm.errors import OptionError
from optifx_tvm.extract import Extraction, extract_block
from optifx_tvm.extract_ops import Op, static_shape
from optifx_tvm.graph import FUSIBLE_OPS, ConvGraph
from optifx_tvm.partition import Group, Partition, Planner
from optifx_tvm.partition_check import check_partition, schedule_units
from optifx_tvm.passes.dataflow import constant, is_finished
from optifx_tvm.passes.group_attrs import GROUP_ATTR, MODE_ATTR, TILE_ATTR, group_of
from optifx_tvm.search.backtracking import Effort
from optifx_tvm.search.planners import make_planner
from optifx_tvm.target import target_or_current

PLAN_ATTR = "optifx.plan"


@tvm.transform.module_pass(opt_level=0, name="AFusion")
@dataclass(frozen=True)
class AFusion:
    """Aggressive fusion of region operators. Raises OptionError for an unknown planner, or for a
    planner's partition that is not legal."""

    target: Target | str | dict | None = None
    """What to plan for. None: the current target (``with target:``), else llvm."""
    planner: str | Callable[[ConvGraph], Partition] = "search"
    """"search", "greedy", "none", or a function from ConvGraph to Partition."""
    time_budget: float = Effort.seconds
    """Seconds per dataflow block, after which "search" returns the best plan found so far."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return _Outliner(mod, self._planner()).run()

    def _planner(self) -> Planner:
        if callable(self.planner):
            return self.planner
        device = DeviceSpec.from_target(target_or_current(self.target))
        return make_planner(self.planner, device, time_budget=self.time_budget)


@dataclass
class _Plan:
    """What was decided for one function, for "explain"."""

    operators: int = 0
    unfused_kernels: int = 0
    fused_kernels: int = 0
    predicted_us: float = 0.0
    planner: str = ""
    complete: bool = True
    groups: list[dict] = field(default_factory=list)
    refused: list[dict] = field(default_factory=list)

    def add(self, extraction: Extraction, partition: Partition, functions: Sequence[str]) -> None:
        """Appends the plan of one dataflow block; ``functions``: what each group became."""
        nodes = extraction.graph.by_name
        for group, function in zip(partition.groups, functions, strict=True):
            self.groups.append(
                {
                    "function": function,
                    "nodes": list(group.nodes),
                    "operators": [s for name in group.nodes for s in nodes[name].source],
                    "mode": group.mode,
                    "tile": asdict(group.tile),
                    "predicted_us": group.predicted_us,
                }
            )
        names = [name for group in partition.groups for name in group.nodes]
        self.operators += sum(len(extraction.operators[name]) for name in names)
        self.unfused_kernels += len(names)
        self.fused_kernels += len(partition.groups)
        self.predicted_us += partition.predicted_us
        self.planner = partition.planner
        self.complete = self.complete and partition.complete
        self.refused += [asdict(refusal) for refusal in partition.rejected]


class _Outliner:
    def __init__(self, mod: tvm.IRModule, planner: Planner) -> None:
        self._mod = mod
        self._planner = planner
        self._builder = relax.BlockBuilder(mod.clone())
        self._shared: dict[tuple[str, str, str], relax.GlobalVar] = {}
        self._plans: dict[str, _Plan] = {}

    def run(self) -> tvm.IRModule:
        """The rewritten module; ``mod`` itself if there is nothing to fuse in it."""
        functions = sorted(self._mod.functions_items(), key=lambda item: item[0].name_hint)
        for global_var, func in functions:
            if isinstance(func, relax.Function) and not (is_finished(func) or group_of(func)):
                rewritten = self._function(global_var.name_hint, func)
                if rewritten is not func:
                    self._builder.update_func(global_var, rewritten)
        if not self._plans:
            return self._mod
        plans = {name: asdict(plan) for name, plan in self._plans.items()}
        result = self._builder.get()
        return result.with_attr(PLAN_ATTR, json.dumps(plans, separators=(",", ":")))

    def _function(self, name: str, func: relax.Function) -> relax.Function:
        if not isinstance(func.body, relax.SeqExpr):
            return func
        blocks = []
        changed = False
        for block in func.body.blocks:
            rewritten = block
            if isinstance(block, relax.DataflowBlock):
                rewritten = self._block(name, func, block)
            changed = changed or rewritten is not block
            blocks.append(rewritten)
        if not changed:
            return func
        return relax.Function(
            func.params,
            self._builder.normalize(relax.SeqExpr(blocks, func.body.body)),
            ret_ty=func.ret_ty,
            is_pure=func.is_pure,
            attrs=func.attrs,
        )

    def _block(
        self, name: str, func: relax.Function, block: relax.DataflowBlock
    ) -> relax.DataflowBlock:
        extraction = extract_block(block, func.params)
        graph = extraction.graph
        if not any(node.op in FUSIBLE_OPS for node in graph.nodes):
            return block
        partition = self._planner(graph)
        if not isinstance(partition, Partition):
            got = type(partition).__name__
            raise OptionError(f"planner returned {got}, it must return a Partition")
        check_partition(graph, partition)
        groups = {frozenset(group.nodes): group for group in partition.groups}
        original = {binding.var: binding for binding in block.bindings}
        writer = _BlockWriter(extraction)
        made: dict[frozenset[str], str] = {}
        for unit in schedule_units(graph, [group.nodes for group in partition.groups]):
            group = groups.get(frozenset(unit))
            if group is None:
                (node,) = unit
                writer.bindings.append(original[extraction.operators[node][-1].var])
                continue
            sub = graph.subgraph(group.nodes)
            callee = self._outlined(extraction, sub, group)
            writer.call(callee, sub)
            made[frozenset(unit)] = callee.name_hint
        functions = [made[frozenset(group.nodes)] for group in partition.groups]
        self._plans.setdefault(name, _Plan()).add(extraction, partition, functions)
        return relax.DataflowBlock(writer.bindings)

    def _outlined(self, extraction: Extraction, sub: ConvGraph, group: Group) -> relax.GlobalVar:
        """The private function for a group: a new one, or that of an equal group."""
        text = sub.canonical()[0].to_json()
        tile = json.dumps(asdict(group.tile), separators=(",", ":"))
        key = (text, tile, group.mode)
        if key not in self._shared:
            attrs = {GROUP_ATTR: text, TILE_ATTR: tile, MODE_ATTR: group.mode}
            func = _group_function(extraction, sub, attrs)
            self._shared[key] = self._builder.add_func(func, _function_name(sub))
        return self._shared[key]


def _function_name(group: ConvGraph) -> str:
    ops = [node.op for node in group.nodes]
    if len(ops) > 4:
        ops = [*ops[:2], f"{len(ops) - 3}more", ops[-1]]
    return "_".join(["optifx", *ops])


class _BlockWriter:
    """Collects the bindings of the new dataflow block."""

    def __init__(self, extraction: Extraction) -> None:
        self.bindings: list[relax.Binding] = []
        self._extraction = extraction
        self._builder = relax.BlockBuilder()
        self._arguments: dict[str, relax.Expr] = {}

    def call(self, callee: relax.GlobalVar, group: ConvGraph) -> None:
        """Binds the group's output variables to the results of a call."""
        args = [self._argument(name) for name in (*group.inputs, *group.params)]
        call = self._builder.normalize(relax.Call(callee, args))
        variables = [self._extraction.values[name] for name in group.outputs]
        if len(variables) == 1:
            self.bindings.append(relax.VarBinding(variables[0], call))
            return
        results = relax.DataflowVar(f"{group.nodes[-1].name}_group", call.ty)
        self.bindings.append(relax.VarBinding(results, call))
        for i, variable in enumerate(variables):
            item = self._builder.normalize(relax.TupleGetItem(results, i))
            self.bindings.append(relax.VarBinding(variable, item))

    def _argument(self, name: str) -> relax.Expr:
        """The value of a tensor in the shape that the graph gives it."""
        value, shape = self._extraction.values[name], self._extraction.graph.shape(name)
        if static_shape(value) == shape:
            return value
        if name not in self._arguments:
            if isinstance(value, GenericConst):
                self._arguments[name] = constant(value.value.numpy().reshape(shape))
            else:
                call = self._builder.normalize(relax.op.reshape(value, shape))
                variable = relax.DataflowVar(name, call.ty)
                self.bindings.append(relax.VarBinding(variable, call))
                self._arguments[name] = variable
        return self._arguments[name]


def _group_function(
    extraction: Extraction, group: ConvGraph, attrs: Mapping[str, str]
) -> relax.Function:
    """A function of the group's own operators on parameters of the graph's shapes."""
    names = (*group.inputs, *group.params)
    specs = [group.tensors[name] for name in names]
    params = [relax.Var(s.name, relax.TensorType(s.shape, s.dtype)) for s in specs]
    values: dict[str, relax.Expr] = dict(zip(names, params, strict=True))
    builder = relax.BlockBuilder()
    with builder.function("group", params, attrs=dict(attrs), private=True):
        with builder.dataflow():
            for node in group.nodes:
                for op in extraction.operators[node.name]:
                    call = _renewed(op, values)
                    is_output = op.name in group.outputs
                    emit = builder.emit_output if is_output else builder.emit
                    values[op.name] = emit(call, op.var.name)
        outputs = [values[name] for name in group.outputs]
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    return builder.get()["group"]


def _renewed(op: Op, values: Mapping[str, relax.Expr]) -> relax.Call:
    """The operator's call with its tensors replaced."""

    def renew(arg: relax.Expr, tensor: str | tuple[str, ...] | None) -> relax.Expr:
        if tensor is None:
            return arg
        if isinstance(tensor, tuple):
            return relax.Tuple([values[name] for name in tensor])
        return values[tensor]

    call = op.value
    args = [renew(arg, tensor) for arg, tensor in zip(call.args, op.args, strict=True)]
    return relax.Call(call.op, args, call.attrs, call.ty_args)
