"""Activations as ONNX operators or as the chains of operators that exporters write."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.support.onnx_canvas import Canvas, Value

Move = Callable[[Canvas, Value], Value]
"""Reads an image, makes nodes, returns the last one's value."""


def activation(canvas: Canvas, x: Value) -> Value:
    """A random activation of ``x``."""
    return canvas.rng.choice(_ACTIVATIONS)(canvas, x)


def _plain(op: str, **attrs: float) -> Move:
    return lambda canvas, x: canvas.emit_many(op, [x], [x.shape], **attrs)[0]


def _clip(low: float | None, high: float | None) -> Move:
    def emit(canvas: Canvas, x: Value) -> Value:
        if canvas.opset < 11:
            pairs = {"min": low, "max": high}.items()
            return canvas.emit_many(
                "Clip", [x], [x.shape], **{key: b for key, b in pairs if b is not None}
            )[0]
        bounds = ["" if b is None else canvas.const(b) for b in (low, high)]
        return canvas.emit("Clip", x, *bounds)

    return emit


def _silu(canvas: Canvas, x: Value) -> Value:
    return canvas.emit("Mul", *canvas.shuffled(x, canvas.emit("Sigmoid", x)))


def _hard_swish(canvas: Canvas, x: Value) -> Value:
    if canvas.opset >= 14 and canvas.rng.random() < 0.5:
        return canvas.emit("HardSwish", x)
    return canvas.emit("Mul", x, canvas.emit("HardSigmoid", x, alpha=1 / 6, beta=0.5))


def _gelu(canvas: Canvas, x: Value) -> Value:
    if canvas.opset >= 20 and canvas.rng.random() < 0.5:
        return canvas.emit("Gelu", x, approximate=canvas.rng.choice(("none", "tanh")))
    scaled = canvas.emit("Div", x, canvas.const(math.sqrt(2.0)))
    shifted = canvas.emit("Add", canvas.emit("Erf", scaled), canvas.const(1.0))
    return canvas.emit("Mul", canvas.emit("Mul", x, shifted), canvas.const(0.5))


def _prelu(canvas: Canvas, x: Value) -> Value:
    slope = canvas.rng.choice(((x.channels, 1, 1), (1,)))
    return canvas.emit("PRelu", x, canvas.normal(*slope, scale=0.3))


def _square_root(canvas: Canvas, x: Value) -> Value:
    return canvas.emit("Sqrt", canvas.emit("Abs", x))


_ACTIVATIONS: tuple[Move, ...] = (
    *(_plain("Relu"),) * 4,
    *(_clip(0.0, 6.0),) * 2,
    _clip(-0.5, 0.7),
    _clip(None, 0.5),
    _clip(-0.25, None),
    _plain("LeakyRelu", alpha=0.1),
    _plain("LeakyRelu", alpha=-0.2),
    _plain("Sigmoid"),
    _plain("HardSigmoid"),
    _plain("HardSigmoid", alpha=0.3, beta=0.4),
    _plain("Tanh"),
    _plain("Elu", alpha=0.7),
    _plain("Softplus"),
    _plain("Neg"),
    *(_silu, _hard_swish, _gelu, _prelu, _square_root),
)
