"""Extraction: which operators form which stage, and that the stages mean what the module means."""

from __future__ import annotations

import pytest
from tvm import relax

from optifx_tvm.extract import extract_graph
from optifx_tvm.graph import Step
from tests.support.relax_nets import Net, check_interpreted, nn, op, stage_kinds, stages


def test_conv_bias_relu_is_one_node() -> None:
    net = Net()
    x = net.input(2, 7, 6, 3)
    mod = net.module(lambda: net.conv_relu(x, 5, 3, stride=2, pad=(0, 1, 2, 1), dilation=1))
    found = extract_graph(mod)
    (node,) = found.graph.nodes
    assert (node.name, node.op, node.inputs) == ("gv", "conv2d", ("x",))
    assert node.window.kernel == (3, 3)
    assert node.window.strides == (2, 2)
    assert node.window.padding == (0, 1, 2, 1)
    bias = node.epilogue[0].args[1]
    assert node.epilogue == (Step("add", (0, bias)), Step("relu", (1,)))
    assert node.source == ("nn.conv2d lv", "add lv1", "nn.relu gv")
    assert found.graph.shape(bias) == (5,)
    assert found.graph.inputs == ("x",)
    assert found.graph.params == (node.weight, bias)
    assert found.graph.outputs == ("gv",)
    assert found.values["gv"].same_as(mod["main"].body.blocks[0].bindings[-1].var)
    check_interpreted(mod)


@pytest.mark.parametrize(
    ("activation", "steps"),
    [
        (lambda net, y: net.emit(op.clip(y, 0, 6)), ["clip"]),
        (lambda net, y: net.emit(nn.leakyrelu(y, 0.1)), ["leaky_relu"]),
        (lambda net, y: net.emit(nn.silu(y)), ["sigmoid", "multiply"]),
        (lambda net, y: net.emit(op.multiply(y, net.emit(op.sigmoid(y)))), ["sigmoid", "multiply"]),
        (lambda net, y: net.emit(op.square(y)), ["multiply"]),
        (
            lambda net, y: net.emit(
                op.multiply(
                    y,
                    net.emit(op.clip(net.emit(op.add(y, relax.const(3.0))), 0.0, 6.0)),
                )
            ),
            ["add", "clip", "multiply"],
        ),
        (lambda net, y: net.emit(nn.gelu(y)), ["multiply", "erf", "add", "multiply", "multiply"]),
        (
            lambda net, y: net.emit(nn.gelu_tanh(y)),
            ["multiply"] * 2 + ["add"] + ["multiply"] * 2 + ["tanh", "add"] + ["multiply"] * 2,
        ),
        (
            lambda net, y: net.emit(nn.prelu(y, net.const(4), axis=3)),
            ["maximum", "minimum", "multiply", "add"],
        ),
        (lambda net, y: net.emit(op.divide(relax.const(1.0), net.emit(op.exp(y)))),
         ["exp", "divide"]),
        (lambda net, y: net.emit(op.power(net.emit(op.abs(y)), relax.const(1.5))),
         ["abs", "power"]),
    ],
)  # fmt: skip
def test_activations_are_epilogues(activation, steps) -> None:
    net = Net()
    x = net.input(1, 5, 4, 3)
    mod = net.module(lambda: activation(net, net.bias(net.conv(x, 4))))
    assert stage_kinds(mod) == [("conv2d", [], ["add", *steps])]
    check_interpreted(mod)


def test_the_later_producer_takes_a_residual_add() -> None:
    net = Net()
    x = net.input(1, 6, 6, 4)

    def body():
        left = net.bias(net.conv(x, 8, 3))
        right = net.bias(net.conv(x, 8, 1))
        return net.relu(net.add(left, right))

    mod = net.module(body)
    assert stages(mod) == {
        "lv1": ("conv2d", ("x",), [], ["add"]),
        "gv": ("conv2d", ("x",), [], ["add", "add", "relu"]),
    }
    assert extract_graph(mod).graph.by_name["gv"].epilogue[1] == Step("add", ("lv1", 1))
    check_interpreted(mod)


def test_a_residual_of_the_nodes_own_input_is_an_operand() -> None:
    net = Net()
    x = net.input(1, 6, 5, 4)
    mod = net.module(lambda: net.add(net.conv(x, 4, 3), x))
    (node,) = extract_graph(mod).graph.nodes
    assert node.epilogue == (Step("add", (0, "x")),)
    check_interpreted(mod)


def test_values_read_elsewhere_end_the_chain() -> None:
    net = Net()
    x = net.input(1, 6, 5, 4)

    def body():
        biased = net.bias(net.conv(x, 4))
        return net.relu(biased), net.conv(biased, 3)

    mod = net.module(body)
    assert stages(mod) == {
        "lv1": ("conv2d", ("x",), [], ["add"]),
        "gv": ("elementwise", ("lv1",), [], ["relu"]),
        "gv1": ("conv2d", ("lv1",), [], []),
    }
    check_interpreted(mod)


def test_an_output_in_the_middle_ends_the_chain() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)

    def body():
        middle = net.bias(net.conv(x, 4))
        return middle, net.relu(middle)

    assert stage_kinds(net.module(body)) == [("conv2d", [], ["add"]), ("elementwise", [], ["relu"])]


def test_squeeze_and_excite() -> None:
    net = Net()
    x = net.input(2, 6, 6, 8)

    def body():
        y = net.emit(nn.silu(net.depthwise(x)))
        mean = net.emit(op.mean(y, [1, 2], keepdims=True))
        gate = net.emit(op.sigmoid(net.conv(net.conv_relu(mean, 4), 8)))
        return net.add(net.conv(net.emit(op.multiply(y, gate)), 8), x)

    mod = net.module(body)
    assert stage_kinds(mod) == [
        ("conv2d", [], ["sigmoid", "multiply"]),
        ("avg_pool2d", [], []),
        ("conv2d", [], ["add", "relu"]),
        ("conv2d", [], ["sigmoid"]),
        ("conv2d", ["multiply"], ["add"]),
    ]
    check_interpreted(mod)


def test_densenet_chain_reads_the_original_parts() -> None:
    net = Net()
    x = net.input(1, 6, 6, 4)

    def body():
        features = net.conv_relu(x, 4, 3)
        for _ in range(3):
            new = net.conv(net.bn_relu(net.conv(net.bn_relu(features), 6)), 3, 3)
            features = net.concat(features, new)
        return net.conv(net.bn_relu(features), 4)

    mod = net.module(body)
    nodes = extract_graph(mod).graph.nodes
    concats = [node for node in nodes if node.op == "concat"]
    assert [len(node.inputs) for node in concats] == [2, 3, 4]
    assert concats[2].inputs[:3] == concats[1].inputs
    graph = extract_graph(mod).graph
    assert all(len(graph.consumers[node.name]) == 1 for node in concats)
    readers = [graph.by_name[graph.consumers[node.name][0]] for node in concats]
    for reader in readers:
        assert [step.op for step in reader.prologue] == ["multiply", "add", "relu"]
    assert all(node.op in ("conv2d", "concat") for node in nodes)
    check_interpreted(mod)


def test_bn_relu_of_a_concat_with_several_readers_is_its_epilogue() -> None:
    net = Net()
    x = net.input(1, 5, 5, 4)

    def body():
        joined = net.bn_relu(net.concat(x, net.conv(x, 3)))
        return net.conv(joined, 3), net.pool(joined)

    mod = net.module(body)
    assert stage_kinds(mod) == [
        ("conv2d", [], []),
        ("concat", [], ["multiply", "add", "relu"]),
        ("conv2d", [], []),
        ("max_pool2d", [], []),
    ]
    check_interpreted(mod)


def test_nasnet_relu_of_a_shared_tensor_is_a_prologue() -> None:
    net = Net()
    x = net.input(1, 7, 7, 4)

    def body():
        left = net.conv(net.depthwise(net.relu(x), 3), 5)
        right = net.conv(net.depthwise(net.relu(x), 5), 5)
        return net.add(left, right)

    mod = net.module(body)
    assert stage_kinds(mod) == [
        ("conv2d", ["relu"], []),
        ("conv2d", [], []),
        ("conv2d", ["relu"], []),
        ("conv2d", [], ["add"]),
    ]
    check_interpreted(mod)


def test_max_pool_takes_a_prologue_and_pads_after_it() -> None:
    net = Net()
    x = net.input(1, 5, 5, 4)
    mod = net.module(lambda: net.pool(net.emit(op.exp(net.emit(op.negative(x)))), pad=1))
    assert stage_kinds(mod) == [("max_pool2d", ["negative", "exp"], [])]
    check_interpreted(mod)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
def test_pooling(include: bool, ceil: bool) -> None:
    net = Net()
    x = net.input(2, 7, 8, 3)

    def body():
        pad = (1, 0, 1, 1)
        mean = net.pool(x, "avg", pad=pad, ceil=ceil, count_include_pad=include)
        return mean, net.pool(x, "max", k=2, pad=pad, ceil=ceil)

    check_interpreted(net.module(body))


def test_transposed_convolution_with_output_padding() -> None:
    net = Net()
    x = net.input(1, 4, 5, 6)

    def body():
        call = nn.conv2d_transpose(
            x, net.const(6, 3, 3, 4), strides=(2, 3), padding=(1, 0, 0, 1), output_padding=(1, 2),
            data_layout="NHWC", kernel_layout="IHWO",
        )  # fmt: skip
        return net.bias(net.emit(call))

    mod = net.module(body)
    (node,) = extract_graph(mod).graph.nodes
    assert node.window.padding == (1, 0, -1, -1)
    check_interpreted(mod)


def test_half_precision_chain_ends_in_a_cast() -> None:
    net = Net("float16")
    x = net.input(1, 5, 5, 8, dtype="float32")

    def body():
        y = net.bias(net.conv(net.cast(x, "float16"), 8, 3, out="float32"), "float32")
        first = net.cast(net.relu(y), "float16")
        z = net.bias(net.conv(first, 8, 3, out="float32"), "float32")
        joined = net.add(z, net.cast(first, "float32"))
        return net.cast(net.relu(joined), "float16")

    mod = net.module(body)
    assert stage_kinds(mod) == [
        ("conv2d", ["cast:float16"], ["add", "relu", "cast:float16"]),
        ("conv2d", [], ["add", "cast:float32", "add", "relu", "cast:float16"]),
    ]
    graph = extract_graph(mod).graph
    assert [graph.tensors[node.name].dtype for node in graph.nodes] == ["float16", "float16"]
    assert graph.nodes[1].epilogue[1] == Step("cast:float32", (graph.nodes[0].name,))
    check_interpreted(mod, tolerance=2e-3)


def test_a_cast_read_by_two_chains_is_copied_into_both() -> None:
    net = Net("float16")
    x = net.input(1, 4, 4, 8)

    def body():
        wide = net.cast(x, "float32")
        left = net.add(net.conv(x, 8, out="float32"), wide)
        right = net.add(net.conv(x, 8, 3, out="float32"), wide)
        return net.cast(left, "float16"), net.cast(right, "float16")

    mod = net.module(body)
    chain = ["cast:float32", "add", "cast:float16"]
    assert stage_kinds(mod) == [("conv2d", [], chain), ("conv2d", [], chain)]
    check_interpreted(mod, tolerance=2e-3)
