"""AFusion: what it outlines, what it refuses, and that numbers stay what they were."""

from __future__ import annotations

import json

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from optifx_tvm.errors import OptionError
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Group, Partition, Tile
from optifx_tvm.passes import AFusion
from tests.support.random_plans import everything, fixed_partition, single_node_partition
from tests.support.relax_nets import Net, calls_of, check_fused, fuse, group_functions, nn, op


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((1, 4, 4, 2), "float32"),
        w: R.Tensor((2, 1, 1, 2), "float32"),
        b: R.Tensor((2,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.conv2d(
                x, w, padding=[0, 0, 0, 0], data_layout="NHWC", kernel_layout="OHWI",
                out_layout="NHWC",
            )  # fmt: skip
            z = R.add(y, b)
            s = R.nn.softmax(z, axis=-1)
            p = R.nn.max_pool2d(z, [2, 2], [2, 2], layout="NHWC", out_layout="NHWC")
            q = R.nn.relu(p)
            R.output(s, q)
        return s, q


@I.ir_module
class Expected:
    @R.function(private=True)
    def optifx_conv2d_max_pool2d(
        x: R.Tensor((1, 4, 4, 2), "float32"),
        w: R.Tensor((2, 1, 1, 2), "float32"),
        b: R.Tensor((2,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.conv2d(
                x, w, padding=[0, 0, 0, 0], data_layout="NHWC", kernel_layout="OHWI",
                out_layout="NHWC",
            )  # fmt: skip
            z = R.add(y, b)
            p = R.nn.max_pool2d(z, [2, 2], [2, 2], layout="NHWC", out_layout="NHWC")
            q = R.nn.relu(p)
            R.output(z, q)
        return z, q

    @R.function
    def main(
        x: R.Tensor((1, 4, 4, 2), "float32"),
        w: R.Tensor((2, 1, 1, 2), "float32"),
        b: R.Tensor((2,), "float32"),
    ):
        cls = Expected
        with R.dataflow():
            g = cls.optifx_conv2d_max_pool2d(x, w, b)
            z = g[0]
            q = g[1]
            s = R.nn.softmax(z, axis=-1)
            R.output(s, q)
        return s, q


def _bare(mod: tvm.IRModule) -> tvm.IRModule:
    """Without AFusion's attributes."""
    result = mod.without_attr("optifx.plan")
    for global_var, func in mod.functions_items():
        for name in ("optifx.group", "optifx.tile", "optifx.mode"):
            if func.attrs is not None and name in func.attrs:
                func = func.without_attr(name)
        result[global_var] = func
    return result


def test_outlines_a_group_with_two_outputs() -> None:
    fused = fuse(Before, everything)
    tvm.ir.assert_structural_equal(_bare(fused), Expected, map_free_vars=True)
    (func,) = group_functions(fused).values()
    group = ConvGraph.from_json(func.attrs["optifx.group"])
    assert [node.name for node in group.nodes] == ["n0", "n1"]
    assert (group.inputs, group.params, group.outputs) == (("x0",), ("w0", "w1"), ("n0", "n1"))
    assert json.loads(func.attrs["optifx.tile"]) == {"height": 2, "width": 2, "channel_slices": 1}
    assert func.attrs["optifx.mode"] == "straight"
    assert "Primitive" not in func.attrs
    assert "global_symbol" not in func.attrs
    check_fused(Before, everything)


def test_the_plan_is_kept_in_the_module() -> None:
    plan = json.loads(fuse(Before, everything).attrs["optifx.plan"])["main"]
    (group,) = plan.pop("groups")
    assert group["function"] == "optifx_conv2d_max_pool2d"
    assert group["nodes"] == ["z", "q"]
    assert group["operators"] == ["nn.conv2d y", "add z", "nn.max_pool2d p", "nn.relu q"]
    assert plan == {
        "operators": 4,
        "unfused_kernels": 2,
        "fused_kernels": 1,
        "predicted_us": 1.0,
        "planner": "fixed",
        "complete": True,
        "refused": [],
    }


def test_single_node_groups_are_outlined_too() -> None:
    fused = fuse(Before, single_node_partition)
    assert calls_of(fused) == ["optifx_conv2d", "relax.nn.softmax", "optifx_max_pool2d"]


def test_leaves_its_input_alone_and_is_idempotent() -> None:
    net = Net()
    x = net.input(1, 6, 6, 4)
    mod = net.module(lambda: net.add(net.conv_relu(net.conv_relu(x, 4), 4, 3), x))
    before = tvm.ir.save_json(mod)
    fused = fuse(mod, everything)
    assert tvm.ir.save_json(mod) == before
    assert tvm.ir.save_json(fuse(mod, everything)) == tvm.ir.save_json(fused)
    again = fuse(fused, single_node_partition)
    assert tvm.ir.save_json(again) == tvm.ir.save_json(fused)


def test_leaves_alone_what_it_does_not_handle() -> None:
    net = Net()
    x = net.input(2, 8)
    mod = net.module(lambda: net.emit(nn.softmax(net.emit(op.matmul(x, net.const(8, 8))))))
    tvm.ir.assert_structural_equal(fuse(mod, single_node_partition), mod)
    plain = relax.transform.ToNonDataflow()(Before)
    tvm.ir.assert_structural_equal(fuse(plain, single_node_partition), plain)


def test_runs_in_sequential_with_a_pass_instrument() -> None:
    @tvm.instrument.pass_instrument
    class Seen:
        def __init__(self) -> None:
            self.names: list[str] = []

        def run_after_pass(self, mod, info) -> None:
            self.names.append(info.name)

    seen = Seen()
    sequential = tvm.transform.Sequential([AFusion(target="llvm", planner=single_node_partition)])
    with tvm.transform.PassContext(instruments=[seen]):
        fused = sequential(Before)
    assert "AFusion" in seen.names
    assert len(group_functions(fused)) == 2


def test_equal_groups_share_one_function() -> None:
    net = Net()
    x = net.input(1, 6, 6, 4)

    def body():
        y = x
        for _ in range(3):
            y = net.add(net.conv(net.conv_relu(y, 6), 4, 3), y)
        return y

    def pairs(graph: ConvGraph) -> Partition:
        names = [node.name for node in graph.nodes]
        return fixed_partition(graph, *zip(names[::2], names[1::2], strict=True))

    mod = net.module(body)
    fused = check_fused(mod, pairs)
    assert calls_of(fused) == ["optifx_conv2d_conv2d"] * 3
    assert len(group_functions(fused)) == 1

    def other_tiles(graph: ConvGraph) -> Partition:
        plan = pairs(graph)
        first = Group(plan.groups[0].nodes, "straight", Tile(2, 2), 1.0)
        return Partition((first, *plan.groups[1:]))

    assert len(group_functions(fuse(mod, other_tiles))) == 2


def test_channel_parameters_reach_groups_as_vectors() -> None:
    net = Net()
    x, bias = net.input(1, 4, 4, 3), net.input(1, 1, 1, 5, name="b")
    mod = net.module(lambda: net.emit(op.add(net.conv(x, 5, 3), bias)))
    fused = check_fused(mod, everything)
    assert calls_of(fused) == ["relax.reshape", "optifx_conv2d"]
    (func,) = group_functions(fused).values()
    assert [int(d) for d in func.params[2].ty.shape] == [5]


def test_groups_are_called_in_an_order_that_runs() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)

    def body():
        first = net.conv_relu(x, 4)
        second = net.conv_relu(x, 4)
        soft = net.emit(nn.softmax(second, axis=3))
        return net.conv(first, 4), net.conv(soft, 4)

    mod = net.module(body)

    def plan(graph: ConvGraph) -> Partition:
        names = [node.name for node in graph.nodes if node.op != "opaque"]
        assert names == ["lv2", "lv5", "gv", "gv1"]
        return fixed_partition(graph, ("lv2", "gv1"))

    check_fused(mod, plan)


def test_several_blocks_and_functions() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)
    builder = net.builder
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(nn.relu(net.conv(x, 4)))
        z = builder.emit(op.exp(y))
        with builder.dataflow():
            result = builder.emit_output(net.conv(z, 3))
        builder.emit_func_output(result)
    mod = builder.get()
    other = relax.utils.copy_with_new_vars(mod["main"])
    mod["other"] = other.with_attr("global_symbol", "other")
    fused = check_fused(mod, single_node_partition)
    assert len(group_functions(fused)) == 2
    plans = json.loads(fused.attrs["optifx.plan"])
    assert {name: plan["fused_kernels"] for name, plan in plans.items()} == {"main": 2, "other": 2}


def _chain() -> tvm.IRModule:
    """Nodes lv (conv2d), lv1 (opaque), lv2 (conv2d), gv (conv2d); lv2 reads lv and lv1."""
    net = Net()
    x = net.input(1, 4, 4, 4)

    def body():
        y = net.conv(x, 4)
        soft = net.emit(nn.softmax(y, axis=3))
        z = net.concat(y, soft)
        return net.conv(z, 3)

    return net.module(body)


def _groups(*names: tuple[str, ...], tile: Tile | None = None):
    groups = tuple(Group(n, "straight", tile or Tile(4, 4), 1.0) for n in names)
    return lambda graph: Partition(groups)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (_groups(("lv",), ("lv2",)), r"planner left out nodes \[gv\]"),
        (_groups(("lv",), ("lv2", "gv"), ("gv",)), "node gv is in 2 groups"),
        (_groups(("lv", "lv"), ("lv2",), ("gv",)), "node lv is in 2 groups"),
        (_groups(("lv",), ("lv1",), ("lv2", "gv")), "node lv1 is opaque"),
        (_groups(("lv", "new"), ("lv2", "gv")), "the graph has no node new"),
        (_groups(("lv",), ("lv2", "gv"), ()), "empty group"),
        (_groups(("lv", "lv2"), ("gv",)), r"\[lv, lv2\] needs a result that depends on"),
        (_groups(("lv",), ("lv2", "gv"), tile=Tile(0, 4)), "tile 0x4"),
        (lambda graph: [("lv",)], "planner returned list"),
    ],
)
def test_refuses_an_illegal_partition(planner, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        AFusion(target="llvm", planner=planner)(_chain())
    assert "\n" not in str(error.value)


def test_refuses_a_group_without_a_single_tile_space() -> None:
    net = Net()
    x = net.input(1, 8, 8, 4)
    mod = net.module(lambda: (net.conv(x, 4), net.pool(x, k=2)))
    small = _groups(("gv", "gv1"), tile=Tile(2, 2))
    with pytest.raises(OptionError, match=r"group \[gv, gv1\] can't be fused: "):
        AFusion(target="llvm", planner=small)(mod)


def test_refuses_impossible_channel_slices() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)
    mod = net.module(lambda: net.conv(x, 12))
    with pytest.raises(OptionError, match="12 channels of gv are not 2 slices"):
        AFusion(target="llvm", planner=_groups(("gv",), tile=Tile(4, 4, 2)))(mod)
