"""Element-wise Relax operators as Steps; composite ones (SiLU, GELU, PReLU) are expanded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax

from optifx_tvm.graph import BINARY_OPS, DTYPES, UNARY_OPS, Step

_UNARY = {f"relax.{name}": name for name in UNARY_OPS} | {"relax.nn.relu": "relu"}
_BINARY = {f"relax.{name}": name for name in BINARY_OPS}
ELEMENTWISE_OPS = (
    *_UNARY,
    *_BINARY,
    *(f"relax.{name}" for name in ("clip", "astype", "square")),
    *(f"relax.nn.{name}" for name in ("leakyrelu", "prelu", "silu", "gelu", "gelu_tanh")),
)


class NotFusible(Exception):
    """A binding is not an operator that can be fused."""


def operand_count(name: str) -> int:
    """How many leading arguments of the operator are tensors."""
    return 2 if name in _BINARY or name == "relax.nn.prelu" else 1


def element_steps(name: str, call: relax.Call, operands: Sequence[str | float]) -> tuple[Step, ...]:
    """The steps of one Relax call. A str is an operand's name, a float its value, an int the
    result of an earlier step of this call (from 1). Raises NotFusible."""
    x = operands[0]
    if name in _UNARY:
        return (Step(_UNARY[name], (x,)),)
    if name in _BINARY:
        return (Step(_BINARY[name], tuple(operands)),)
    if name == "relax.clip":
        low, high = (_number(arg) for arg in call.args[1:3])
        return (Step("clip", (x, low, high)),)
    if name == "relax.nn.leakyrelu":
        return (Step("leaky_relu", (x, float(call.attrs.alpha))),)
    if name == "relax.astype":
        old, new = str(call.args[0].ty.dtype), str(call.ty.dtype)
        if old == new or new not in DTYPES or old not in DTYPES:
            raise NotFusible
        return (Step(f"cast:{new}", (x,)),)
    if name == "relax.square":
        return (Step("multiply", (x, x)),)
    if name == "relax.nn.silu":
        return (Step("sigmoid", (x,)), Step("multiply", (x, 1)))
    if name == "relax.nn.prelu":
        if int(call.attrs.axis) not in (3, -1):
            raise NotFusible
        return (
            Step("maximum", (x, 0.0)),
            Step("minimum", (x, 0.0)),
            Step("multiply", (2, operands[1])),
            Step("add", (1, 3)),
        )
    if name == "relax.nn.gelu":
        return (
            Step("multiply", (x, math.sqrt(0.5))),
            Step("erf", (1,)),
            Step("add", (2, 1.0)),
            Step("multiply", (x, 0.5)),
            Step("multiply", (4, 3)),
        )
    assert name == "relax.nn.gelu_tanh", name
    return (
        Step("multiply", (x, x)),
        Step("multiply", (1, 0.044715)),
        Step("add", (2, 1.0)),
        Step("multiply", (x, 3)),
        Step("multiply", (4, math.sqrt(2.0 / math.pi))),
        Step("tanh", (5,)),
        Step("add", (6, 1.0)),
        Step("multiply", (x, 0.5)),
        Step("multiply", (8, 7)),
    )


def _number(expr: relax.Expr) -> float:
    value = expr.value if isinstance(expr, tvm.tirx.IntImm | tvm.tirx.FloatImm) else None
    if value is None:
        raise NotFusible
    return float(value)
