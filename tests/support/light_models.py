"""The ONNX graphs inside the ``onnx`` package, with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

NAMES = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)


def path(name: str) -> Path:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return folder / f"light_{name}.onnx"


def randomized(name: str, seed: int = 0) -> onnx.ModelProto:
    """The graph with a random initializer for each ConstantOfShape (whose one value makes every
    output the same), and without a final softmax (which saturates)."""
    model = onnx.load(str(path(name)))
    rng = np.random.default_rng(seed)
    shapes = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape = [int(extent) for extent in shapes[node.input[0]]]
        if len(shape) > 1:
            values = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            values = rng.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(
            numpy_helper.from_array(values.astype("float32"), node.output[0])
        )
    if kept[-1].op_type == "Softmax":
        last = kept.pop()
        del model.graph.output[:]
        output = helper.make_tensor_value_info(last.input[0], TensorProto.FLOAT, None)
        model.graph.output.append(output)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def run_onnx(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, feeds)
