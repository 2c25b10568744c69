"""Extraction: parameters in several roles, what stays opaque, names, and what is refused."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from optifx_tvm.errors import ModelError
from optifx_tvm.extract import extract_graph
from optifx_tvm.graph import Step
from tests.support.relax_nets import Net, check_interpreted, nn, op, stage_kinds, stages


def test_weights_and_constants_that_are_function_parameters() -> None:
    net = Net()
    x, weight = net.input(1, 5, 5, 4), net.input(6, 3, 3, 4, name="w")
    bias, scale = net.input(1, 1, 1, 6, name="b"), net.input(6, name="s")

    def body():
        y = net.emit(op.add(net.conv(x, 6, 3, weight=weight), bias))
        return net.relu(net.emit(op.multiply(y, scale)))

    mod = net.module(body)
    found = extract_graph(mod)
    assert found.graph.inputs == ("x",)
    assert found.graph.params == ("w", "b", "s")
    assert found.graph.shape("b") == (6,)
    assert stage_kinds(mod) == [("conv2d", [], ["add", "multiply", "relu"])]
    check_interpreted(mod)


def test_one_parameter_as_weight_and_as_data_has_two_names() -> None:
    net = Net()
    x = net.input(4, 3, 3, 4)
    mod = net.module(lambda: net.conv(x, 4, 3, weight=x))
    graph = extract_graph(mod).graph
    assert (graph.inputs, graph.params) == (("x",), ("x_1",))
    check_interpreted(mod)


def test_weights_computed_in_the_block_are_opaque() -> None:
    net = Net()
    x, weight = net.input(1, 5, 5, 4), net.input(6, 3, 3, 4, name="w")

    def body():
        scaled = net.emit(op.multiply(net.emit(op.multiply(weight, relax.const(0.5))), weight))
        return net.conv(x, 6, 3, weight=scaled)

    graph = extract_graph(net.module(body)).graph
    assert [(node.name, node.op) for node in graph.nodes] == [
        ("lv", "opaque"),
        ("lv1", "opaque"),
        ("gv", "conv2d"),
    ]
    assert graph.producers("gv") == ("lv1",)


def test_dynamic_filter_keeps_its_dependences() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)

    def body():
        made = net.emit(op.reshape(net.emit(op.mean(x, [1, 2], True)), (4, 1, 1, 1)))
        return net.conv(x, 4, groups=4, weight=made)

    graph = extract_graph(net.module(body)).graph
    assert [node.op for node in graph.nodes] == ["avg_pool2d", "opaque", "conv2d"]
    assert graph.producers("gv") == ("lv1",)
    assert graph.producers("lv1") == ("lv",)


def test_concat_of_one_tensor_twice_and_of_a_flattened_one() -> None:
    net = Net()
    x = net.input(1, 4, 4, 3)

    def body():
        y = net.conv_relu(x, 2)
        return net.concat(net.concat(y, x), y)

    mod = net.module(body)
    assert stages(mod)["gv"][:2] == ("concat", ("lv2", "x", "lv2"))
    assert len(stages(mod)) == 2
    check_interpreted(mod)


def test_a_slice_of_a_concat_is_opaque_and_keeps_the_concat() -> None:
    net = Net()
    x = net.input(1, 4, 4, 3)

    def body():
        joined = net.concat(net.conv(x, 2), x)
        part = net.emit(op.strided_slice(joined, [3], [1], [4]))
        return net.conv(joined, 2), net.relu(part)

    graph = extract_graph(net.module(body)).graph
    assert [node.op for node in graph.nodes] == [
        "conv2d",
        "concat",
        "opaque",
        "conv2d",
        "elementwise",
    ]
    assert graph.by_name["lv2"].inputs == ("lv1",)


@pytest.mark.parametrize(
    "emit",
    [
        lambda net, y: nn.softmax(y, axis=3),
        lambda net, y: op.permute_dims(y, [0, 3, 1, 2]),
        lambda net, y: op.add(y, net.const(1, 1, 4, 1)),
        lambda net, y: op.add(y, net.const(1, 4, 4, 1)),
        lambda net, y: op.astype(y, "int32"),
        lambda net, y: op.concat([y, y], axis=1),
        lambda net, y: op.mean(y, [3], keepdims=True),
        lambda net, y: nn.conv2d(y, net.const(2, 4, 1, 1), data_layout="NHWC",
                                 kernel_layout="OIHW"),
        lambda net, y: nn.max_pool2d(y, (2, 2), layout="NCHW"),
    ],
)  # fmt: skip
def test_what_is_not_handled_is_opaque(emit) -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)

    def body():
        y = net.conv(x, 4)
        return net.emit(emit(net, y))

    graph = extract_graph(net.module(body)).graph
    assert [node.op for node in graph.nodes] == ["conv2d", "opaque"]
    assert graph.producers("gv") == ("lv",)


def test_dynamic_shapes_are_opaque() -> None:
    net = Net()
    batch = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((batch, 4, 4, 4), "float32"))
    net.params.append(x)
    mod = net.module(lambda: net.conv_relu(x, 4))
    assert {node.op for node in extract_graph(mod).graph.nodes} == {"opaque"}


def test_dead_operators_are_left_out() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)
    builder = net.builder
    with builder.function("main", [x]):
        with builder.dataflow():
            y = net.conv(x, 4)
            net.relu(net.conv(y, 3))
            result = builder.emit_output(nn.relu(y))
        builder.emit_func_output(result)
    assert stage_kinds(builder.get()) == [("conv2d", [], ["relu"])]


def test_leftover_chains_are_one_elementwise_node() -> None:
    net = Net()
    x, y = net.input(1, 4, 4, 4), net.input(1, 4, 4, 4, name="y")

    def body():
        gate = net.emit(op.sigmoid(x))
        return net.add(net.emit(op.multiply(x, gate)), y)

    mod = net.module(body)
    (node,) = extract_graph(mod).graph.nodes
    assert (node.op, node.inputs) == ("elementwise", ("x",))
    assert node.epilogue == (
        Step("sigmoid", (0,)),
        Step("multiply", (0, 1)),
        Step("add", (2, "y")),
    )
    check_interpreted(mod)


def test_one_pixel_images() -> None:
    net = Net()
    x = net.input(1, 1, 1, 4)

    def body():
        gate = net.emit(op.sigmoid(net.conv(x, 4)))
        return net.conv(net.emit(op.multiply(net.relu(x), gate)), 3)

    check_interpreted(net.module(body))


def test_names_are_unique_and_deterministic() -> None:
    def build():
        net = Net()
        x = net.input(1, 4, 4, 4)
        builder = net.builder
        with builder.function("main", [x]):
            with builder.dataflow():
                y = relax.DataflowVar("y", x.ty)
                builder.emit_normalized(relax.VarBinding(y, builder.normalize(nn.relu(x))))
                twin = relax.DataflowVar("y", x.ty)
                call = builder.normalize(op.concat([y], axis=3))
                builder.emit_normalized(relax.VarBinding(twin, call))
                result = builder.emit_output(net.conv(twin, 2))
            builder.emit_func_output(result)
        return builder.get()

    first, second = (extract_graph(build()).graph for _ in range(2))
    assert first == second
    assert [node.name for node in first.nodes][:2] == ["y", "y_1"]


def test_extract_graph_refuses_what_it_cant_find() -> None:
    net = Net()
    x = net.input(1, 4, 4, 4)
    mod = net.module(lambda: net.conv(x, 4))
    with pytest.raises(ModelError, match="no Relax function other in the module; it has: main"):
        extract_graph(mod, "other")
    with pytest.raises(ModelError, match="has 0 dataflow blocks"):
        extract_graph(relax.transform.ToNonDataflow()(mod))
