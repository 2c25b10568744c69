"""Kernels of the SIMT template, run in the CUDA emulator against the unfused numpy reference."""

from __future__ import annotations

import pytest
from tvm.target import Target

from optifx_tvm.schedules.cuda_simt import schedule_simt
from optifx_tvm.schedules.tile_program import build_tile_program
from tests.cuda_emulator.emulator import ORDERS, EmulatedKernel
from tests.support.group_cases import build_case, case_names
from tests.support.kernel_runs import TOLERANCE, error, feed_and_reference, kernel_arguments

CUDA = Target({"kind": "cuda", "arch": "sm_87"}, host="llvm")


def _emulated(name: str, *, warps: int = 0, storage_rewrite: bool = False) -> EmulatedKernel:
    case = build_case(name)
    program = build_tile_program(case.graph, case.tile, outer="blockIdx.x", warps=warps)
    return EmulatedKernel(schedule_simt(program), CUDA, storage_rewrite=storage_rewrite)


def _check(name: str, kernel: EmulatedKernel, orders: tuple[str, ...] = ORDERS) -> None:
    case = build_case(name)
    feed, expected = feed_and_reference(case.graph)
    for order in orders:
        args = kernel_arguments(case.graph, feed)
        kernel.run(args, order)
        assert error(case.graph, args, expected) < TOLERANCE[case.dtype], order


@pytest.mark.parametrize("name", case_names())
def test_agrees_with_the_reference_in_every_thread_order(name: str) -> None:
    _check(name, _emulated(name))


@pytest.mark.parametrize("name", case_names())
def test_products_agree_with_the_reference_in_every_thread_order(name: str) -> None:
    _check(name, _emulated(name, warps=3))


@pytest.mark.parametrize(
    "name",
    [
        "merge_same_tensor_twice",
        "split_fire_odd_slices_half",
        "tile_read_while_the_next_is_written",
    ],
)
def test_with_tvm_storage_rewrite(name: str) -> None:
    # A plain tvm.compile(seq(mod), target) runs with TVM's default passes.
    _check(name, _emulated(name, storage_rewrite=True), ("random",))
