"""Small Relax modules in the form that CanonicalizeConv makes, and ways to run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from optifx_tvm.extract import extract_graph
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

    def conv(
        self, x, channels, k=1, stride=1, pad=None, dilation=1, groups=1, weight=None, out=None
    ):
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

    def depthwise(self, x, k=3, stride=1) -> relax.Var:
        channels = int(x.ty.shape[3])
        return self.conv(x, channels, k, stride=stride, groups=channels)

    def pool(self, x, kind="max", k=3, stride=2, pad=0, ceil=False, **kw) -> relax.Var:
        call = nn.max_pool2d if kind == "max" else nn.avg_pool2d
        padding = pad if isinstance(pad, tuple) else (pad,) * 4
        return self.emit(
            call(x, (k, k), (stride, stride), padding, ceil_mode=ceil, layout="NHWC", **kw)
        )


def feed(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    """Random arguments for ``main``."""
    rng = np.random.default_rng(seed)
    types = [param.ty for param in mod["main"].params]
    return [rng.standard_normal([int(d) for d in ty.shape]).astype(str(ty.dtype)) for ty in types]


def run(mod: tvm.IRModule, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``main`` compiled by plain TVM for llvm."""
    executable = tvm.compile(RestoreTransposedConvLayout()(mod), "llvm")
    vm = relax.VirtualMachine(executable, tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(a) for a in args])
    results = [result] if hasattr(result, "numpy") else list(result)
    return [r.numpy() for r in results]


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
    assert all(node.op != "opaque" for node in graph.nodes), "the reference has no opaque nodes"
    results = run_graph(graph, values)
    return [results[name] for name in graph.outputs]


def stages(mod: tvm.IRModule) -> dict[str, tuple]:
    """Node name -> (op, inputs, prologue ops, epilogue ops)."""
    return {
        node.name: (
            node.op,
            node.inputs,
            [step.op for step in node.prologue],
            [step.op for step in node.epilogue],
        )
        for node in extract_graph(mod).graph.nodes
    }


def stage_kinds(mod: tvm.IRModule) -> list[tuple[str, list[str], list[str]]]:
    """``stages`` without names and inputs."""
    return [(kind, before, after) for kind, _, before, after in stages(mod).values()]


def check_interpreted(mod, tolerance: float = 1e-5) -> None:
    """The graph of ``mod`` means what plain TVM computes."""
    args = feed(mod)
    for wanted, got in zip(run(mod, args), interpret(mod, args), strict=True):
        assert np.abs(wanted).max() > 0.05
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def fuse(mod: tvm.IRModule, planner: Callable) -> tvm.IRModule:
    """The outlined module; ``well_formed`` raises if it is not."""
    fused = AFusion(target="llvm", planner=planner)(mod)
    relax.analysis.well_formed(fused)
    return fused


def group_functions(mod: tvm.IRModule) -> dict[str, relax.Function]:
    """The functions that AFusion made, by name."""
    return {
        global_var.name_hint: func
        for global_var, func in mod.functions_items()
        if func.attrs is not None and "optifx.group" in func.attrs
    }


def check_fused(mod, planner, tolerance: float = 1e-6) -> tvm.IRModule:
    """Plain TVM compiles both modules for llvm; the results agree."""
    fused = fuse(mod, planner)
    args = feed(mod)
    for wanted, got in zip(run(mod, args), run(fused, args), strict=True):
        assert np.abs(wanted).max() > 0.05
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    return fused


def calls_of(mod: tvm.IRModule) -> list[str]:
    """What the bindings of main call, "" for tuple elements."""
    calls = [b.value for b in mod["main"].body.blocks[0].bindings]
    return [
        getattr(c.op, "name_hint", getattr(c.op, "name", "")) if hasattr(c, "op") else ""
        for c in calls
    ]


def random_net(seed: int, size: int = 14) -> tvm.IRModule:
    """A random graph of convolutions, poolings, concats and element-wise operators, in which
    values have several readers, none, or are outputs too. Batch 2, 4x4 pixels."""
    net = Net(seed=seed)
    choice = np.random.default_rng(seed)
    x = net.input(2, 4, 4, 3)

    def pick(values):
        # Recent values more often: chains, not only stars.
        return values[-1 - min(int(choice.exponential(1.5)), len(values) - 1)]

    def like(y, values):
        same = [v for v in values if int(v.ty.shape[3]) == int(y.ty.shape[3])]
        return same[int(choice.integers(len(same)))]

    def body():
        values = [x]
        for _ in range(size):
            y = pick(values)
            channels = int(y.ty.shape[3])
            kind = int(choice.integers(12))
            if kind < 3:
                y = net.conv(y, int(choice.integers(2, 5)), int(choice.choice([1, 3])))
            elif kind == 3:
                y = net.pool(y, str(choice.choice(["max", "avg"])), stride=1, pad=1)
            elif kind == 4 and channels < 12:
                y = net.concat(y, like(y, values), pick(values))
            elif kind == 5:
                gate = net.conv(net.emit(op.mean(pick(values), [1, 2], keepdims=True)), channels)
                y = net.emit(op.multiply(y, net.emit(op.sigmoid(gate))))
            elif kind in (6, 7):
                y = net.add(y, like(y, values))
            elif kind == 8:
                y = net.emit(op.maximum(net.scale(y), like(y, values)))
            else:
                y = [net.relu, net.bias, lambda v: net.emit(nn.silu(v))][kind % 3](y)
            values.append(y)
        extra = [v for v in values[1:-1] if choice.random() < 0.15]
        return [*extra, values[-1]]

    return net.module(body)
