"""A sample of the groups that the search plans for networks, run in the CUDA emulator."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import Target

from optifx_tvm import passes, zoo
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile
from optifx_tvm.passes.lower_fusion_groups import group_of
from optifx_tvm.schedules.registry import schedule_group
from tests.cuda_emulator.emulator import EmulatedKernel
from tests.support.kernel_runs import TOLERANCE, error, feed_and_reference, kernel_arguments

CUDA = Target({"kind": "cuda", "arch": "sm_89"}, host="llvm")


def _groups(network: str, dtype: str, size: int) -> list[tuple[ConvGraph, Tile]]:
    mod = zoo.build(network, input_shape=(1, 3, size, size))
    plan = tvm.transform.Sequential(
        [passes.CanonicalizeConv(dtype=dtype), passes.AFusion(target=CUDA)]
    )
    found = [(var.name_hint, group_of(func)) for var, func in plan(mod).functions_items()]
    return [group for _, group in sorted(found, key=lambda item: item[0]) if group is not None]


@pytest.mark.parametrize(
    ("network", "dtype", "size", "step"),
    [
        ("nasnet_a_mobile", "float32", 32, 10),
        ("mobilenet_v2", "float16", 32, 4),
        ("squeezenet1_1", "float32", 32, 3),
    ],
)
def test_planned_groups_agree_with_the_reference(
    network: str, dtype: str, size: int, step: int
) -> None:
    for group, tile in _groups(network, dtype, size)[::step]:
        kernel = schedule_group(group, tile, CUDA)
        assert kernel is not None
        feed, expected = feed_and_reference(group)
        args = kernel_arguments(group, feed)
        EmulatedKernel(kernel, CUDA).run(args, "random")
        assert error(group, args, expected) < TOLERANCE[dtype], (group, tile)
