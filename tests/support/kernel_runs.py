"""Arguments and expected results of a group's kernel, and runs of it on the CPU."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from optifx_tvm.graph import ConvGraph
from optifx_tvm.schedules.packing import packed_weight
from tests.support.groups import random_feed
from tests.support.reference import run_graph

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
"""Relative L2 error allowed."""


def kernel_arguments(graph: ConvGraph, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Inputs and params as the kernel takes them (weights packed), then outputs full of NaN."""
    weights = {node.weight: node for node in graph.nodes if node.weight}
    given = [
        packed_weight(feed[t], weights[t], graph) if t in weights else feed[t]
        for t in (*graph.inputs, *graph.params)
    ]
    wanted = [np.full(graph.shape(t), np.nan, graph.tensors[t].dtype) for t in graph.outputs]
    return given + wanted


def error(graph: ConvGraph, args: list[np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest relative L2 error of the outputs at the end of ``args``."""
    results = args[len(args) - len(graph.outputs) :]
    return max(
        float(np.linalg.norm(r.astype(np.float64) - expected[t]) / np.linalg.norm(expected[t]))
        for r, t in zip(results, graph.outputs, strict=True)
    )


def feed_and_reference(graph: ConvGraph) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random inputs and params, and what the unfused reference makes of them."""
    feed = random_feed(graph)
    return feed, run_graph(graph, feed)


def run_on_cpu(func: tirx.PrimFunc, args: list[np.ndarray], target: Target | str = "llvm") -> None:
    """Compile a kernel for the CPU and run it on ``args``, outputs written in place."""
    tensors = [tvm.runtime.tensor(a) for a in args]
    tvm.compile(func, target=target)[func.attrs["global_symbol"]](*tensors)
    for array, tensor in zip(args, tensors, strict=True):
        array[...] = tensor.numpy()
