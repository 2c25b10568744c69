"""ConvGraph: a read-only view of the fusible part of one Relax dataflow block.

A node is one *stage*: a region operator (convolution, pooling), a concat or a chain of element-wise
operators, together with the element-wise *prologue* applied to its input and the *epilogue* applied
to its result. It produces exactly one tensor, which bears its name. Activations are NHWC.

The same class describes a whole network and a single fusion group: a group is the sub-graph whose
``inputs`` are the activations that it reads and whose ``outputs`` are what it must write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

DTYPES = ("float32", "float16")
"""Element types that a network may compute in."""
DTYPE_ATTR = "optifx.dtype"
"""Attribute of a module: the one of these that it is to compute in."""
REGION_OPS = ("conv2d", "conv2d_transpose", "max_pool2d", "avg_pool2d")
FUSIBLE_OPS = (*REGION_OPS, "elementwise", "concat")
UNARY_OPS = ("relu", "sigmoid", "tanh", "exp", "erf", "sqrt", "rsqrt", "negative", "abs", "log")
BINARY_OPS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: activations are NHWC; per-channel constants have shape (C,); weights see Node."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def bytes(self) -> int:
        """Size in bytes."""
        size = {"float32": 4, "float16": 2}[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Window:
    """The spatial window of a region operator; pairs are (height, width)."""

    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(top, left, bottom, right). Transposed convolution: as in ONNX, cropped from the result."""
    count_include_pad: bool = False
    """Average pooling only: does the divisor count padding positions?"""


@dataclass(frozen=True)
class Step:
    """One element-wise operator of a prologue or epilogue.

    ``args``: an int is an earlier value (0: what the chain starts from, k: result of the k-th
    step, counted from 1), a str is a tensor (same shape as the value, or (C,), or (N, 1, 1, C)),
    a float is a constant. ``op`` is in UNARY_OPS, BINARY_OPS, or "clip" (value, low, high),
    "leaky_relu" (value, slope), "cast:float16", "cast:float32". The last step is the result.
    """

    op: str
    args: tuple[int | str | float, ...]

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors it reads besides earlier values."""
        return tuple(a for a in self.args if isinstance(a, str))


@dataclass(frozen=True)
class Node:
    """One stage. Weights: conv2d OHWI (O, kh, kw, I/groups); conv2d_transpose IHWO
    (I, kh, kw, O/groups). Pooling, element-wise and concat have none."""

    name: str
    op: str
    """One of FUSIBLE_OPS, or "opaque": never fused, it only carries dependences."""
    inputs: tuple[str, ...]
    """What the operator reads: one tensor; concat: its parts in order; opaque: any number."""
    window: Window = Window()
    weight: str | None = None
    groups: int = 1
    prologue: tuple[Step, ...] = ()
    """Applied to inputs[0] before padding."""
    epilogue: tuple[Step, ...] = ()
    source: tuple[str, ...] = field(default=(), compare=False)
    """The operators of the model that it stands for, for messages; not part of its identity."""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Tensors read by the prologue and the epilogue, in order, without repetition."""
        steps = (*self.prologue, *self.epilogue)
        return tuple(dict.fromkeys(t for step in steps for t in step.tensors))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Every tensor it reads (activations and parameters), in order, without repetition."""
        weight = (self.weight,) if self.weight else ()
        return tuple(dict.fromkeys((*self.inputs, *weight, *self.operands)))


@dataclass(frozen=True)
class ConvGraph:
    """Nodes in topological order with the tensors they read and write.

    ``inputs`` are activations from outside, ``params`` weights and per-channel constants,
    ``outputs`` the node results that are read outside.
    """

    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorSpec]
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Node by name (the name of the tensor that it produces)."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor name -> names of the nodes that read it, in topological order."""
        found: dict[str, list[str]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in node.reads:
                found[name].append(node.name)
        return {name: tuple(readers) for name, readers in found.items()}

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def _params(self) -> frozenset[str]:
        return frozenset(self.params)

    def producers(self, name: str) -> tuple[str, ...]:
        """Nodes whose results node ``name`` reads."""
        return tuple(t for t in self.by_name[name].reads if t in self.by_name)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.tensors[tensor].shape

    def subgraph(self, names: Iterable[str]) -> ConvGraph:
        """The group made of these nodes: what it reads from outside becomes inputs and params,
        what is read outside it becomes outputs (all in deterministic order)."""
        wanted = set(names)
        nodes = tuple(self.nodes[i] for i in sorted(self._positions[name] for name in wanted))
        reads = tuple(dict.fromkeys(t for node in nodes for t in node.reads if t not in wanted))
        params = tuple(t for t in reads if t in self._params)
        outputs = tuple(
            node.name
            for node in nodes
            if node.name in self.outputs or any(c not in wanted for c in self.consumers[node.name])
        )
        return ConvGraph(
            nodes=nodes,
            tensors={t: self.tensors[t] for t in (*reads, *(n.name for n in nodes))},
            inputs=tuple(t for t in reads if t not in set(params)),
            params=params,
            outputs=outputs,
        )

    def canonical(self) -> tuple[ConvGraph, Mapping[str, str]]:
        """The same graph with names that depend on structure only (x0.., w0.., n0..), and the
        map from old to new names. Equal groups of a network become equal values."""
        names = {t: f"x{i}" for i, t in enumerate(self.inputs)}
        names |= {t: f"w{i}" for i, t in enumerate(self.params)}
        names |= {node.name: f"n{i}" for i, node in enumerate(self.nodes)}

        def steps(old: tuple[Step, ...]) -> tuple[Step, ...]:
            return tuple(
                Step(s.op, tuple(names[a] if isinstance(a, str) else a for a in s.args))
                for s in old
            )

        nodes = tuple(
            replace(
                node,
                name=names[node.name],
                inputs=tuple(names[t] for t in node.inputs),
                weight=names[node.weight] if node.weight else None,
                prologue=steps(node.prologue),
                epilogue=steps(node.epilogue),
                source=(),
            )
            for node in self.nodes
        )
        graph = ConvGraph(
            nodes=nodes,
            tensors={names[t]: replace(s, name=names[t]) for t, s in self.tensors.items()},
            inputs=tuple(names[t] for t in self.inputs),
            params=tuple(names[t] for t in self.params),
            outputs=tuple(names[t] for t in self.outputs),
        )
        return graph, names

    def to_json(self) -> str:
        """Lossless text; see from_json."""
        value = {
            "nodes": [
                {
                    **_fields(node),
                    "window": _fields(node.window),
                    "prologue": [_fields(step) for step in node.prologue],
                    "epilogue": [_fields(step) for step in node.epilogue],
                }
                for node in self.nodes
            ],
            "tensors": [_fields(spec) for spec in self.tensors.values()],
            "inputs": self.inputs,
            "params": self.params,
            "outputs": self.outputs,
        }
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ConvGraph:
        """Inverse of to_json."""
        value = json.loads(text)

        def steps(items: list[dict]) -> tuple[Step, ...]:
            return tuple(Step(i["op"], tuple(i["args"])) for i in items)

        def window(item: dict[str, Any]) -> Window:
            fields: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in item.items()
            }
            return Window(**fields)

        nodes = tuple(
            Node(
                name=n["name"],
                op=n["op"],
                inputs=tuple(n["inputs"]),
                window=window(n["window"]),
                weight=n["weight"],
                groups=n["groups"],
                prologue=steps(n["prologue"]),
                epilogue=steps(n["epilogue"]),
                source=tuple(n["source"]),
            )
            for n in value["nodes"]
        )
        tensors = {
            t["name"]: TensorSpec(t["name"], tuple(t["shape"]), t["dtype"])
            for t in value["tensors"]
        }
        return ConvGraph(
            nodes=nodes,
            tensors=tensors,
            inputs=tuple(value["inputs"]),
            params=tuple(value["params"]),
            outputs=tuple(value["outputs"]),
        )

    @cached_property
    def structural_hash(self) -> str:
        """Hex digest that is equal for equal structures, whatever the names."""
        return hashlib.sha256(self.canonical()[0].to_json().encode()).hexdigest()[:16]


def _fields(value: TensorSpec | Window | Step | Node) -> dict[str, object]:
    """Field -> value, not recursive (much faster than ``asdict``, and hashing needs it often)."""
    return {f.name: getattr(value, f.name) for f in fields(value)}
