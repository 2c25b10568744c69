"""Element-wise steps (optifx_tvm.graph.Step) as TIR expressions in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from optifx_tvm.graph import Step

Expr = Any  # TIR expressions: TVM's Python layer has no precise static types


def f32(value: float) -> tirx.FloatImm:
    """A float32 constant."""
    return tirx.FloatImm("float32", value)


def _erf(x: Expr) -> Expr:
    """Rational approximation of erf on [-4, 4] (odd polynomial over even polynomial, relative
    error below 1e-6): unlike a call of libm it can be vectorised, and it is the same on a GPU."""
    x = tirx.max(tirx.min(x, f32(4.0)), f32(-4.0))
    x2 = x * x
    top = f32(-2.72614225801306e-10)
    for c in (2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
              -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02):  # fmt: skip
        top = top * x2 + f32(c)
    bottom = f32(-1.45660718464996e-05)
    for c in (-2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
              -1.42647390514189e-02):  # fmt: skip
        bottom = bottom * x2 + f32(c)
    return x * top / bottom


_UNARY = {
    "relu": lambda x: tirx.max(x, f32(0.0)),
    "sigmoid": lambda x: f32(1.0) / (f32(1.0) + tirx.exp(-x)),
    "tanh": tirx.tanh,
    "exp": tirx.exp,
    "erf": _erf,
    "sqrt": tirx.sqrt,
    "rsqrt": lambda x: f32(1.0) / tirx.sqrt(x),
    "negative": lambda x: -x,
    "abs": tirx.abs,
    "log": tirx.log,
}
_BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": tirx.max,
    "minimum": tirx.min,
    "power": tirx.power,
}


def apply_steps(steps: Sequence[Step], head: Expr, read: Callable[[str], Expr]) -> Expr:
    """The value of the last of ``steps`` when the chain starts from ``head`` (float32).

    ``read(tensor)`` gives the float32 element of an operand at the current position. A cast to
    float16 rounds and comes back: only a store changes the type that is carried on.
    """
    values = [head]
    for step in steps:
        args = [
            read(a) if isinstance(a, str) else f32(a) if isinstance(a, float) else values[a]
            for a in step.args
        ]
        if step.op in _UNARY:
            value = _UNARY[step.op](*args)
        elif step.op in _BINARY:
            value = _BINARY[step.op](*args)
        elif step.op == "clip":
            value = tirx.max(tirx.min(args[0], args[2]), args[1])
        elif step.op == "leaky_relu":
            value = tirx.Select(args[0] > f32(0.0), args[0], args[0] * args[1])
        elif step.op == "cast:float16":
            value = tirx.Cast("float32", tirx.Cast("float16", args[0]))
        else:
            assert step.op == "cast:float32", step
            value = args[0]
        values.append(value)
    return values[-1]
