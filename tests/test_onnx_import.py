"""ONNX operators, imported, canonicalised and run by TVM, against onnxruntime.

The cases of one group are branches of one model: one compilation each, as imported and in
canonical form.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from optifx_tvm.errors import ModelError
from optifx_tvm.frontend import import_model
from optifx_tvm.passes import CanonicalizeConv
from tests.support.light_models import run_onnx
from tests.support.rewriting import calls, ops, run

IMAGE = (1, 3, 9, 7)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("float32")


def f32(*values: float) -> np.ndarray:
    return np.array(values, "float32")


def i64(*values: int) -> np.ndarray:
    return np.array(values, "int64")


def model(nodes, inputs, constants, outputs, opset=13) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def one_node(op, *constants, shape=IMAGE, opset=13, outputs=1, **attrs) -> onnx.ModelProto:
    """``constants`` are the inputs after the first, None where one is left out."""
    names = ["" if c is None else f"c{i}" for i, c in enumerate(constants)]
    values = {n: c for n, c in zip(names, constants, strict=True) if c is not None}
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, ["x", *names], results, name="the_node", **attrs)
    return model([node], {"x": shape}, values, results, opset)


def case(op, *constants, shape=IMAGE, **attrs):
    return op, constants, shape, attrs


W, B = random(4, 3, 3, 2), random(4)
WT, BT = random(3, 4, 3, 2), random(4)
WINDOW = {"kernel_shape": [3, 2], "strides": [2, 2]}
SCALE = f32(1, 1, 2, 3)

GROUPS = {
    "convolutions": (
        13,
        {
            "plain": case("Conv", W, B),
            "same upper": case("Conv", W, auto_pad="SAME_UPPER", strides=[2, 3]),
            "same lower": case("Conv", W, auto_pad="SAME_LOWER", strides=[2, 1]),
            "valid": case("Conv", W, auto_pad="VALID", dilations=[2, 1]),
            "asymmetric": case("Conv", W, B, pads=[0, 1, 2, 3], strides=[1, 2]),
            "grouped": case("Conv", random(6, 2, 3, 3), shape=(2, 4, 5, 6), group=2),
            "depthwise": case("Conv", random(6, 1, 3, 3), group=3, pads=[1] * 4),
        },
    ),
    "transposed convolutions": (
        13,
        {
            "plain": case("ConvTranspose", WT, BT),
            "strided": case(
                "ConvTranspose", WT, strides=[2, 2], pads=[1] * 4, output_padding=[1, 0]
            ),
            "dilated": case("ConvTranspose", WT, dilations=[2, 3], pads=[1, 0, 1, 2]),
            "grouped": case("ConvTranspose", random(4, 3, 2, 2), shape=(1, 4, 3, 5), group=2),
            "same": case("ConvTranspose", WT, strides=[2, 3], auto_pad="SAME_UPPER"),
            "size": case("ConvTranspose", WT, BT, strides=[2, 2], output_shape=[18, 13]),
            "size, upper": case(
                "ConvTranspose", WT, strides=[2, 2], output_shape=[16, 13], auto_pad="SAME_UPPER"
            ),
            "size, lower": case(
                "ConvTranspose", WT, strides=[2, 2], output_shape=[16, 13], auto_pad="SAME_LOWER"
            ),
            "size, larger": case("ConvTranspose", WT, strides=[3, 3], output_shape=[28, 22]),
        },
    ),
    "pooling": (
        13,
        {
            f"{op} {name}": case(op, **{**WINDOW, **attrs})
            for op in ("MaxPool", "AveragePool")
            for name, attrs in {
                "plain": {},
                "ceil": {"ceil_mode": 1},
                "ceil, padded": {"ceil_mode": 1, "pads": [1, 0, 1, 1]},
                "asymmetric": {"pads": [0, 1, 2, 0]},
                "same upper": {"auto_pad": "SAME_UPPER"},
                "same lower": {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
            }.items()
        }
        | {
            "counts padding": case("AveragePool", **WINDOW, pads=[1] * 4, count_include_pad=1),
            "dilated": case("MaxPool", kernel_shape=[3, 2], dilations=[2, 3]),
            "global mean": case("GlobalAveragePool"),
            "global maximum": case("GlobalMaxPool"),
        },
    ),
    "element-wise": (
        14,
        {
            "clip": case("Clip", np.float32(-0.5), np.float32(0.5)),
            "clip from": case("Clip", np.float32(-0.5)),
            "clip to": case("Clip", None, np.float32(0.5)),
            "prelu of channels": case("PRelu", random(3, 1, 1)),
            "prelu of columns": case("PRelu", random(7)),
            "lrn of 3": case("LRN", size=3, alpha=0.3, beta=0.6, bias=1.5),
            "lrn of 5": case("LRN", size=5, alpha=0.3),
            "hard sigmoid": case("HardSigmoid", alpha=0.3),
            "hard swish": case("HardSwish"),
            "sum": case("Sum", random(3, 1, 1), random(*IMAGE)),
            "mean": case("Mean", random(3, 1, 1), random(7)),
            "minimum": case("Min", random(3, 1, 1), random(7)),
            "dropout": case("Dropout"),
        },
    ),
    "data movement": (
        13,
        {
            "pad": case("Pad", i64(0, 0, 1, 2, 0, 0, 3, 0), np.float32(1.5)),
            "pad by reflection": case("Pad", i64(0, 0, 1, 2, 0, 0, 3, 0), mode="reflect"),
            "pad with the edge": case("Pad", i64(0, 0, 1, 2, 0, 0, 3, 0), mode="edge"),
            "space to depth": case("SpaceToDepth", shape=(1, 3, 4, 6), blocksize=2),
            "depth to space": case("DepthToSpace", shape=(1, 12, 2, 3), blocksize=2),
            "depth to space, CRD": case(
                "DepthToSpace", shape=(1, 12, 2, 3), blocksize=2, mode="CRD"
            ),
            "nearest": case("Resize", None, SCALE, mode="nearest"),
            "nearest, floor": case(
                "Resize",
                *(None, SCALE),
                mode="nearest",
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            ),
            "linear": case("Resize", None, SCALE, mode="linear"),
            "linear, sizes": case(
                "Resize",
                *(f32(), f32(), i64(1, 3, 12, 20)),
                mode="linear",
                coordinate_transformation_mode="align_corners",
            ),
        },
    ),
    "opset 9": (
        9,
        {
            "nearest": case("Upsample", SCALE, mode="nearest"),
            "linear": case("Upsample", SCALE, mode="linear"),
            "slice": case("Slice", starts=[1, -4], ends=[3, 2**31 - 1], axes=[1, 2]),
            "slice of leading axes": case("Slice", starts=[0, 1], ends=[1, 2]),
            "norm": case(
                "BatchNormalization", random(3), random(3), random(3), abs(random(3)) + 0.3
            ),
        },
    ),
    "opset 10": (10, {"nearest": case("Resize", SCALE, mode="nearest")}),
    "opset 18": (
        18,
        {
            "resize of axes": case("Resize", None, f32(2, 2), mode="nearest", axes=[2, 3]),
            "pad of axes": case("Pad", i64(1, 2, 3, 0), None, i64(-1, 2)),
        },
    ),
}


def grouped(opset, cases):
    nodes, inputs, constants = [], {}, {}
    for i, (op, values, shape, attrs) in enumerate(cases.values()):
        names = ["" if v is None else f"c{i}_{k}" for k, v in enumerate(values)]
        constants |= {n: v for n, v in zip(names, values, strict=True) if v is not None}
        inputs[f"x{i}"] = shape
        nodes.append(helper.make_node(op, [f"x{i}", *names], [f"y{i}"], **attrs))
    return model(nodes, inputs, constants, [f"y{i}" for i in range(len(cases))], opset)


def assert_like_onnxruntime(onnx_model, want=None, names=None) -> None:
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx_model.graph.input
    }
    feeds = {name: random(*shape, seed=9) for name, shape in shapes.items()}
    want = run_onnx(onnx_model, **feeds) if want is None else want(*feeds.values())
    imported = import_model(onnx_model)
    assert "call_tir" not in ops(imported)
    for module in (imported, CanonicalizeConv()(imported)):
        got = run(module, *feeds.values())
        for name, g, w in zip(names or feeds, got, want, strict=True):
            assert g.shape == w.shape, name
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=3e-5, err_msg=name)


@pytest.mark.parametrize(("opset", "cases"), GROUPS.values(), ids=GROUPS.keys())
def test_operators(opset, cases):
    assert_like_onnxruntime(grouped(opset, cases), names=list(cases))


def test_even_local_response():
    """onnxruntime refuses even sizes, and onnx's reference loops over the batch."""

    def want(x):
        total = np.zeros_like(x)
        for c in range(x.shape[1]):
            total[:, c] = (x[:, max(0, c - 1) : c + 3] ** 2).sum(1)
        return [x / (1.0 + 0.3 / 4 * total) ** 0.75]

    assert_like_onnxruntime(one_node("LRN", shape=(1, 6, 2, 3), size=4, alpha=0.3), want)


def test_legacy_broadcast_and_slope():
    """Before opset 7: Add with an axis, PRelu with a slope along the channels, Clip attributes."""
    b, slope = random(3), random(3)

    def want(x):
        y = x + b.reshape(3, 1, 1)
        return [np.clip(np.where(y < 0, y * slope.reshape(3, 1, 1), y), 0, 6)]

    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], broadcast=1, axis=1),
        helper.make_node("PRelu", ["a", "s"], ["p"]),
        helper.make_node("Clip", ["p"], ["y"], min=0.0, max=6.0),
    ]
    assert_like_onnxruntime(model(nodes, {"x": IMAGE}, {"b": b, "s": slope}, ["y"], 6), want)


def test_space_to_depth_crd():
    def want(x):
        return [ReferenceEvaluator(inverse).run(None, {"x": x})[0]]

    # Space to depth in CRD mode undoes depth to space in CRD mode.
    nodes = [
        helper.make_node("DepthToSpace", ["x"], ["d"], blocksize=2, mode="CRD"),
        helper.make_node("SpaceToDepth", ["d"], ["y"], blocksize=2, mode="CRD"),
    ]
    inverse = model([helper.make_node("Identity", ["x"], ["y"])], {"x": (1, 12, 2, 3)}, {}, ["y"])
    assert_like_onnxruntime(model(nodes, {"x": (1, 12, 2, 3)}, {}, ["y"], 28), want)


def test_split():
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3),
        helper.make_node("Split", ["x", "sizes"], ["d", "e"], axis=-1),
        helper.make_node("Concat", ["c", "a", "b"], ["y"], axis=1),
        helper.make_node("Concat", ["e", "d"], ["z"], axis=3),
    ]
    onnx_model = model(nodes, {"x": (1, 8, 3, 5)}, {"sizes": i64(2, 3)}, ["y", "z"], 18)
    assert_like_onnxruntime(onnx_model, names=["y", "z"])


def test_reshape_target_computed_from_the_shape():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.int64(0), "axis": i64(0), "rest": i64(-1)}
    onnx_model = model(nodes, {"x": (2, 3, 4, 5)}, constants, ["y"])
    assert_like_onnxruntime(onnx_model)
    assert ops(import_model(onnx_model)) == {"reshape": 1}


def test_dense_head_and_squeeze_excite():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Conv", ["p", "v"], ["q"]),
        helper.make_node("Sigmoid", ["q"], ["s"]),
        helper.make_node("Mul", ["c", "s"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "b"], ["h"], transB=1, alpha=0.5),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "k"], ["t"]),
        helper.make_node("Softmax", ["t"], ["y"]),
    ]
    constants = {"w": random(4, 3, 3, 3), "v": random(4, 4, 1, 1), "g": random(6, 48)}
    constants |= {"b": random(6), "k": random(6, 5)}
    onnx_model = model(nodes, {"x": (2, 3, 5, 6)}, constants, ["y"])
    assert_like_onnxruntime(onnx_model)
    canonical = ops(CanonicalizeConv()(import_model(onnx_model)))
    assert canonical["nn.conv2d"] == 4 and canonical["matmul"] == 0


def test_a_node_read_twice_is_converted_once():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["c", "r"], ["y"]),
    ]
    imported = import_model(model(nodes, {"x": IMAGE}, {"w": W}, ["y"]))
    assert len(calls(imported, "nn.conv2d")) == 1


REFUSED = {
    "unknown": (one_node("LSTM", W[0, 0], W[0, 0]), "unsupported operator LSTM"),
    "training norm": (
        one_node("BatchNormalization", *[abs(B[:3])] * 4, training_mode=1, opset=15),
        "BatchNormalization .*training mode",
    ),
    "indices": (one_node("MaxPool", kernel_shape=[2, 2], outputs=2), "MaxPool .*Indices"),
    "mask": (one_node("Dropout", outputs=2), "Dropout .*mask"),
    "too large": (
        one_node("ConvTranspose", WT, strides=[2, 2], output_shape=[40, 40]),
        "ConvTranspose .*output_shape",
    ),
    "crop": (one_node("Pad", i64(0, 0, -1, 0, 0, 0, 0, 0)), "Pad .*negative"),
    "fraction": (one_node("Resize", None, f32(1, 1, 0.6, 0.6)), "Resize .*fractional"),
    "empty part": (
        one_node("Split", i64(0, 3), axis=1, outputs=2),
        "Split .*size zero",
    ),
    "shape that depends on the data": (one_node("NonZero"), "NonZero .*depends on the data"),
    "another domain": (
        model(
            [helper.make_node("Conv", ["x"], ["y"], name="the_node", domain="ai.acme")],
            {"x": IMAGE},
            {},
            ["y"],
        ),
        "unsupported operator ai.acme.Conv",
    ),
    "wrong shapes": (one_node("Conv", random(4, 5, 3, 3)), "Conv .*can't be imported"),
}


@pytest.mark.parametrize(("onnx_model", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(onnx_model, message, capfd):
    with pytest.raises(ModelError, match=message) as error:
        import_model(onnx_model)
    assert "the_node" in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""


def test_runtime_pads_are_refused():
    node = helper.make_node("Pad", ["x", "p"], ["y"], name="the_node")
    onnx_model = model([node], {"x": IMAGE}, {}, ["y"])
    onnx_model.graph.input.append(helper.make_tensor_value_info("p", TensorProto.INT64, [8]))
    with pytest.raises(ModelError, match=r"Pad .*the_node.*run time"):
        import_model(onnx_model)
