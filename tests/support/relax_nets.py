"""Small Relax modules in the form that CanonicalizeConv makes, and ways to run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from optifx_tvm.errors import ModelError
from optifx_tvm.extract import Extraction, extract_graph
from optifx_tvm.passes import AFusion, RestoreTransposedConvLayout
from tests.support.reference import run_graph

op = relax.op
nn = relax.op.nn


class Net:
    """Emits NHWC operators into one dataflow block; weights are random constants."""

    def __init__(self, dtype: str = "float32", seed: int = 0) -> None:
        self.dtype = dtype
        self.params: list[relax.Var] = []
        self.builder = relax.BlockBuilder()
        self._rng = np.random.default_rng(seed)

    def input(self, *shape: int, name: str = "x", dtype: str | None = None) -> relax.Var:
        var = relax.Var(name, relax.TensorType(shape, dtype or self.dtype))
        self.params.append(var)
        return var

    def module(self, body: Callable[[], relax.Expr | Sequence[relax.Expr]]) -> tvm.IRModule:
        """``body`` emits the block and returns the result or results."""
        builder = self.builder
        with builder.function("main", self.params):
            with builder.dataflow():
                results = body()
                many = isinstance(results, list | tuple)
                outputs = [builder.emit_output(r) for r in (results if many else [results])]
            builder.emit_func_output(outputs if many else outputs[0])
        return relax.transform.CanonicalizeBindings()(builder.get())

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder.emit(expr)

    def array(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> np.ndarray:
        return (self._rng.standard_normal(shape) * scale).astype(dtype or self.dtype)

    def const(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> relax.Expr:
        return relax.const(self.array(*shape, dtype=dtype, scale=scale))

    def conv(self, x, channels, k=1, stride=1, pad=None, dilation=1, groups=1, weight=None, out=None):
        source = int(x.ty.shape[3])
        pad = (k - 1) * dilation // 2 if pad is None else pad
        padding = pad if isinstance(pad, tuple) else (pad,) * 4
        shape = (channels, k, k, source // groups)
        if weight is None:
            weight = self.const(*shape, scale=1 / math.sqrt(math.prod(shape[1:])))
        return self.emit(
            nn.conv2d(
                x, weight, strides=(stride, stride), padding=padding, groups=groups,
                dilation=(dilation, dilation), data_layout="NHWC", kernel_layout="OHWI",
                out_layout="NHWC", out_dtype=out,
            )
        )  # fmt: skip

    def bias(self, x, dtype: str | None = None) -> relax.Var:
        return self.emit(op.add(x, self.const(1, 1, 1, int(x.ty.shape[3]), dtype=dtype)))

    def scale(self, x) -> relax.Var:
        return self.emit(op.multiply(x, self.const(1, 1, 1, int(x.ty.shape[3]))))

    def relu(self, x) -> relax.Var:
        return self.emit(nn.relu(x))

    def conv_relu(self, x, channels, k=1, **kw) -> relax.Var:
        return self.relu(self.bias(self.conv(x, channels, k, **kw)))

    def bn_relu(self, x) -> relax.Var:
        return self.relu(self.bias(self.scale(x)))

    def concat(self, *parts) -> relax.Var:
        return self.emit(op.concat(list(parts), axis=3))

    def add(self, a, b) -> relax.Var:
        return self.emit(op.add(a, b))

    def cast(self, x, dtype: str) -> relax.Var:
        return self.emit(op.astype(x, dtype))


def feed(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    """Random arguments for ``main``."""
    rng = np.random.default_rng(seed)
    types = [param.ty for param in mod["main"].params]
    return [
        rng.standard_normal([int(d) for d in ty.shape]).astype(str(ty.dtype)) for ty in types
    ]


def run(mod: tvm.IRModule, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``main`` compiled by plain TVM for llvm."""
    executable = tvm.compile(RestoreTransposedConvLayout()(mod), "llvm")
    vm = relax.VirtualMachine(executable, tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(a) for a in args])
    results = [result] if hasattr(result, "numpy") else list(result)
    return [r.numpy() for r in results]


def extract(mod: tvm.IRModule) -> Extraction:
    return extract_graph(mod)


def interpret(mod: tvm.IRModule, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of ``main`` computed from its ConvGraph by the numpy reference.

    Needs every output to be a node of the graph.
    """
    found = extract_graph(mod)
    graph = found.graph
    given = dict(zip(mod["main"].params, args, strict=True))
    values = {}
    for name in (*graph.inputs, *graph.params):
        value = found.values[name]
        array = given[value] if isinstance(value, relax.Var) else value.value.numpy()
        values[name] = array.reshape(graph.shape(name))
    results = run_graph(graph, values)
    if any(node.op == "opaque" for node in graph.nodes):
        raise ModelError("the reference can't run opaque nodes: use a model without them")
    return [results[name] for name in graph.outputs]


def fuse(mod: tvm.IRModule, planner: Callable) -> tvm.IRModule:
    """The outlined module, checked to be well-formed."""
    fused = AFusion(target="llvm", planner=planner)(mod)
    assert relax.analysis.well_formed(fused)
    return fused


def group_functions(mod: tvm.IRModule) -> dict[str, relax.Function]:
    """The functions that AFusion made, by name."""
    return {
        global_var.name_hint: func
        for global_var, func in mod.functions_items()
        if func.attrs is not None and "optifx.group" in func.attrs
    }
