"""Draws ONNX graphs node by node, keeping shapes, with random choices from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph; images are NCHW."""

    name: str
    shape: Shape

    @property
    def channels(self) -> int:
        """Extent of axis 1."""
        return self.shape[1]

    @property
    def size(self) -> Shape:
        """Rows and columns."""
        return self.shape[2:]


class Canvas:
    """A graph in the making, and the random numbers that it is made with."""

    def __init__(self, seed: str, opsets: Sequence[int]) -> None:
        self.rng = random.Random(seed)
        self.arrays = np.random.default_rng(self.rng.getrandbits(64))
        self.opset = self.rng.choice(opsets)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[Value] = []
        self._values: dict[str, Value] = {}
        self._read: set[str] = set()

    def input(self, shape: Shape) -> Value:
        """A new network input."""
        value = Value(f"data{len(self._inputs)}", shape)
        self._inputs.append(value)
        self._values[value.name] = value
        return value

    def images(self, wanted: Callable[[Value], bool] = lambda _: True) -> list[Value]:
        """The four-dimensional values so far, in the order in which they were made."""
        return [v for v in self._values.values() if len(v.shape) == 4 and wanted(v)]

    def pick(self) -> Value:
        """An image, the latest ones more often."""
        images = self.images()
        if self.rng.random() < 0.6:
            return images[-1]
        return self.rng.choice(images[-6:])

    def shuffled(self, *values: Value) -> list[Value]:
        """The values in random order."""
        found = list(values)
        self.rng.shuffle(found)
        return found

    def emit(self, op: str, *inputs: Value | str, shape: Shape | None = None, **attrs) -> Value:
        """A node with one output, of the first input's shape unless given."""
        if shape is None:
            first = inputs[0]
            assert isinstance(first, Value)
            shape = first.shape
        return self.emit_many(op, inputs, [shape], **attrs)[0]

    def emit_many(
        self, op: str, inputs: Sequence[Value | str], shapes: Sequence[Shape], **attrs
    ) -> list[Value]:
        """A node with one output a shape."""
        names = [x.name if isinstance(x, Value) else x for x in inputs]
        values = [Value(f"v{len(self._values) + i}", shape) for i, shape in enumerate(shapes)]
        outputs = [value.name for value in values]
        name = f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, names, outputs, name=name, **attrs))
        self._read.update(names)
        self._values.update({value.name: value for value in values})
        return values

    def const(self, array: np.ndarray | float, dtype: str = "float32") -> str:
        """Name of a new initializer."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> str:
        """Name of a new initializer of normally distributed numbers."""
        return self.const(mean + scale * self.arrays.standard_normal(shape))

    def model(self) -> onnx.ModelProto:
        """The graph: values that nothing reads are outputs, a few intermediates are so too; now
        and then nodes are left whose results nobody wants."""
        made = [self._values[name] for node in self._nodes for name in node.output]
        unread = [value for value in made if value.name not in self._read]
        outputs = unread if self.rng.random() < 0.9 else unread[-1:]
        also = [v for v in made if v.name in self._read and self.rng.random() < 0.08]
        wanted = {value.name for value in (*outputs, *also)}
        infos = {name: _info(value) for name, value in self._values.items()}
        graph = helper.make_graph(
            self._nodes,
            "random_cnn",
            [infos[value.name] for value in self._inputs],
            [infos[value.name] for value in made if value.name in wanted],
            self._weights,
            value_info=[infos[value.name] for value in made if value.name not in wanted],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model)
        return model


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, TensorProto.FLOAT, value.shape)
