"""Tensor-core and asynchronous-copy instructions of the emulator, in source as TVM writes it."""

from __future__ import annotations

import numpy as np
import pytest

from optifx_tvm.cuda_source import Launch
from tests.cuda_emulator.emulator import ORDERS, EmulationError, launch_all, load

COPY = "ptx_cp_async_legacy_cg_16_2_2(buf_ptr, (t * 8), A_ptr, (t * 8));"
COPY_B = "if (t < 16) { ptx_cp_async_legacy_cg_16_2_2(buf_ptr, (256 + t * 8), B_ptr, (t * 8)); }"
COMMIT = "tvm_builtin_ptx_cp_async_commit_group_async_commit_group();"
WAIT = "tvm_builtin_ptx_cp_async_wait_group_async_wait_group_{}();"


def _registers(constraint: str, ctype: str, array: str, count: int) -> str:
    return ", ".join(f'"{constraint}"((({ctype} *)({array} + 0))[{i}])' for i in range(count))


def _ldmatrix(count: int, transposed: str, array: str, start: int, offset: str) -> str:
    names = ", ".join(f"%{i}" for i in range(count))
    return f"""  {{
    unsigned int addr = __cvta_generic_to_shared((&(((half*)buf_ptr)[{start}])) + ({offset}));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
      "{{{names}}}, [%{count}];\\n"
      : {_registers("=r", "unsigned", array, count)}
      : "r"(addr)
    );
  }}"""


# A (16 x 16) at element 0, B (16 x 8) at element 256; C = A * B.
MULTIPLY = f"""
{_ldmatrix(4, "", "a_ptr", 0, "((t & 15) * 16) + ((t >> 4) * 8)")}
{_ldmatrix(2, ".trans", "b_ptr", 256, "(t & 15) * 8")}
  for (int i = 0; i < 4; ++i) {{ c_ptr[i] = 0.0; }}
  {{
    __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%10, %11, %12, %13}};\\n"
      :  {_registers("=f", "float", "c_ptr", 4)}
      : {_registers("r", "unsigned", "a_ptr", 4)}, {_registers("r", "unsigned", "b_ptr", 2)},
        {_registers("f", "float", "c_ptr", 4)});
  }}
"""
STORE = """
  for (int i = 0; i < 4; ++i) {
    (&(C_ptr[0]))[((((t / 4) + ((i / 2) * 8)) * 8) + ((t % 4) * 2) + (i % 2))] = c_ptr[i];
  }
"""


def _run(*statements: str, order: str = "forward") -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel gives, A @ B)."""
    source = (
        'extern "C" __global__ void __launch_bounds__(32) kernel_('
        "half* __restrict__ A_ptr, half* __restrict__ B_ptr, float* __restrict__ C_ptr) {\n"
        "  extern __shared__ __align__(64) uchar buf_ptr[];\n"
        "  alignas(64) half a_ptr[8];\n  alignas(64) half b_ptr[4];\n"
        "  alignas(64) float c_ptr[4];\n  int t = ((int)threadIdx.x);\n"
        + "\n".join(statements) + "\n}\n"
    )  # fmt: skip
    rng = np.random.default_rng(0)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((16, 8)).astype(np.float16)
    c = np.full((16, 8), np.nan, np.float32)
    launch = Launch("kernel_", ("a", "b", "c"), (1, 1, 1), (32, 1, 1), 2 * (256 + 128))
    launch_all(load(source), [launch], {"a": a, "b": b, "c": c}, order)
    return c, a.astype(np.float32) @ b.astype(np.float32)


@pytest.mark.parametrize("order", ORDERS)
def test_matrix_product_of_a_warp(order: str) -> None:
    steps = (COPY, COPY_B, COMMIT, WAIT.format(0), "__syncthreads();", MULTIPLY, STORE)
    found, expected = _run(*steps, order=order)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_copy_that_is_not_waited_for_has_not_arrived() -> None:
    early = (COPY, COMMIT, COPY_B, COMMIT, WAIT.format(1), "__syncthreads();", MULTIPLY, STORE)
    assert np.isnan(_run(*early)[0]).all()


def test_waiting_leaves_the_later_groups_under_way() -> None:
    steps = (COPY, COMMIT, WAIT.format(0), COPY_B, COMMIT, "__syncthreads();")
    for value, index in ((False, 0), (True, 256)):
        read = f"C_ptr[t] = (float)(((half*)buf_ptr)[({index} + t)]);"
        assert np.isnan(_run(*steps, read)[0].reshape(-1)[:32]).all() == value


def test_a_barrier_is_needed_after_the_wait() -> None:
    with pytest.raises(EmulationError, match="race"):
        _run(COPY, COPY_B, COMMIT, WAIT.format(0), MULTIPLY, STORE)


def test_misaligned_matrix_rows() -> None:
    shifted = MULTIPLY.replace("[0])) +", "[4])) +")
    steps = (COPY, COPY_B, COMMIT, WAIT.format(0), "__syncthreads();", shifted, STORE)
    with pytest.raises(EmulationError, match="misaligned: 16 bytes"):
        _run(*steps)
