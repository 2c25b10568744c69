"""Tile programs as they are built, without a schedule, against the unfused numpy reference."""

from __future__ import annotations

import pytest
import tvm

from optifx_tvm.schedules.tile_program import build_tile_program
from tests.support.group_cases import build_case, case_names
from tests.support.kernel_runs import (
    TOLERANCE,
    error,
    feed_and_reference,
    kernel_arguments,
    run_on_cpu,
)


@pytest.mark.parametrize("name", case_names())
def test_agrees_with_the_reference(name: str) -> None:
    case = build_case(name)
    feed, expected = feed_and_reference(case.graph)
    args = kernel_arguments(case.graph, feed)
    run_on_cpu(build_tile_program(case.graph, case.tile).func, args)
    assert error(case.graph, args, expected) < TOLERANCE[case.dtype]


def test_any_two_tiles_share_the_signature() -> None:
    case = build_case("split_fire")
    first = build_tile_program(case.graph, case.tile).func
    other = build_tile_program(case.graph, type(case.tile)(13, 11, 1)).func
    for a, b in zip(first.params, other.params, strict=True):
        assert a.name == b.name
        tvm.ir.assert_structural_equal(a.ty, b.ty)


def test_same_group_same_program() -> None:
    first, second = (build_case("merge_inception") for _ in range(2))
    tvm.ir.assert_structural_equal(
        build_tile_program(first.graph, first.tile).func,
        build_tile_program(second.graph, second.tile).func,
    )
