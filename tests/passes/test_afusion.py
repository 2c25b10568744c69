"""AFusion: what it outlines, what it refuses, and that numbers stay what they were."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from optifx_tvm.errors import OptionError
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Group, Partition, Tile
from optifx_tvm.passes import AFusion
from tests.support.random_plans import fixed_partition, random_partition, single_node_partition
from tests.support.relax_nets import Net, feed, fuse, group_functions, nn, op, run


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


def _everything(graph: ConvGraph) -> Partition:
    names = tuple(node.name for node in graph.nodes if node.op != "opaque")
    return fixed_partition(graph, names)


def _check_numbers(mod, planner, tolerance: float = 1e-6) -> tvm.IRModule:
    """Plain TVM compiles both modules for llvm; the results agree."""
    fused = fuse(mod, planner)
    args = feed(mod)
    for wanted, got in zip(run(mod, args), run(fused, args), strict=True):
        assert np.abs(wanted).max() > 0.05
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    return fused


def _block(mod: tvm.IRModule) -> list[str]:
    """What the bindings of main call, "" for tuple elements."""
    calls = [b.value for b in mod["main"].body.blocks[0].bindings]
    return [
        getattr(c.op, "name_hint", getattr(c.op, "name", "")) if hasattr(c, "op") else ""
        for c in calls
    ]


def test_outlines_a_group_with_two_outputs() -> None:
    fused = fuse(Before, _everything)
    tvm.ir.assert_structural_equal(_bare(fused), Expected, map_free_vars=True)
    (func,) = group_functions(fused).values()
    group = ConvGraph.from_json(func.attrs["optifx.group"])
    assert [node.name for node in group.nodes] == ["n0", "n1"]
    assert (group.inputs, group.params, group.outputs) == (("x0",), ("w0", "w1"), ("n0", "n1"))
    assert json.loads(func.attrs["optifx.tile"]) == {"height": 2, "width": 2, "channel_slices": 1}
    assert func.attrs["optifx.mode"] == "straight"
    assert "Primitive" not in func.attrs
    assert "global_symbol" not in func.attrs
    _check_numbers(Before, _everything)


def test_the_plan_is_kept_in_the_module() -> None:
    plan = json.loads(fuse(Before, _everything).attrs["optifx.plan"])["main"]
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
    assert _block(fused) == ["optifx_conv2d", "relax.nn.softmax", "optifx_max_pool2d"]


def test_leaves_its_input_alone_and_is_idempotent() -> None:
    net = Net()
    x = net.input(1, 6, 6, 4)
    mod = net.module(lambda: net.add(net.conv_relu(net.conv_relu(x, 4), 4, 3), x))
    before = tvm.ir.save_json(mod)
    fused = fuse(mod, _everything)
    assert tvm.ir.save_json(mod) == before
    assert tvm.ir.save_json(fuse(mod, _everything)) == tvm.ir.save_json(fused)
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
    fused = _check_numbers(mod, pairs)
    assert _block(fused) == ["optifx_conv2d_conv2d"] * 3
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
    fused = _check_numbers(mod, _everything)
    assert _block(fused) == ["relax.reshape", "optifx_conv2d"]
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

    _check_numbers(mod, plan)


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
    fused = _check_numbers(mod, single_node_partition)
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


# Differential: unfused against outlined, with random legal partitions.


def _residual(net: Net):
    x = net.input(1, 7, 6, 4)

    def body():
        y = net.conv_relu(x, 4, 3)
        z = net.relu(net.add(net.bias(net.conv(y, 4, 3)), x))
        return net.relu(net.add(net.conv(z, 4), y)), z

    return net.module(body)


def _inception(net: Net):
    x = net.input(2, 9, 8, 5)

    def body():
        first = net.conv_relu(x, 3)
        second = net.conv_relu(net.conv_relu(x, 3), 4, 3)
        pooled = net.conv_relu(net.pool(x, "avg", stride=1, pad=1), 2)
        joined = net.concat(first, second, pooled, first)
        part = net.emit(op.strided_slice(joined, [3], [2], [6]))
        return net.pool(joined, k=2, ceil=True), net.conv(part, 3, 3, stride=2)

    return net.module(body)


def _squeeze_and_excite(net: Net):
    x = net.input(1, 6, 6, 8)

    def body():
        y = net.emit(nn.silu(net.bias(net.depthwise(x, stride=2))))
        mean = net.emit(op.mean(y, [1, 2], keepdims=True))
        gate = net.emit(op.sigmoid(net.conv(net.conv_relu(mean, 4), 8)))
        return net.conv_relu(net.emit(op.multiply(y, gate)), 8)

    return net.module(body)


def _densenet(net: Net):
    x = net.input(1, 6, 6, 4)

    def body():
        features = net.conv_relu(x, 4, 3)
        for _ in range(3):
            new = net.conv(net.bn_relu(net.conv(net.bn_relu(features), 6)), 3, 3)
            features = net.concat(features, new)
        return net.pool(net.conv(net.bn_relu(features), 4), "avg", k=2)

    return net.module(body)


def _nasnet(net: Net):
    x = net.input(1, 7, 7, 4)

    def body():
        left = net.conv(net.depthwise(net.relu(x), 3), 5)
        right = net.conv(net.depthwise(net.relu(x), 5), 5)
        total = net.add(left, right)
        return net.concat(total, net.pool(total, stride=1, pad=1), left)

    return net.module(body)


def _unet(net: Net):
    x = net.input(1, 8, 8, 3)

    def body():
        skip = net.conv_relu(x, 4, 3)
        low = net.conv_relu(net.pool(skip, k=2), 6, 3)
        up = net.emit(
            nn.conv2d_transpose(
                low, net.const(6, 2, 2, 4), strides=(2, 2), padding=(0, 0, 0, 0),
                data_layout="NHWC", kernel_layout="IHWO",
            )
        )  # fmt: skip
        return net.conv(net.concat(net.bias(up), skip), 2, 3)

    return net.module(body)


_NETS = [_residual, _inception, _squeeze_and_excite, _densenet, _nasnet, _unet]


@pytest.mark.parametrize("make", _NETS)
def test_random_partitions_keep_the_numbers(make) -> None:
    mod = make(Net())
    args = feed(mod)
    wanted = run(mod, args)
    assert all(np.abs(array).max() > 0.05 for array in wanted)
    fused = [fuse(mod, single_node_partition)]
    fused += [fuse(mod, lambda graph, s=seed: random_partition(graph, s, 3.0)) for seed in (1, 2)]
    assert len({len(group_functions(m)) for m in fused}) > 1
    for module in fused:
        for expected, got in zip(wanted, run(module, args), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_half_precision_chain() -> None:
    net = Net("float16")
    x = net.input(1, 5, 5, 8, dtype="float32")

    def body():
        y = net.bias(net.conv(net.cast(x, "float16"), 8, 3, out="float32"), "float32")
        first = net.cast(net.relu(y), "float16")
        z = net.bias(net.conv(first, 8, 3, out="float32"), "float32")
        joined = net.add(z, net.cast(first, "float32"))
        return net.cast(net.relu(joined), "float16")

    mod = net.module(body)
    fused = _check_numbers(mod, _everything)
    assert _block(fused) == ["optifx_conv2d_conv2d"]
    _check_numbers(mod, single_node_partition)


def test_planners_by_name() -> None:
    mod = _inception(Net())
    counts = {}
    for planner in ("search", "greedy", "none"):
        fused = AFusion(target="llvm", planner=planner)(mod)
        plan = json.loads(fused.attrs["optifx.plan"])["main"]
        counts[planner] = plan["fused_kernels"]
        assert (plan["planner"], plan["unfused_kernels"]) == (planner, 8)
        assert tvm.ir.save_json(AFusion(target="llvm", planner=planner)(mod)) == tvm.ir.save_json(
            fused
        )
    assert counts["search"] < counts["none"] == 8
    with tvm.target.Target("llvm"):
        AFusion(planner="greedy")(mod)
    with pytest.raises(OptionError, match="planner 'best' is not known"):
        AFusion(target="llvm", planner="best")(mod)


def test_random_partitions_are_seeded_and_fuse() -> None:
    graphs = []

    def planner(graph: ConvGraph) -> Partition:
        graphs.append(graph)
        return single_node_partition(graph)

    fuse(_densenet(Net()), planner)
    (graph,) = graphs
    first, second = (random_partition(graph, 5, 3.0) for _ in range(2))
    assert first == second
    assert random_partition(graph, 6, 3.0) != first
    assert max(len(group.nodes) for group in first.groups) > 2
