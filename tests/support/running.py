"""Runs whole networks and pieces of them."""

from __future__ import annotations

import inspect

import numpy as np
import onnxruntime
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from optifx_tvm import zoo
from optifx_tvm.zoo.weights import random_weights

RELATIVE_ERROR = 1e-5


def image(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32")


def run_onnx(module: tvm.IRModule, *data: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(zoo.to_onnx(module).SerializeToString(), options)
    (entry,) = session.get_inputs()
    return [session.run(None, {entry.name: x})[0] for x in data]


def run_tvm(module: tvm.IRModule, data: np.ndarray) -> np.ndarray:
    pipeline = relax.get_default_pipeline(tvm.target.Target("llvm"))
    machine = relax.VirtualMachine(tvm.compile(module, "llvm", relax_pipeline=pipeline), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def module_of(net: nn.Module, shape: tuple[int, ...], seed: int = 0):
    """A piece of a network with random weights: (module, parameters by name)."""
    (argument,) = inspect.signature(net.forward).parameters
    exported, parameters = net.export_tvm(
        spec={"forward": {argument: nn.spec.Tensor(shape, "float32")}}
    )
    module = tvm.IRModule({"main": exported["forward"].with_attr("global_symbol", "main")})
    values = random_weights({k: tuple(int(n) for n in p.shape) for k, p in parameters}, seed)
    tensors = {key: tvm.runtime.tensor(value) for key, value in values.items()}
    return relax.transform.BindParams("main", tensors)(module), values
