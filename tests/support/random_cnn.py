"""Random small CNNs as ONNX graphs, the same for the same seed, for differential tests.

Sizes, strides, dilations, paddings and channel counts are odd on purpose. Values have several
readers, are outputs and intermediates at once, are joined with themselves and cut again. Weights
keep the magnitude of activations; a graph with an output that hardly varies is drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime

from tests.support.onnx_canvas import Canvas
from tests.support.random_moves import MOVES, head
from tests.support.random_windows import width

OPSETS = (9, 11, 13, 17, 20)


@dataclass(frozen=True)
class RandomCnn:
    """A model, what goes in and what must come out."""

    model: onnx.ModelProto
    feed: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    """Output -> value by onnxruntime, fp32."""


def random_cnn(seed: int) -> RandomCnn:
    """The CNN of a seed. Every output is finite and varies."""
    for attempt in range(100):
        model = _draw(f"{seed}/{attempt}")
        feed = random_feed(model, seed)
        expected = run_onnxruntime(model, feed)
        if all(is_lively(value) for value in expected.values()):
            return RandomCnn(model, feed, expected)
    raise AssertionError(f"seed {seed}: 100 graphs with an output that vanishes")


def _draw(seed: str) -> onnx.ModelProto:
    canvas = Canvas(seed, OPSETS)
    rng = canvas.rng
    shape = (rng.choice((1, 1, 2, 3)), width(canvas), rng.randint(5, 20), rng.randint(5, 20))
    canvas.input(shape)
    if rng.random() < 0.2:
        canvas.input(rng.choice((shape, (shape[0], shape[1], 1, 1), (1, *shape[1:]))))
    moves, weights = zip(*MOVES, strict=True)
    for _ in range(rng.randint(3, 10)):
        rng.choices(moves, weights)[0](canvas, canvas.pick())
    if rng.random() < 0.2:
        head(canvas, canvas.pick())
    return canvas.model()


def random_feed(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Normally distributed inputs."""
    rng = np.random.default_rng(seed)
    feed = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        feed[value.name] = rng.standard_normal(shape).astype("float32")
    return feed


def run_onnxruntime(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs, computed by one thread, with onnxruntime's own graph rewriting off."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def is_lively(value: np.ndarray) -> bool:
    """Is it finite, and does it vary enough for a relative error to mean something?"""
    if not np.isfinite(value).all() or np.abs(value).max() > 1e3:
        return False
    return np.abs(value).max() > 0.05 and (value.size < 4 or value.std() > 0.02)
