"""Write a SqueezeNet with seeded random weights, and an input for it.

The ``onnx`` package ships the graph with constants in place of the weights, so that every output
would be equal. The weights are drawn here, scaled to keep activations in range, and the final
softmax, which random weights saturate, is cut off.

Usage: make_squeezenet.py MODEL.onnx INPUTS.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def with_random_weights(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Replace each ConstantOfShape by a float32 initializer of its shape, and cut the softmax."""
    graph = model.graph
    shapes = {t.name: numpy_helper.to_array(t).tolist() for t in graph.initializer}
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = [int(extent) for extent in shapes[node.input[0]]]
        if len(shape) > 1:  # He initialisation
            weight = rng.standard_normal(shape) * np.sqrt(2.0 / np.prod(shape[1:]))
        else:
            weight = rng.uniform(-0.1, 0.1, shape)
        graph.initializer.append(numpy_helper.from_array(weight.astype("float32"), node.output[0]))
    if kept[-1].op_type == "Softmax":
        graph.output[0].name = kept.pop().input[0]  # a softmax keeps type and shape
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    for value in [value for value in graph.input if value.name in shapes]:
        graph.input.remove(value)
    model.ir_version = 4  # the first one in which weights need not be inputs as well
    return model


def main() -> None:
    model_path, inputs_path = sys.argv[1:]
    rng = np.random.default_rng(0)
    light = Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"
    model = with_random_weights(onnx.load(light), rng)
    onnx.checker.check_model(model)
    onnx.save(model, model_path)
    inputs = {
        value.name: rng.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype("float32")
        for value in model.graph.input
    }
    np.savez(inputs_path, allow_pickle=False, **inputs)
    print(f"wrote {model_path} and {inputs_path}")


if __name__ == "__main__":
    main()
