"""The nine networks: names, shapes, weights, and numbers against onnxruntime, TVM and torch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import safetensors.numpy
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend import nn

from optifx_tvm import zoo
from optifx_tvm.errors import ModelError
from optifx_tvm.zoo import layers
from optifx_tvm.zoo.weights import random_weights
from tests.support.running import RELATIVE_ERROR, image, module_of, relative, run_onnx, run_tvm

# Parameters without batch norm statistics; names with statistics; sha256 of the sorted lines
# "name [shape]" of the reference implementation's state_dict without batch counters and aux heads.
REFERENCE = {
    "googlenet": (6_624_904, 287, "fa3d44cfc0caf557"),
    "resnet18": (11_689_512, 102, "fc669aac650ab66f"),
    "resnet50": (25_557_032, 267, "584ee931ad382885"),
    "densenet121": (7_978_856, 606, "c4a956e878d257a8"),
    "mobilenet_v2": (3_504_872, 262, "07c1a8796c1aa659"),
    "squeezenet1_1": (1_235_496, 52, "d67adc94cdb2fd98"),
    "nasnet_a_mobile": (5_289_978, 1126, "2f64afb8b297a231"),
    "nasnet_a_large": (88_753_150, 1546, "ad84412dc47d941e"),
    "unet": (31_037_698, 100, "e0fe6e51c75ae709"),
}
A_NAME_EACH = {
    "googlenet": ("inception4e.branch3.1.conv.weight", (128, 32, 3, 3)),
    "resnet18": ("layer2.0.downsample.0.weight", (128, 64, 1, 1)),
    "resnet50": ("layer3.5.bn3.running_var", (1024,)),
    "densenet121": ("features.denseblock2.denselayer12.conv2.weight", (32, 128, 3, 3)),
    "mobilenet_v2": ("features.1.conv.0.0.weight", (32, 1, 3, 3)),
    "squeezenet1_1": ("features.12.expand3x3.bias", (256,)),
    "nasnet_a_mobile": ("cell_12.path_2.conv.weight", (88, 528, 1, 1)),
    "nasnet_a_large": (
        "reduction_cell_1.comb_iter_0_right.separable_1.depthwise_conv2d.weight",
        (672, 1, 7, 7),
    ),
    "unet": ("up1.up.weight", (1024, 512, 2, 2)),
}
SIZES = {name: 96 if name.startswith("nasnet") else 64 for name in zoo.names()}
SMALLEST = {"googlenet": 15, "densenet121": 29, "squeezenet1_1": 17, "unet": 16}


def parameter_shapes(name: str) -> dict[str, tuple[int, ...]]:
    network = zoo._NETWORKS[name].create()
    return {key: tuple(int(n) for n in p.shape) for key, p in network.named_parameters()}


def constants(module: tvm.IRModule) -> list[np.ndarray]:
    found: list[np.ndarray] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst):
            found.append(expr.value.numpy())

    relax.analysis.post_order_visit(module["main"], visit)
    return found


def test_names():
    assert zoo.names() == tuple(REFERENCE)


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_are_those_of_the_reference(name):
    count, entries, digest = REFERENCE[name]
    shapes = parameter_shapes(name)
    key, shape = A_NAME_EACH[name]
    assert shapes[key] == shape
    learned = {k: s for k, s in shapes.items() if not k.endswith(("running_mean", "running_var"))}
    assert sum(int(np.prod(s)) for s in learned.values()) == count
    assert len(shapes) == entries
    lines = "\n".join(sorted(f"{k} {list(s)}" for k, s in shapes.items()))
    assert hashlib.sha256(lines.encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize("name", zoo.names())
def test_default_input_and_output(name):
    size = {"nasnet_a_large": 331, "unet": 256}.get(name, 224)
    main = zoo.build(name, batch=2, bind=False)["main"]
    assert main.params[0].name == "data"
    assert [int(n) for n in main.params[0].ty.shape] == [2, 3, size, size]
    expected = [2, 2, size, size] if name == "unet" else [2, 1000]
    assert [int(n) for n in main.ret_ty.shape] == expected
    assert len(main.params) == 1 + REFERENCE[name][1]


@pytest.mark.parametrize("name", zoo.names())
def test_activations_stay_in_range(name):
    size = SIZES[name]
    module = zoo.build(name, [1, 3, size, size])
    relax.analysis.well_formed(module)  # raises if it is not
    assert len(module["main"].params) == 1
    x = image(1, 3, size, size)
    logits, others, nudged = run_onnx(
        module, x, image(1, 3, size, size, seed=1), x + 1e-3 * image(1, 3, size, size, seed=2)
    )
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5
    assert relative(others, logits) > 0.05, "the output must depend on the input"
    assert relative(nudged, logits) < 1e-2, "rounding errors must not be amplified"


@pytest.mark.parametrize("name, size", [("squeezenet1_1", 33), ("unet", 36)])
def test_tvm_and_onnxruntime_agree(name, size):
    """36 is odd at U-Net's deepest levels: its padding in front of the concat is exercised."""
    module = zoo.build(name, [1, 3, size, size])
    x = image(1, 3, size, size)
    assert relative(run_tvm(module, x), run_onnx(module, x)[0]) < RELATIVE_ERROR


def test_batch_norms_are_left_for_the_passes():
    text = zoo.build("resnet18", [1, 3, 32, 32]).script()
    assert text.count("R.nn.batch_norm") == 20
    assert "training=True" not in text
    assert 'data_layout="NHWC"' not in text


def test_same_seed_same_weights():
    first, again, other = (zoo.build("squeezenet1_1", [1, 3, 32, 32], seed=s) for s in (1, 1, 2))
    assert tvm_ffi.structural_equal(first, again)
    assert not tvm_ffi.structural_equal(first, other)


def test_weights_do_not_depend_on_the_input_size():
    small, large = (constants(zoo.build("nasnet_a_mobile", [1, 3, s, s])) for s in (65, 96))
    assert len(small) == len(large) == REFERENCE["nasnet_a_mobile"][1]
    assert all(np.array_equal(a, b) for a, b in zip(small, large, strict=True))


def test_half_precision():
    module = zoo.build("mobilenet_v2", [1, 3, 64, 64], dtype="float16")
    assert {c.dtype for c in constants(module)} == {np.dtype("float16")}
    x = image(1, 3, 64, 64)
    half = run_onnx(module, x.astype("float16"))[0].astype("float32")
    assert relative(half, run_onnx(zoo.build("mobilenet_v2", [1, 3, 64, 64]), x)[0]) < 5e-3


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_checkpoint_round_trip(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    values = random_weights(parameter_shapes("squeezenet1_1"), seed=7)
    if suffix == ".npz":
        np.savez(path, **values)
    else:
        safetensors.numpy.save_file(values, path)
    loaded = zoo.load_weights(path)
    assert loaded.keys() == values.keys()
    assert all(np.array_equal(loaded[key], values[key]) for key in values)
    from_path = zoo.build("squeezenet1_1", [1, 3, 32, 32], weights=path)
    from_dict = zoo.build("squeezenet1_1", [1, 3, 32, 32], weights=values)
    assert tvm_ffi.structural_equal(from_path, from_dict)
    # squeezenet has no batch norm, so that random weights of the same seed are the same values
    assert tvm_ffi.structural_equal(from_path, zoo.build("squeezenet1_1", [1, 3, 32, 32], seed=7))


def test_counters_aux_heads_and_old_densenet_names_are_accepted():
    shapes = parameter_shapes("densenet121")
    values = {
        key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): np.ones(shape, "float32")
        for key, shape in shapes.items()
    }
    values["features.norm0.num_batches_tracked"] = np.asarray(3)
    zoo.build("densenet121", [1, 3, 32, 32], weights=values)
    values = {k: np.ones(s, "float32") for k, s in parameter_shapes("googlenet").items()}
    values["aux1.fc1.weight"] = np.ones((2, 2), "float32")
    zoo.build("googlenet", [1, 3, 32, 32], weights=values)


def test_misfitting_weights_are_listed_in_one_error():
    values = random_weights(parameter_shapes("squeezenet1_1"), seed=0)
    del values["features.0.bias"]
    values["head.weight"] = np.zeros(3, "float32")
    values["classifier.1.bias"] = np.zeros(10, "float32")
    with pytest.raises(ModelError) as caught:
        zoo.build("squeezenet1_1", [1, 3, 32, 32], weights=values)
    message = str(caught.value)
    assert "\n" not in message
    assert "1 missing (features.0.bias)" in message
    assert "1 unexpected (head.weight)" in message
    assert "1 mismatched (classifier.1.bias [10] instead of [1000])" in message


def test_long_lists_of_misfits_are_cut():
    with pytest.raises(ModelError, match=r"52 missing \(.* and 48 more\)"):
        zoo.build("squeezenet1_1", [1, 3, 32, 32], weights={})


@pytest.mark.parametrize("content", [None, b"not a zip file"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
def test_unreadable_weights(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="weights"):
        zoo.load_weights(path)


def test_truncated_weights(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, a=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"weights\.npz can't be read"):
        zoo.load_weights(path)


def test_unknown_name_lists_the_names():
    with pytest.raises(ModelError, match="'alexnet'.*googlenet.*unet"):
        zoo.build("alexnet")


@pytest.mark.parametrize("name, smallest", SMALLEST.items())
def test_smallest_input(name, smallest):
    zoo.build(name, [1, 3, smallest, smallest], bind=False)
    with pytest.raises(ModelError, match=f"at least {smallest}x{smallest}"):
        zoo.build(name, [1, 3, 64, smallest - 1], bind=False)


@pytest.mark.parametrize("shape", [[3, 64, 64], [1, 1, 64, 64], [0, 3, 64, 64], [1, 3, 64, 0]])
def test_other_illegal_inputs(shape):
    with pytest.raises(ModelError, match="zoo:resnet18"):
        zoo.build("resnet18", shape)


def test_other_dtypes_are_refused():
    with pytest.raises(ModelError, match="int8"):
        zoo.build("resnet18", dtype="int8")


def test_onnx_export_names_what_it_can_not_do():
    with pytest.raises(ModelError, match="bind the parameters"):
        zoo.to_onnx(zoo.build("squeezenet1_1", [1, 3, 32, 32], bind=False))

    class Odd(nn.Module):
        def forward(self, data: nn.Tensor) -> nn.Tensor:
            return nn.op.tanh(data)

    with pytest.raises(ModelError, match=r"relax\.tanh"):
        zoo.to_onnx(module_of(Odd(), (1, 3, 4, 4))[0])


@pytest.mark.parametrize(
    "size, kernel, stride, expected",
    [(8, 3, 2, (0, 1)), (7, 3, 2, (1, 1)), (8, 7, 2, (2, 3)), (9, 7, 2, (3, 3)), (5, 5, 1, (2, 2))],
)
def test_same_padding(size, kernel, stride, expected):
    x = nn.Tensor.placeholder((1, 1, size, 8 if size % 2 == 0 else 7), "float32")
    top, left, bottom, right = layers.pads(x, kernel, stride, "same")
    assert (top, bottom) == expected
    assert left + right >= 1


@pytest.mark.parametrize("count_include_pad, corner", [(True, 4 / 9), (False, 1.0)])
def test_average_pool_at_the_border(count_include_pad, corner):
    """Both references have 3x3, stride 2 over an even size: the padding is below and right."""
    pool = layers.AvgPool2d(3, 2, "same", count_include_pad)
    y = run_tvm(module_of(pool, (1, 1, 4, 4))[0], np.ones((1, 1, 4, 4), "float32"))
    assert y[0, 0, 0, 0] == 1.0
    np.testing.assert_allclose(y[0, 0, 1, 1], corner, rtol=1e-6)


def concat_read_by(main: relax.Function, weight: str) -> relax.Var:
    """The joined tensor from which the 1x1 convolution with this weight reads in the end."""
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    calls = (v for v in values.values() if isinstance(v, relax.Call))
    (conv,) = (c for c in calls if weight in [getattr(a, "name", None) for a in c.args])
    var = conv.args[0]
    while values[var].op.name != "relax.concat":
        var = values[var].args[0]
    return var


@pytest.mark.parametrize(
    "name, producer, consumer",
    [
        # Large: behind a reduction, the last cell but one before it, which its last cell reads too
        ("nasnet_a_large", "cell_5.conv_1x1.conv.weight", "cell_6.path_1.conv.weight"),
        ("nasnet_a_large", "cell_11.conv_1x1.conv.weight", "cell_12.path_2.conv.weight"),
        # Mobile: the last cell before it, which the reduction reads too
        ("nasnet_a_mobile", "reduction_cell_0.conv_1x1.conv.weight", "cell_6.path_1.conv.weight"),
        ("nasnet_a_mobile", "reduction_cell_1.conv_1x1.conv.weight", "cell_12.path_2.conv.weight"),
    ],
)
def test_what_nasnet_takes_across_a_reduction(name, producer, consumer):
    main = zoo.build(name, [1, 3, 64, 64], bind=False)["main"]
    assert concat_read_by(main, producer) == concat_read_by(main, consumer)


def test_only_the_large_nasnet_counts_padding():
    """timm pads for its stride-2 average pools before pooling, pretrained-models does not."""
    counting = [
        zoo.build(name, [1, 3, 64, 64], bind=False).script().count("count_include_pad=True")
        for name in ("nasnet_a_mobile", "nasnet_a_large")
    ]
    assert counting == [0, 4]
