"""Writes the NHWC transposed convolutions that no fused kernel has taken as NCHW again.

Runs after fusion, before ``LegalizeOps``: TVM lowers ``conv2d_transpose`` in NCHW / IOHW alone.
Constant weights are permuted here, others by a ``permute_dims`` in the graph.
"""

from __future__ import annotations

import tvm
from tvm import relax

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    array_of,
    constant,
    op_name,
    rewrite_functions,
)
from optifx_tvm.passes.operators import conv_like


class _Restore(DataflowRewriter):
    def rewrite_call(self, call: Call, source: Call) -> Expr:
        if op_name(call) != "relax.nn.conv2d_transpose":
            return call
        layout, kernel = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
        if layout != "NHWC" or str(call.attrs.out_layout) != layout:
            return call
        order = [kernel.index(axis) for axis in "IOHW"]
        weight = array_of(call.args[1])
        if weight is not None:
            restored: Expr = constant(weight.transpose(order))
        else:
            restored = self.emit(relax.op.permute_dims(call.args[1], order))
        data = self.emit(relax.op.permute_dims(call.args[0], [0, 3, 1, 2]))
        plain = conv_like(call, data, restored, data_layout="NCHW", kernel_layout="IOHW")
        return relax.op.permute_dims(self.emit(plain), [0, 2, 3, 1])


@tvm.transform.module_pass(opt_level=0, name="RestoreTransposedConvLayout")
class RestoreTransposedConvLayout:
    """NHWC ``conv2d_transpose`` to permute, NCHW ``conv2d_transpose``, permute."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _Restore)
