"""nvcc takes what the SIMT template generates, within each architecture's shared memory."""

from __future__ import annotations

import shutil

import pytest
from tvm.target import Target

from optifx_tvm.cuda_source import NvccError, compile_cubin, cuda_source
from optifx_tvm.device import SHARED_LIMIT
from optifx_tvm.schedules.registry import schedule_group
from tests.support.group_cases import build_case

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
NAMES = (
    "split_fire",
    "straight_inverted_residual_with_add_half",
    "straight_stem_half",
    "merge_dense_layer_gathered_concat",
    "merge_unet_up_half",
    "elementwise_chain",
)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_87", "sm_89", "sm_90"])
def test_groups_compile_within_the_limits(arch: str) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    cases = {name: build_case(name) for name in NAMES}
    functions = {}
    for name, case in cases.items():
        functions[name] = schedule_group(case.graph, case.tile, target)
        assert functions[name] is not None, name
    source = cuda_source(functions, target)
    resources = compile_cubin(source.text, arch)
    for name in NAMES:
        (launch,) = source.launches[name]
        found = resources[launch.kernel]
        assert launch.shared_bytes + found.static_shared_bytes <= SHARED_LIMIT[arch]
        assert 0 < found.registers <= 255
        assert launch.block[0] * found.registers <= 65536


@needs_nvcc
def test_what_nvcc_refuses_is_an_error() -> None:
    with pytest.raises(NvccError, match="sm_90"):
        compile_cubin('extern "C" __global__ void kernel(float* a) { a[0] = no_such; }', "sm_90")


@needs_nvcc
def test_spills_and_static_shared_memory_are_read_back() -> None:
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) kernel_a(float* a) {
      __shared__ float s[100]; float v[96]; s[threadIdx.x % 100] = a[threadIdx.x];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 96; ++i) v[i] = a[i * 7 + threadIdx.x];
      #pragma unroll
      for (int i = 0; i < 96; ++i) a[i * 7 + threadIdx.x] = v[95 - i] * v[i / 2] + s[i];
    }
    extern "C" __global__ void kernel_b(float* a) { a[threadIdx.x] += 1.0f; }"""
    found = compile_cubin(source, "sm_90")
    assert found["kernel_a"].static_shared_bytes == 400
    assert found["kernel_a"].spill_bytes > 0
    assert found["kernel_b"].spill_bytes == found["kernel_b"].static_shared_bytes == 0


@needs_nvcc
def test_half_precision_before_ampere_does_without_mma() -> None:
    case = build_case("straight_stem_half")
    turing = Target({"kind": "cuda", "arch": "sm_75"}, host="llvm")
    function = schedule_group(case.graph, case.tile, turing)
    assert function is not None
    source = cuda_source({"kernel": function}, turing)
    assert "mma.sync" not in source.text
    compile_cubin(source.text, "sm_75")
