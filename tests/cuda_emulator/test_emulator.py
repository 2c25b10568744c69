"""The CUDA emulator finds what it promises to find, and nothing where nothing is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T
from tvm.target import Target

from optifx_tvm.cuda_source import Launch
from tests.cuda_emulator.emulator import (
    ORDERS,
    EmulatedKernel,
    EmulationError,
    launch_all,
    load,
)

THREADS = 64
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")


def _run(body: str, order: str = "forward", shared_bytes: int = 4 * THREADS) -> np.ndarray:
    """Run a kernel over ``float* a`` (0, 1, ...) and ``float* b`` of 64 elements in one block."""
    source = (
        'extern "C" __global__ void __launch_bounds__(64) kernel_('
        "float* __restrict__ a, float* __restrict__ b) {\n"
        "  extern __shared__ __align__(64) float shared_ptr[];\n"
        "  int t = ((int)threadIdx.x);\n"
        f"  {body}\n}}\n"
    )
    arrays = {
        "a": np.arange(THREADS, dtype=np.float32),
        "b": np.full(THREADS, np.nan, np.float32),
    }
    launch = Launch("kernel_", ("a", "b"), (1, 1, 1), (THREADS, 1, 1), shared_bytes)
    launch_all(load(source), [launch], arrays, order)
    return arrays["b"]


@pytest.mark.parametrize("order", ORDERS)
def test_threads_exchange_values_through_shared_memory(order: str) -> None:
    result = _run("shared_ptr[t] = a[t]; __syncthreads(); b[t] = shared_ptr[(63 - t)];", order)
    assert result.tolist() == list(range(63, -1, -1))


def test_vector_access_to_shared_global_and_local_arrays() -> None:
    result = _run(
        "alignas(64) float local_ptr[4]; "
        "if (t < 16) { *(float4*)(shared_ptr + (t * 4)) = *(float4*)(a + (t * 4)); "
        "*(float4*)(local_ptr + 0) = *(float4*)(((float*)shared_ptr) + (t * 4)); "
        "*(float4*)(b + (t * 4)) = *(float4*)(local_ptr + 0); }"
    )
    assert result.tolist() == list(range(64))


@pytest.mark.parametrize("order", ORDERS)
def test_warp_shuffles_read_values_from_before(order: str) -> None:
    result = _run(
        "alignas(64) float sum_ptr[1]; sum_ptr[0] = a[t]; "
        "for (int d = 16; d > 0; d /= 2) "
        "{ sum_ptr[0] = (sum_ptr[0] + __shfl_xor_sync(0xffffffff, sum_ptr[0], d)); } "
        "b[t] = sum_ptr[0];",
        order,
    )
    assert result.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_shared_memory_starts_as_nan() -> None:
    assert np.isnan(_run("b[t] = shared_ptr[t];")).all()


def test_local_arrays_start_as_nan() -> None:
    assert np.isnan(_run("alignas(64) float local_ptr[2]; b[t] = local_ptr[1];")).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("b[(t + 1)] = a[t];", "out of bounds: 4 bytes at byte 256 of b"),
        ("b[t] = a[(t - 1)];", "out of bounds: 4 bytes at byte -4 of a"),
        ("*(float4*)(b + (t * 4)) = *(float4*)(a + 0);", "out of bounds: 16 bytes"),
        ("shared_ptr[(t * 2)] = a[t];", "of dynamic shared memory, which has 256"),
        ("alignas(64) float local_ptr[2]; local_ptr[2] = 0.0f;", "of local_ptr, which has 8"),
        ("if (t < 2) { *(float4*)(b + t) = *(float4*)(a + 0); }", "misaligned: 16 bytes at byte 4"),
        ("shared_ptr[t] = a[t]; b[t] = shared_ptr[(t ^ 1)];", "race"),
        ("b[t] = shared_ptr[(t ^ 1)]; shared_ptr[t] = a[t];", "race"),
        ("shared_ptr[0] = a[t]; __syncthreads(); b[t] = shared_ptr[0];", "race (write)"),
        ("if (t < 32) { __syncthreads(); } b[t] = a[t];", "barrier divergence"),
        ("if (t < 32) { __syncthreads();\n } else { __syncthreads(); }", "barrier divergence"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_faults_are_found_in_any_order(body: str, message: str, order: str) -> None:
    with pytest.raises(EmulationError, match="kernel_") as caught:
        _run(body, order)
    assert message in str(caught.value)


def test_several_kernels_with_a_workspace_between() -> None:
    @T.prim_func(s_tir=True)
    def reverse_twice(a: T.Buffer((8, 64), "float32"), b: T.Buffer((8, 64), "float32")):
        t = T.sblock_alloc_buffer((8, 64), "float32")
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("first"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    t[vi, vj] = a[vi, 63 - vj] * T.float32(2)
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("second"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = t[7 - vi, 63 - vj]

    a = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    b = np.full_like(a, np.nan)
    kernel = EmulatedKernel(reverse_twice, CUDA)
    kernel.run([a, b])
    assert len(kernel.launches) == 2
    np.testing.assert_array_equal(b, 2 * a[::-1])
