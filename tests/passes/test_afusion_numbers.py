"""AFusion on whole networks: unfused and outlined agree, for planners by name and random plans."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm

from optifx_tvm.errors import OptionError
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Partition
from optifx_tvm.passes import AFusion
from tests.support.random_plans import everything, random_partition, single_node_partition
from tests.support.relax_nets import (
    Net,
    calls_of,
    check_fused,
    feed,
    fuse,
    group_functions,
    interpret,
    nn,
    op,
    random_net,
    run,
)


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
    fused = check_fused(mod, everything)
    assert calls_of(fused) == ["optifx_conv2d_conv2d"]
    check_fused(mod, single_node_partition)


@pytest.mark.parametrize("seed", range(4))
def test_random_networks(seed: int) -> None:
    mod = random_net(seed)
    args = feed(mod)
    fused = fuse(mod, lambda graph: random_partition(graph, seed, 3.0))
    results = zip(run(mod, args), run(fused, args), interpret(mod, args), strict=True)
    for wanted, got, interpreted in results:
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(interpreted, wanted, rtol=1e-4, atol=1e-4)


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
