"""What the tests of the canonicalisation passes share: small modules, and checks of a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from optifx_tvm.passes import RestoreTransposedConvLayout

op = relax.op
nn = relax.op.nn


def const(*shape: int, seed: int = 0, dtype: str = "float32", low: float | None = None):
    """A random constant: normal, or uniform from ``low`` to ``low`` + 1."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape) if low is None else rng.uniform(low, low + 1, shape)
    return relax.const(values.astype(dtype))


def batch_norm(x, channels: int, axis: int = 1, training: bool = False):
    """The call; its result is a tuple."""
    gamma, beta, mean = (const(channels, seed=seed) for seed in (11, 12, 13))
    variance = const(channels, seed=14, low=0.5)
    return nn.batch_norm(x, gamma, beta, mean, variance, axis, epsilon=1e-3, training=training)


def module(build: Callable, *shapes: tuple[int, ...], dtype: str = "float32") -> tvm.IRModule:
    """``build(emit, *inputs)`` emits one dataflow block and returns the result or a list."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            results = build(builder.emit, *inputs)
            many = isinstance(results, list)
            outputs = [builder.emit_output(r) for r in (results if many else [results])]
        builder.emit_func_output(outputs if many else outputs[0])
    return builder.get()


def calls(mod: tvm.IRModule, name: str | None = None) -> list[relax.Call]:
    """Operator calls of main in order, of one operator ("nn.conv2d") or all."""
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    found = [v for v in values if isinstance(v, relax.Call) and hasattr(v.op, "name")]
    return [c for c in found if name is None or c.op.name == "relax." + name]


def ops(mod: tvm.IRModule) -> Counter[str]:
    """How many calls of each operator main has."""
    return Counter(call.op.name.removeprefix("relax.") for call in calls(mod))


def apply(rewrite, mod: tvm.IRModule) -> tvm.IRModule:
    """The rewritten module, after checking that the pass leaves its input untouched, gives the
    same result twice, and changes nothing when run on its own result."""
    saved = tvm.ir.load_json(tvm.ir.save_json(mod))
    result = rewrite(mod)
    tvm.ir.assert_structural_equal(mod, saved)
    tvm.ir.assert_structural_equal(rewrite(mod), result)
    tvm.ir.assert_structural_equal(rewrite(result), result)
    return result


def assert_left_alone(rewrite, mod: tvm.IRModule) -> None:
    tvm.ir.assert_structural_equal(rewrite(mod), mod)


def run(mod: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Results of main, compiled by TVM for llvm."""
    mod = RestoreTransposedConvLayout()(mod)
    # TVM's own passes need not be verified one by one (see conftest.py).
    with tvm.transform.PassContext():
        machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(x) for x in inputs])
    return [r.numpy() for r in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def random_inputs(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = []
    for parameter in mod["main"].params:
        shape = [int(extent) for extent in parameter.ty.shape]
        inputs.append(rng.standard_normal(shape).astype(str(parameter.ty.dtype)))
    return inputs


def assert_same_numbers(after: tvm.IRModule, before: tvm.IRModule, tolerance: float = 1e-5) -> None:
    """Relative L2 error of every result below ``tolerance`` on random inputs."""
    inputs = random_inputs(before)
    got, want = run(after, *inputs), run(before, *inputs)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        error = np.linalg.norm(g.astype("float64") - w) / max(np.linalg.norm(w), 1e-30)
        assert error < tolerance, f"relative error {error:.2e}"
