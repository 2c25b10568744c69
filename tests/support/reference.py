"""A plain numpy interpreter of ConvGraph in float64: the unfused reference for tile programs."""

from __future__ import annotations

import math

import numpy as np

from optifx_tvm.graph import ConvGraph, Node, Step

_erf = np.vectorize(math.erf, otypes=[np.float64])
_UNARY = {
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "tanh": np.tanh,
    "exp": np.exp,
    "erf": _erf,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "negative": np.negative,
    "abs": np.abs,
    "log": np.log,
}
_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
}


def run_steps(steps: tuple[Step, ...], head: np.ndarray, values: dict[str, np.ndarray]):
    """Apply element-wise steps."""
    chain = [head]
    for step in steps:
        args = [
            values[a] if isinstance(a, str) else a if isinstance(a, float) else chain[a]
            for a in step.args
        ]
        if step.op in _UNARY:
            chain.append(_UNARY[step.op](*args))
        elif step.op in _BINARY:
            chain.append(_BINARY[step.op](*args))
        elif step.op == "clip":
            chain.append(np.clip(args[0], args[1], args[2]))
        elif step.op == "leaky_relu":
            chain.append(np.where(args[0] > 0, args[0], args[0] * args[1]))
        elif step.op == "cast:float16":
            chain.append(args[0].astype(np.float16).astype(np.float64))
        else:
            chain.append(args[0])
    return chain[-1]


def _windows(x: np.ndarray, node: Node, shape: tuple[int, ...], fill: float) -> np.ndarray:
    """(N, H, W, kh, kw, C): what each output position reads."""
    w = node.window
    (kh, kw), (sh, sw), (dh, dw) = w.kernel, w.strides, w.dilation
    top, left = w.padding[:2]
    height = (shape[1] - 1) * sh + (kh - 1) * dh + 1
    width = (shape[2] - 1) * sw + (kw - 1) * dw + 1
    bottom, right = max(height - top - x.shape[1], 0), max(width - left - x.shape[2], 0)
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill)
    rows = np.arange(shape[1])[:, None] * sh + np.arange(kh)[None] * dh
    cols = np.arange(shape[2])[:, None] * sw + np.arange(kw)[None] * dw
    return x[:, rows[:, None, :, None], cols[None, :, None, :], :]


def _conv(node: Node, x: np.ndarray, weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    groups = node.groups
    taken = _windows(x, node, shape, 0.0)
    parts_in = np.split(taken, groups, axis=5)
    parts_w = np.split(weight, groups, axis=0)
    parts = [
        np.einsum("nhwyxc,oyxc->nhwo", a, b, optimize=True)
        for a, b in zip(parts_in, parts_w, strict=True)
    ]
    return np.concatenate(parts, axis=3)


def _conv_transpose(node: Node, x: np.ndarray, weight: np.ndarray, shape: tuple[int, ...]):
    w, groups = node.window, node.groups
    full_h = (x.shape[1] - 1) * w.strides[0] + (w.kernel[0] - 1) * w.dilation[0] + 1
    full_w = (x.shape[2] - 1) * w.strides[1] + (w.kernel[1] - 1) * w.dilation[1] + 1
    full = np.zeros((shape[0], full_h + shape[1], full_w + shape[2], shape[3]))
    inputs, weights = np.split(x, groups, axis=3), np.split(weight, groups, axis=0)
    for ky in range(w.kernel[0]):
        for kx in range(w.kernel[1]):
            part = np.concatenate(
                [a @ b[:, ky, kx, :] for a, b in zip(inputs, weights, strict=True)], axis=3
            )
            y0, x0 = ky * w.dilation[0], kx * w.dilation[1]
            y1 = y0 + (x.shape[1] - 1) * w.strides[0] + 1
            x1 = x0 + (x.shape[2] - 1) * w.strides[1] + 1
            full[:, y0 : y1 : w.strides[0], x0 : x1 : w.strides[1]] += part
    top, left = w.padding[:2]
    return full[:, top : top + shape[1], left : left + shape[2]]


def _avg_pool(node: Node, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    w = node.window
    total = _windows(x, node, shape, 0.0).sum(axis=(3, 4))
    ones = np.ones((1, *x.shape[1:3], 1))
    if w.count_include_pad:
        top, left, bottom, right = w.padding
        ones = np.pad(ones, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=1.0)
        bare = Node("n", "avg_pool2d", ("x",), type(w)(w.kernel, w.strides, w.dilation))
        return total / _windows(ones, bare, (1, *shape[1:3], 1), 0.0).sum(axis=(3, 4))
    return total / _windows(ones, node, (1, *shape[1:3], 1), 0.0).sum(axis=(3, 4))


def run_graph(graph: ConvGraph, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All node results (float64, rounded to the tensor's dtype) from inputs and params."""
    values = {name: np.asarray(v, np.float64) for name, v in feed.items()}
    for node in graph.nodes:
        shape = graph.shape(node.name)
        if node.op == "concat":
            head = np.concatenate([values[t] for t in node.inputs], axis=3)
        else:
            head = run_steps(node.prologue, values[node.inputs[0]], values)
            if node.op == "conv2d":
                head = _conv(node, head, values[node.weight or ""], shape)
            elif node.op == "conv2d_transpose":
                head = _conv_transpose(node, head, values[node.weight or ""], shape)
            elif node.op == "max_pool2d":
                head = _windows(head, node, shape, -np.inf).max(axis=(3, 4))
            elif node.op == "avg_pool2d":
                head = _avg_pool(node, head, shape)
        result = run_steps(node.epilogue, head, values)
        values[node.name] = result.astype(graph.tensors[node.name].dtype).astype(np.float64)
    return {node.name: values[node.name] for node in graph.nodes}
