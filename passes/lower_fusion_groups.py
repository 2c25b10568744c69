"""LowerFusionGroups: every fusion group becomes one PrimFunc, its tile program.

Runs after AFusion, which outlines groups as private Relax functions with the attributes
"optifx.group" (canonical ConvGraph as JSON) and "optifx.tile". Runs before ScheduleFusionGroups;
the PrimFuncs made here are plain, correct programs that any TIR pass may inspect. Calls become
``call_tir`` with the weights packed as schedules/packing.py says: constants here and now, function
parameters by Relax operators in the caller. Functions without these attributes are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from optifx_tvm.analysis.products import LANES, MATRIX_BLOCK, NARROW, is_matrix_packed, is_narrow
from optifx_tvm.graph import ConvGraph, Node
from optifx_tvm.passes.dataflow import constant
from optifx_tvm.passes.group_attrs import group_of, with_group_attrs
from optifx_tvm.schedules.packing import packed_weight, packed_weight_shape
from optifx_tvm.schedules.tile_program import build_tile_program


@tvm.transform.module_pass(opt_level=0, name="LowerFusionGroups")
@dataclass(frozen=True)
class LowerFusionGroups:
    """Replace every fusion group by a ``call_tir`` of its tile program."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the module; the input is not changed."""
        rewriter = _Rewriter(mod.clone())
        return rewriter.run()


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.groups: dict[str, ConvGraph] = {}
        self.kernels: dict[str, relax.GlobalVar] = {}

    def run(self) -> IRModule:
        for var, func in self.mod.functions_items():
            found = group_of(func) if isinstance(func, relax.Function) else None
            if found is None:
                continue
            graph, tile = found
            kernel = with_group_attrs(build_tile_program(graph, tile).func, func)
            self.groups[var.name_hint] = graph
            name = var.name_hint + "_kernel"
            self.kernels[var.name_hint] = self.builder_.add_func(kernel, name)
        if not self.groups:
            return self.mod
        for var, func in self.mod.functions_items():
            if isinstance(func, relax.Function) and var.name_hint not in self.groups:
                self.builder_.update_func(var, self.visit_expr(func))
        mod = self.builder_.get()
        for var in [v for v in mod.get_global_vars() if v.name_hint in self.groups]:
            del mod[var]
        return mod

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = call.op.name_hint if isinstance(call.op, relax.GlobalVar) else None
        if name not in self.groups:
            return call
        graph = self.groups[name]
        weights = {node.weight: node for node in graph.nodes if node.weight}
        args = []
        for tensor, arg in zip((*graph.inputs, *graph.params), call.args, strict=True):
            if tensor in weights:
                arg = self.pack(arg, weights[tensor], graph)
            elif len(graph.shape(tensor)) == 1:
                arg = self.flatten(arg, graph.shape(tensor)[0])
            args.append(arg)
        types = [relax.TensorType(graph.shape(o), graph.tensors[o].dtype) for o in graph.outputs]
        out_ty = types[0] if len(types) == 1 else types
        return relax.call_tir(self.kernels[name], relax.Tuple(args), out_ty)

    def flatten(self, arg: relax.Expr, channels: int) -> relax.Expr:
        """A per-channel constant as (C,)."""
        if isinstance(arg, GenericConst):
            return constant(arg.value.numpy().reshape(channels))
        return self.builder_.emit(relax.op.reshape(arg, (channels,)))

    def pack(self, arg: relax.Expr, node: Node, graph: ConvGraph) -> relax.Expr:
        """A weight as the tile program reads it."""
        if isinstance(arg, GenericConst):
            return constant(packed_weight(arg.value.numpy(), node, graph))
        op, emit = relax.op, self.builder_.emit
        shape = [int(e) for e in arg.ty.shape]
        if node.op == "conv2d_transpose":
            depth, kh, kw, per_group = shape
            grouped = (node.groups, depth // node.groups, kh, kw, per_group)
            arg = emit(op.permute_dims(emit(op.reshape(arg, grouped)), (0, 4, 2, 3, 1)))
            shape = [node.groups * per_group, kh, kw, depth // node.groups]
            arg = emit(op.reshape(arg, shape))
        channels, kh, kw, depth = shape
        if is_narrow(node, graph):
            if depth < NARROW:
                arg = emit(op.nn.pad(arg, [0, 0, 0, 0, 0, 0, 0, NARROW - depth]))
            kw, depth = 1, kw * NARROW
            arg = emit(op.reshape(arg, (channels, kh, kw, depth)))
        blocks = packed_weight_shape(node, graph)[0]
        outer, inner = MATRIX_BLOCK if is_matrix_packed(node, graph) else (LANES, 1)
        if channels % outer or depth % inner:
            width = [0, blocks * outer - channels, 0, 0, 0, 0, 0, -depth % inner]
            arg = emit(op.nn.pad(arg, width))
        if inner > 1:
            arg = emit(op.reshape(arg, (blocks, outer, kh, kw, -(-depth // inner), inner)))
            return emit(op.permute_dims(arg, (0, 2, 3, 4, 1, 5)))
        arg = emit(op.reshape(arg, (blocks, LANES, kh, kw, depth)))
        return emit(op.permute_dims(arg, (0, 2, 3, 4, 1)))
