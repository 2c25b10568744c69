"""ScheduleFallback: convolutions that TVM's GPU schedules refuse, and all else without threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T
from tvm.target import Target

from optifx_tvm.passes import ScheduleFallback
from optifx_tvm.pipelines import default_passes
from optifx_tvm.schedules.fallback import is_bound, is_convolution_like, schedule_fallback
from tests.cuda_emulator.emulator import EmulatedKernel

CUDA = Target({"kind": "cuda", "arch": "sm_87"}, host="llvm")
NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
op, tr = relax.op, relax.transform


def _module(build: Callable, *shapes: tuple[int, ...]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    args = [relax.Var(f"v{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with builder.function("main", args):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(build(*args)))
        builder.emit_func_output(out)
    return builder.get()


def _legalized(build: Callable, *shapes: tuple[int, ...]) -> tvm.IRModule:
    steps = [tr.LegalizeOps(), tr.AnnotateTIROpPattern(), tr.FuseOps(), tr.FuseTIR()]
    with CUDA:
        return tvm.transform.Sequential(steps)(_module(build, *shapes))


def _kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def _conv(x, w, b, **attrs):
    return op.nn.relu(op.add(op.nn.conv2d(x, w, **attrs), b))


def _silu_conv(x, w, b):
    y = op.add(op.nn.conv2d(x, w, padding=1), b)
    return op.multiply(y, op.sigmoid(y))


CONVOLUTIONS = {
    # dlight's GEMV rule fails with an AssertionError on this one.
    "one_output_channel_1x1": (
        lambda x, w, b: _conv(x, w, b, **NHWC),
        (1, 9, 9, 12), (1, 1, 1, 12), (1, 1, 1, 1),
    ),
    "one_output_channel": (
        lambda x, w, b: _conv(x, w, b, padding=1), (1, 12, 9, 9), (1, 12, 3, 3), (1, 1, 1, 1)
    ),
    "kernel_of_the_image": (
        lambda x, w, b: _conv(x, w, b), (1, 12, 1, 9), (16, 12, 1, 9), (1, 16, 1, 1)
    ),
    "kernel_1x7": (
        lambda x, w, b: _conv(x, w, b, padding=(0, 3), **NHWC),
        (1, 6, 9, 12), (16, 1, 7, 12), (1, 1, 1, 16),
    ),
    "thin_grouped": (
        lambda x, w, b: _conv(x, w, b, padding=1, groups=16),
        (2, 32, 8, 8), (32, 2, 3, 3), (1, 32, 1, 1),
    ),
    "transposed": (
        lambda x, w, b: op.add(op.nn.conv2d_transpose(x, w, strides=2, padding=1), b),
        (1, 16, 5, 5), (16, 3, 4, 4), (1, 3, 1, 1),
    ),
    "one_dimensional": (
        lambda x, w, b: op.add(op.nn.conv1d(x, w, padding=1), b),
        (1, 16, 20), (8, 16, 3), (1, 8, 1),
    ),
    "result_read_twice": (_silu_conv, (1, 12, 9, 9), (16, 12, 3, 3), (1, 16, 1, 1)),
}  # fmt: skip


def _check_numbers(plain: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> EmulatedKernel:
    rng = np.random.default_rng(0)
    args = [
        rng.standard_normal([int(e) for e in p.ty.shape]).astype(str(p.ty.dtype))
        for p in plain.params
    ]
    tensors = [tvm.runtime.tensor(a) for a in args]
    tvm.compile(plain.with_attr("global_symbol", "main"), target="llvm")["main"](*tensors)
    kernel = EmulatedKernel(scheduled, CUDA)
    for order in ("forward", "random"):
        args[-1][...] = np.nan
        kernel.run(args, order)
        np.testing.assert_allclose(args[-1], tensors[-1].numpy(), rtol=1e-5, atol=1e-5)
    return kernel


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_get_one_kernel_with_the_right_numbers(name: str) -> None:
    mod = _legalized(*CONVOLUTIONS[name])
    (plain,) = _kernels(mod)
    assert is_convolution_like(plain)
    (scheduled,) = _kernels(ScheduleFallback(CUDA, convolutions_only=True)(mod))
    assert scheduled.attrs["tirx.is_scheduled"] == 1
    kernel = _check_numbers(plain, scheduled)
    assert len(kernel.launches) == 1


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: op.nn.softmax(x, axis=-1), [(4, 100)]),
        (lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), [(1, 8, 9, 9)]),
        (lambda x, y: op.matmul(x, y), [(4, 64), (64, 32)]),
        (lambda x: op.mean(x, axis=[2, 3]), [(1, 8, 9, 9)]),
    ],
)
def test_other_functions_are_left_to_dlight_but_can_be_bound(build, shapes) -> None:
    mod = _legalized(build, *shapes)
    (plain,) = _kernels(mod)
    (kept,) = _kernels(ScheduleFallback(CUDA, convolutions_only=True)(mod))
    assert kept.same_as(plain)
    (scheduled,) = _kernels(ScheduleFallback(CUDA)(mod))
    _check_numbers(plain, scheduled)


def test_nests_that_share_a_loop_run_in_one_thread() -> None:
    @T.prim_func(s_tir=True)
    def running_sums(a: T.Buffer((8,), "float32"), b: T.Buffer((8, 4), "float32")):
        for i in range(8):
            for j in range(4):
                with T.sblock("step"):
                    vi = T.axis.opaque(8, i)
                    vj = T.axis.opaque(4, j)
                    b[vi, vj] = a[vi] + T.if_then_else(vi > 0, b[vi - 1, vj], T.float32(0))
            for j in range(4):
                with T.sblock("scale"):
                    vi = T.axis.opaque(8, i)
                    vj = T.axis.opaque(4, j)
                    b[vi, vj] = b[vi, vj] * T.float32(0.5)

    scheduled = schedule_fallback(running_sums)
    assert is_bound(scheduled)
    kernel = _check_numbers(running_sums, scheduled)
    assert kernel.launches[0].block == (1, 1, 1)


def test_scheduling_twice_changes_nothing_and_the_input_is_kept() -> None:
    mod = _legalized(*CONVOLUTIONS["kernel_1x7"])
    before = mod.script()
    once = ScheduleFallback(CUDA)(mod)
    assert mod.script() == before
    tvm.ir.assert_structural_equal(once, ScheduleFallback(CUDA)(once))


def test_llvm_functions_are_left_alone() -> None:
    mod = _legalized(*CONVOLUTIONS["kernel_1x7"])
    tvm.ir.assert_structural_equal(ScheduleFallback(Target("llvm"))(mod), mod)


def test_in_the_pipeline_every_kernel_is_bound_and_compiles() -> None:
    def build(x, w, b):
        return op.nn.softmax(op.reshape(_conv(x, w, b, **NHWC), (1, 81)), axis=-1)

    _, *shapes = CONVOLUTIONS["one_output_channel_1x1"]
    with CUDA:
        mod = default_passes(CUDA)(_module(build, *shapes))
    assert all(is_bound(f) for f in _kernels(mod))
    tvm.compile(mod, CUDA, relax_pipeline=None)
