"""Kernels of the llvm template against the unfused numpy reference, for several vector units."""

from __future__ import annotations

import pytest
from tvm.target import Target

from optifx_tvm.schedules.cpu import schedule_cpu, vector_unit
from optifx_tvm.schedules.tile_program import build_tile_program
from optifx_tvm.target import host_target
from tests.support.group_cases import build_case, case_names
from tests.support.kernel_runs import (
    TOLERANCE,
    error,
    feed_and_reference,
    kernel_arguments,
    run_on_cpu,
)

# AVX2 without AVX-512, and what every x86-64 has.
AVX2 = Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
SSE = Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})
NARROW_UNIT_CASES = case_names()[::3]


def _check(name: str, target: Target) -> None:
    case = build_case(name)
    feed, expected = feed_and_reference(case.graph)
    args = kernel_arguments(case.graph, feed)
    program = build_tile_program(case.graph, case.tile, outer="parallel")
    run_on_cpu(schedule_cpu(program, target), args, target)
    assert error(case.graph, args, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", case_names())
def test_agrees_with_the_reference_on_this_cpu(name: str) -> None:
    _check(name, host_target())


@pytest.mark.parametrize("name", NARROW_UNIT_CASES)
def test_agrees_with_the_reference_without_avx512(name: str) -> None:
    _check(name, AVX2)


@pytest.mark.parametrize("name", NARROW_UNIT_CASES)
def test_agrees_with_the_reference_with_sse_only(name: str) -> None:
    _check(name, SSE)


def test_vector_units_differ() -> None:
    assert [vector_unit(t).lanes for t in (AVX2, SSE)] == [8, 4]
    assert vector_unit(Target({"kind": "llvm", "mcpu": "skylake-avx512"})).lanes == 16
