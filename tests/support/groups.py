"""Small fusion groups, written by hand or drawn at random, and runs of their tile programs."""

from __future__ import annotations

import numpy as np

from optifx_tvm.graph import ConvGraph, Node, Step, TensorSpec, Window

RELU = Step("relu", (0,))


class GroupBuilder:
    """Builds a ConvGraph operator by operator; every method returns the tensor's name."""

    def __init__(self, dtype: str = "float32", batch: int = 1) -> None:
        self.dtype, self.batch = dtype, batch
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorSpec] = {}
        self.inputs: list[str] = []
        self.params: list[str] = []

    def _add(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> str:
        self.tensors[name] = TensorSpec(name, shape, dtype or self.dtype)
        return name

    def input(self, height: int, width: int, channels: int) -> str:
        name = self._add(f"in{len(self.inputs)}", (self.batch, height, width, channels))
        self.inputs.append(name)
        return name

    def param(self, *shape: int, dtype: str | None = None) -> str:
        name = self._add(f"p{len(self.params)}", shape, dtype)
        self.params.append(name)
        return name

    def bias(self, channels: int) -> Step:
        return Step("add", (0, self.param(channels, dtype="float32")))

    def _node(self, op: str, inputs: tuple[str, ...], shape: tuple[int, ...], **kw) -> str:
        name = self._add(f"t{len(self.nodes)}", shape)
        self.nodes.append(Node(name, op, inputs, **kw))
        return name

    def _window(self, x: str, w: Window, ceil: bool = False) -> tuple[int, int]:
        size = self.tensors[x].shape[1:3]
        out = []
        for i in range(2):
            span = size[i] + w.padding[i] + w.padding[i + 2] - (w.kernel[i] - 1) * w.dilation[i] - 1
            n = (-(-span // w.strides[i]) if ceil else span // w.strides[i]) + 1
            if ceil and (n - 1) * w.strides[i] >= size[i] + w.padding[i]:
                n -= 1
            out.append(n)
        return out[0], out[1]

    def conv(
        self, x: str, channels: int, k=1, s=1, d=1, pad=None, groups=1, prologue=(), epilogue=None
    ) -> str:
        kernel = k if isinstance(k, tuple) else (k, k)
        strides = s if isinstance(s, tuple) else (s, s)
        dilation = d if isinstance(d, tuple) else (d, d)
        if pad is None:
            ph, pw = (kernel[0] - 1) * dilation[0] // 2, (kernel[1] - 1) * dilation[1] // 2
            pad = (ph, pw, ph, pw)
        w = Window(kernel, strides, dilation, pad)
        source = self.tensors[x].shape
        weight = self.param(channels, *kernel, source[3] // groups)
        epilogue = (self.bias(channels), Step("relu", (1,))) if epilogue is None else epilogue
        return self._node(
            "conv2d", (x,), (self.batch, *self._window(x, w), channels), window=w, weight=weight,
            groups=groups, prologue=prologue, epilogue=epilogue,
        )  # fmt: skip

    def depthwise(self, x: str, k=3, s=1, **kw) -> str:
        channels = self.tensors[x].shape[3]
        return self.conv(x, channels, k, s, groups=channels, **kw)

    def transposed(
        self, x: str, channels: int, k=2, s=2, d=1, pad=(0, 0, 0, 0), extra=0, groups=1
    ) -> str:
        source = self.tensors[x].shape
        size = [
            (source[1 + i] - 1) * s + (k - 1) * d + 1 - pad[i] - pad[i + 2] + extra
            for i in range(2)
        ]
        w = Window((k, k), (s, s), (d, d), pad)
        weight = self.param(source[3], k, k, channels // groups)
        shape = (self.batch, size[0], size[1], channels)
        return self._node(
            "conv2d_transpose", (x,), shape, window=w, weight=weight, groups=groups,
            epilogue=(self.bias(channels),),
        )  # fmt: skip

    def pool(
        self, x: str, kind="max", k=3, s=2, pad=(0, 0, 0, 0), ceil=False, d=1, include=False, **kw
    ) -> str:
        kernel = k if isinstance(k, tuple) else (k, k)
        w = Window(kernel, (s, s), (d, d), pad, include)
        shape = (self.batch, *self._window(x, w, ceil), self.tensors[x].shape[3])
        return self._node(f"{kind}_pool2d", (x,), shape, window=w, **kw)

    def eltwise(self, x: str, *epilogue: Step) -> str:
        return self._node("elementwise", (x,), self.tensors[x].shape, epilogue=tuple(epilogue))

    def concat(self, *parts: str, epilogue: tuple[Step, ...] = ()) -> str:
        shape = self.tensors[parts[0]].shape
        channels = sum(self.tensors[p].shape[3] for p in parts)
        return self._node("concat", parts, (*shape[:3], channels), epilogue=epilogue)

    def graph(self, *outputs: str) -> ConvGraph:
        wanted = outputs or (self.nodes[-1].name,)
        ordered = tuple(n.name for n in self.nodes if n.name in wanted)
        return ConvGraph(
            tuple(self.nodes), dict(self.tensors), tuple(self.inputs), tuple(self.params), ordered
        )


def random_feed(graph: ConvGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs and params; weights scaled so that results keep their magnitude."""
    rng = np.random.default_rng(seed)
    weights = {n.weight: n for n in graph.nodes if n.weight}
    feed = {}
    for name in (*graph.inputs, *graph.params):
        spec = graph.tensors[name]
        value = rng.standard_normal(spec.shape)
        if name in weights:
            fan = np.prod(spec.shape[1:]) if weights[name].op == "conv2d" else spec.shape[0]
            value = value / np.sqrt(fan)
        feed[name] = value.astype(spec.dtype)
    return feed
