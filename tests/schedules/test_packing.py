"""Weights as the kernels read them: the index, the numpy packing and the Relax operators agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from optifx_tvm import passes
from optifx_tvm.graph import ConvGraph, Node
from optifx_tvm.schedules.packing import packed_index, packed_weight, packed_weight_shape
from tests.support.groups import GroupBuilder, random_feed

HALF, FLOAT = "float16", "float32"


def conv(dtype: str, depth: int, channels: int, k: Any = 1, **kw) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.conv(b.input(9, 9, depth), channels, k, epilogue=(), **kw))


def transposed(dtype: str, depth: int, channels: int, **kw) -> ConvGraph:
    b = GroupBuilder(dtype)
    return b.graph(b.transposed(b.input(4, 4, depth), channels, **kw))


# Group, packed shape.
PACKINGS = {
    "dense": (conv(FLOAT, 7, 20, 3), (2, 3, 3, 7, 16)),
    "dense half": (conv(HALF, 42, 20, (1, 3)), (3, 1, 3, 2, 8, 32)),
    "dense half, whole blocks": (conv(HALF, 32, 16, (3, 1)), (2, 3, 1, 1, 8, 32)),
    "narrow half": (conv(HALF, 3, 20, 7, s=2), (3, 7, 1, 1, 8, 32)),
    "narrow half, two blocks": (conv(HALF, 4, 8, (2, 9)), (1, 2, 1, 2, 8, 32)),
    "narrow half, dilated rows": (conv(HALF, 2, 9, 3, d=(2, 1)), (2, 3, 1, 1, 8, 32)),
    "few channels, dilated columns half": (conv(HALF, 3, 9, 3, d=2), (2, 3, 3, 1, 8, 32)),
    "grouped": (conv(FLOAT, 12, 18, 3, groups=3), (2, 3, 3, 4, 16)),
    "grouped half": (conv(HALF, 12, 18, 3, groups=3), (2, 3, 3, 4, 16)),
    "depthwise half": (conv(HALF, 18, 18, 3, groups=18), (2, 3, 3, 1, 16)),
    "transposed": (transposed(FLOAT, 6, 20), (2, 2, 2, 6, 16)),
    "transposed half": (transposed(HALF, 42, 20), (3, 2, 2, 2, 8, 32)),
    "transposed half, few channels": (transposed(HALF, 3, 12), (2, 2, 2, 1, 8, 32)),
    "transposed half, windows overlap": (transposed(HALF, 6, 20, k=3), (2, 3, 3, 6, 16)),
    "transposed grouped half": (transposed(HALF, 12, 18, groups=3), (2, 2, 2, 4, 16)),
}


def convolution(graph: ConvGraph) -> tuple[Node, np.ndarray]:
    """The only node and random weights without zeros."""
    (node,) = graph.nodes
    weight = random_feed(graph)[node.weight or ""]
    return node, np.where(weight == 0, np.ones_like(weight), weight)


def element(weight: np.ndarray, node: Node, channel: int, tap: tuple[int, int], k: int):
    """What output ``channel`` multiplies its k-th input channel by."""
    if node.op == "conv2d":
        return weight[(channel, *tap, k)]
    depth, per_group = weight.shape[0] // node.groups, weight.shape[3]
    return weight[(channel // per_group * depth + k, *tap, channel % per_group)]


@pytest.mark.parametrize("name", PACKINGS)
def test_every_element_is_at_its_index_and_the_rest_is_zero(name: str) -> None:
    graph, shape = PACKINGS[name]
    node, weight = convolution(graph)
    assert packed_weight_shape(node, graph) == shape
    packed = packed_weight(weight, node, graph)
    assert (packed.shape, packed.dtype) == (shape, weight.dtype)
    assert packed.flags.c_contiguous
    depth = weight.shape[3] if node.op == "conv2d" else weight.shape[0] // node.groups
    for channel in range(graph.shape(node.name)[3]):
        for tap in np.ndindex(*node.window.kernel):
            for k in range(depth):
                index = packed_index(node, graph, channel, list(tap), k)
                found = packed[tuple(int(i) for i in index)]
                assert found == element(weight, node, channel, tap, k), (channel, tap, k)
    assert np.count_nonzero(packed) == weight.size


def module_of(graph: ConvGraph) -> tvm.IRModule:
    """The group's convolution in Relax, its weight a parameter."""
    (node,) = graph.nodes
    w, dtype = node.window, graph.tensors[node.name].dtype
    shapes = (graph.shape(node.inputs[0]), graph.shape(node.weight or ""))
    x, weight = (
        relax.Var(n, relax.TensorType(s, dtype)) for n, s in zip("xw", shapes, strict=True)
    )
    options = {
        "strides": w.strides,
        "padding": w.padding,
        "dilation": w.dilation,
        "groups": node.groups,
        "data_layout": "NHWC",
    }
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight]):
        with builder.dataflow():
            if node.op == "conv2d":
                y = relax.op.nn.conv2d(x, weight, kernel_layout="OHWI", **options)
            else:
                y = relax.op.nn.conv2d_transpose(x, weight, kernel_layout="IHWO", **options)
            result = builder.emit_output(builder.emit(y))
        builder.emit_func_output(result)
    return builder.get()


def packing_alone(lowered: tvm.IRModule) -> tvm.IRModule:
    """What the caller of the only kernel does with its second parameter before the call."""
    main = lowered["main"]
    bindings = [b for block in main.body.blocks for b in block.bindings]
    is_call = [
        isinstance(b.value, relax.Call) and b.value.op == tvm.ir.Op.get("relax.call_tir")
        for b in bindings
    ]
    assert is_call.count(True) == 1
    at = is_call.index(True)
    builder = relax.BlockBuilder()
    with builder.function("main", list(main.params)):
        with builder.dataflow():
            for binding in bindings[:at]:
                builder.emit_normalized(binding)
            result = builder.emit_output(bindings[at].value.args[1][1])
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("name", PACKINGS)
def test_weights_that_are_parameters_are_packed_to_the_same_bytes(name: str) -> None:
    graph, _ = PACKINGS[name]
    node, weight = convolution(graph)
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    sequence = tvm.transform.Sequential([passes.AFusion(target=target), passes.LowerFusionGroups()])
    alone = packing_alone(sequence(module_of(graph)))
    vm = relax.VirtualMachine(tvm.compile(alone, target), tvm.cpu())
    x = np.zeros(graph.shape(node.inputs[0]), weight.dtype)
    found = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(weight)).numpy()
    wanted = packed_weight(weight, node, graph)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.tobytes() == wanted.tobytes()
