"""Operators by what they do with a layout, and the layout that a four-dimensional value has."""

from __future__ import annotations

from optifx_tvm.passes.dataflow import Call, DataflowRewriter, Expr, op_name


def named(*names: str) -> frozenset[str]:
    """Full names of Relax operators."""
    return frozenset("relax." + name for name in names)


UNARY = named(
    *("abs", "ceil", "cos", "erf", "exp", "floor", "log", "negative", "round", "rsqrt", "sigmoid"),
    *("sign", "sin", "sqrt", "square", "tanh", "clip", "astype", "nn.relu", "nn.leakyrelu"),
    *("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.selu", "nn.softplus"),
)
"""Element-wise on the first argument."""

BINARY = named("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
"""Element-wise with broadcasting."""

TERNARY = named("where", "greater", "greater_equal", "less", "less_equal")
"""Element-wise with broadcasting, on or to booleans; ``where`` has three arguments."""

ELEMENTWISE = UNARY | BINARY | TERNARY

VIEWS = named("reshape", "flatten", "squeeze", "expand_dims", "permute_dims")
"""The same elements in another order or shape."""


def spatial_layout(call: Call) -> str | None:
    """Layout of the result of a convolution, pooling or resize ("NCHW"); None for the rest."""
    name = op_name(call)
    if name in ("relax.nn.conv2d", "relax.nn.conv2d_transpose"):
        return str(call.attrs.out_layout or call.attrs.data_layout)
    if name in ("relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d"):
        return str(call.attrs.out_layout or call.attrs.layout)
    return str(call.attrs.layout) if name == "relax.image.resize2d" else None


def layout_of(walk: DataflowRewriter, expr: Expr) -> str | None:
    """Layout of ``expr``, told by the nearest spatial operator before it through element-wise
    operators and concatenations; None when nothing tells it."""
    seen = 0
    call = walk.call_of(expr)
    while call is not None and seen < 64:
        layout = spatial_layout(call)
        if layout is not None:
            return layout if sorted(layout) == sorted("NCHW") else None
        if op_name(call) in ELEMENTWISE:
            operands = [arg for arg in call.args if walk.call_of(arg) is not None]
        elif op_name(call) == "relax.concat" and hasattr(call.args[0], "fields"):
            operands = [arg for arg in call.args[0].fields if walk.call_of(arg) is not None]
        else:
            return None
        if not operands:
            return None
        call = walk.call_of(operands[0])
        seen += 1
    return None
