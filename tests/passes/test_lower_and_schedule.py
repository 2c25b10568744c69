"""LowerFusionGroups and ScheduleFusionGroups, and the Sequential of the README."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from optifx_tvm import passes
from optifx_tvm.partition import Tile
from optifx_tvm.passes.group_attrs import group_of
from tests.support.relax_nets import Net, feed, run

LLVM = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def fire() -> tvm.IRModule:
    net = Net()
    x = net.input(1, 9, 8, 16)

    def body():
        squeezed = net.conv_relu(x, 16)
        return net.concat(net.conv_relu(squeezed, 20), net.conv_relu(squeezed, 24, 3))

    return net.module(body)


def two_outputs() -> tvm.IRModule:
    net = Net()
    x = net.input(2, 8, 8, 12)

    def body():
        y = net.conv_relu(x, 16, 3)
        return y, net.conv_relu(y, 8, 1)

    return net.module(body)


def weights_as_parameters() -> tvm.IRModule:
    builder = relax.BlockBuilder()
    shapes = {"x": (1, 7, 6, 8), "w": (20, 3, 3, 4), "b": (1, 1, 1, 20), "t": (20, 2, 2, 3)}
    params = [relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items()]
    x, w, b, t = params
    with builder.function("main", params):
        with builder.dataflow():
            conv = relax.op.nn.conv2d(
                x, w, padding=(1, 1, 1, 1), groups=2, data_layout="NHWC", kernel_layout="OHWI"
            )
            y = builder.emit(relax.op.add(builder.emit(conv), b))
            up = relax.op.nn.conv2d_transpose(
                y, t, strides=(2, 2), data_layout="NHWC", kernel_layout="IHWO"
            )
            result = builder.emit_output(builder.emit(up))
        builder.emit_func_output(result)
    return builder.get()


def fusion(target=LLVM, database=None) -> tvm.transform.Sequential:
    return tvm.transform.Sequential(
        [
            passes.AFusion(target=target, planner="search"),
            passes.LowerFusionGroups(),
            passes.ScheduleFusionGroups(target=target, database=database),
        ]
    )


def kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


@pytest.mark.parametrize("build", [fire, two_outputs, weights_as_parameters])
def test_lowered_and_scheduled_numbers(build):
    before = build()
    plain = tvm.transform.Sequential([passes.RestoreTransposedConvLayout()])(before)
    args = feed(before)
    wanted = run(plain, args)
    lowered = tvm.transform.Sequential([passes.AFusion(target=LLVM), passes.LowerFusionGroups()])(
        before
    )
    assert kernels(lowered)
    for mod in (lowered, fusion()(before)):
        for got, want in zip(run(mod, args), wanted, strict=True):
            assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_the_input_module_is_not_changed():
    before = fire()
    text = tvm.ir.save_json(before)
    outlined = tvm.transform.Sequential([passes.AFusion(target=LLVM)])(before)
    outlined_text = tvm.ir.save_json(outlined)
    lowered = tvm.transform.Sequential([passes.LowerFusionGroups()])(outlined)
    lowered_text = tvm.ir.save_json(lowered)
    tvm.transform.Sequential([passes.ScheduleFusionGroups(target=LLVM)])(lowered)
    assert tvm.ir.save_json(before) == text
    assert tvm.ir.save_json(outlined) == outlined_text
    assert tvm.ir.save_json(lowered) == lowered_text


def test_a_second_run_changes_nothing():
    once = fusion()(fire())
    tvm.ir.assert_structural_equal(once, fusion()(once))


def test_modules_without_groups_are_left_alone():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 5), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.softmax(x))
        builder.emit_func_output(y)
    before = builder.get()
    tvm.ir.assert_structural_equal(before, fusion()(before))


def test_kernels_are_marked_as_scheduled_and_opaque():
    for kernel in kernels(fusion()(fire())):
        assert kernel.attrs["tirx.is_scheduled"]
        assert kernel.attrs["op_pattern"] == 8
        assert "global_symbol" not in kernel.attrs


class _OneTile:
    """A database with one tile for everything, which notes what it was asked."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.asked: list[str] = []

    def best_tile(self, group, target):
        self.asked.append(group.structural_hash)
        return self.tile


def test_tiles_on_record_are_used_where_they_fit():
    before, database = fire(), _OneTile(Tile(2, 8, 1))
    args = feed(before)
    mod = fusion(database=database)(before)
    assert database.asked
    planned = fusion()(before)
    assert not tvm_ffi.structural_equal(mod, planned)
    for got, want in zip(run(mod, args), run(before, args), strict=True):
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_tiles_on_record_that_do_not_fit_are_ignored():
    before = fire()
    mod = fusion(database=_OneTile(Tile(2, 8, 7)))(before)
    tvm.ir.assert_structural_equal(mod, fusion()(before))


def test_people_may_put_passes_between():
    seen = []

    @tvm.transform.module_pass(opt_level=0, name="Spy")
    def spy(mod, _ctx):
        seen.append(sum(group_of(f) is not None for f in kernels(mod)))
        return mod

    before = fire()
    sequence = tvm.transform.Sequential(
        [
            passes.CanonicalizeConv(),
            passes.AFusion(target=LLVM, planner="greedy"),
            spy,
            passes.LowerFusionGroups(),
            spy,
            passes.ScheduleFusionGroups(target=LLVM, database=None),
        ]
    )
    executable = tvm.compile(sequence(before), LLVM)
    assert seen[0] == 0 and seen[1] > 0
    args = feed(before)
    vm = relax.VirtualMachine(executable, tvm.cpu())
    got = vm["main"](*[tvm.runtime.tensor(a) for a in args]).numpy()
    (want,) = run(before, args)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
