"""import_model: sources, input shapes, and what a person gets wrong."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from optifx_tvm import torch_import
from optifx_tvm.errors import ModelError, OptionError
from optifx_tvm.frontend import import_model, parse_input_shapes
from optifx_tvm.passes import CanonicalizeConv
from tests.support import light_models
from tests.support.rewriting import const, module, nn, op, ops, run

HAS_TORCH = importlib.util.find_spec("torch") is not None


def symbolic_module() -> tvm.IRModule:
    n = tvm.tirx.Var("n", "int64")

    def build(emit, x, y):
        return op.add(emit(nn.conv2d(x, const(4, 3, 3, 3))), y)

    return module(build, (n, 3, 6, 6), (n, 4, 4, 4))


def onnx_model(*shape: int | str, name: str = "data") -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("Conv", [name, "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def input_shapes(mod: tvm.IRModule) -> list[list[int]]:
    return [[int(extent) for extent in p.ty.shape] for p in mod["main"].params]


class TestShapes:
    def test_text(self):
        assert parse_input_shapes("data:[1,3,224,224] other:[1, 8],b.c : [ 2 ]") == {
            "data": (1, 3, 224, 224),
            "other": (1, 8),
            "b.c": (2,),
        }
        assert parse_input_shapes("onnx::x:[1,2]") == {"onnx::x": (1, 2)}
        assert parse_input_shapes("scalar:[]") == {"scalar": ()}
        assert parse_input_shapes(None) == parse_input_shapes("") == {}
        assert parse_input_shapes({"data": [1, np.int64(3)]}) == {"data": (1, 3)}

    @pytest.mark.parametrize("text", ["data", "data:1,3", "data:[1,-3]", "data:[1,3] x", "[1,3]"])
    def test_unreadable(self, text):
        with pytest.raises(OptionError, match="input shapes"):
            parse_input_shapes(text)

    def test_extents_below_one(self):
        with pytest.raises(OptionError, match="below 1"):
            parse_input_shapes({"data": (0, 3)})


class TestModules:
    def test_module_is_returned_as_it_is(self):
        mod = module(lambda emit, x: nn.relu(x), (1, 3))
        assert import_model(mod).same_as(mod)
        assert import_model(mod, "x0:[1,3]").same_as(mod)

    def test_symbolic_dimensions(self):
        mod = symbolic_module()
        bound = import_model(mod, "x0:[2,3,6,6]")
        assert input_shapes(bound) == [[2, 3, 6, 6], [2, 4, 4, 4]]
        tvm.ir.assert_structural_equal(mod, symbolic_module(), map_free_vars=True)

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            (None, r'open dimensions \(n, 3, 6, 6\).*"x0:\[1,3,6,6\]"'),
            ("x0:[1,3,6]", "has 4 dimensions"),
            ("x0:[1,4,6,6]", "dimension 3 of input 'x0' is 3"),
            ("x0:[1,3,6,6] x1:[2,4,4,4]", "dimension n of input 'x1' is 1"),
            ("image:[1,3,6,6]", "no input 'image'; its inputs are 'x0', 'x1'"),
        ],
    )
    def test_shapes_that_do_not_fit(self, shapes, message):
        with pytest.raises(ModelError, match=message):
            import_model(symbolic_module(), shapes)

    def test_without_main(self):
        with pytest.raises(ModelError, match="no Relax function 'main'"):
            import_model(tvm.IRModule())

    def test_saved_json(self, tmp_path):
        mod = module(lambda emit, x: nn.conv2d(x, const(4, 3, 3, 3)), (1, 3, 6, 6))
        path = tmp_path / "module.json"
        path.write_text(tvm.ir.save_json(mod))
        tvm.ir.assert_structural_equal(import_model(path), mod)
        path.write_text(path.read_text()[:-100])
        with pytest.raises(ModelError, match="save_json"):
            import_model(str(path))
        path.write_text(tvm.ir.save_json(mod["main"].params[0]))
        with pytest.raises(ModelError, match="Relax module is needed"):
            import_model(path)


class TestZoo:
    def test_by_name(self):
        mod = import_model("zoo:resnet18", "data:[2,3,64,64]")
        assert input_shapes(mod) == [[2, 3, 64, 64]]

    def test_unknown(self):
        with pytest.raises(ModelError, match="vgg"):
            import_model("zoo:vgg")
        with pytest.raises(ModelError, match="its input is 'data'"):
            import_model("zoo:resnet18", "x:[1,3,64,64]")


class TestOnnxFiles:
    def test_path_and_proto(self, tmp_path):
        path = tmp_path / "model.onnx"
        proto = onnx_model(1, 3, 6, 6)
        onnx.save(proto, path)
        saved = proto.SerializeToString()
        tvm.ir.assert_structural_equal(import_model(str(path)), import_model(proto))
        assert proto.SerializeToString() == saved

    def test_open_dimensions(self):
        with pytest.raises(ModelError, match=r'\(N, 3, 6, H\).*"data:\[1,3,6,1\]"'):
            import_model(onnx_model("N", 3, 6, "H"))
        bound = import_model(onnx_model("N", 3, 6, "H"), "data:[2,3,6,7]")
        assert input_shapes(bound) == [[2, 3, 6, 7]]
        with pytest.raises(ModelError, match="has 4 dimensions"):
            import_model(onnx_model("N", 3, 6, 6), "data:[2,3]")
        with pytest.raises(ModelError, match="no input 'x'; its inputs are 'data'"):
            import_model(onnx_model("N", 3, 6, 6), "x:[2,3,6,6]")

    def test_names_that_are_no_identifiers(self):
        for spelling in ("input.1", "input_1"):
            mod = import_model(onnx_model("N", 3, 6, 6, name="input.1"), {spelling: (1, 3, 6, 6)})
            assert [p.name for p in mod["main"].params] == ["input_1"]

    @pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 64])
    def test_not_a_model(self, tmp_path, content):
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError, match="model.onnx' is no ONNX model"):
            import_model(path)

    def test_truncated(self, tmp_path):
        path = tmp_path / "model.onnx"
        data = onnx_model(1, 3, 6, 6).SerializeToString()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelError, match="truncated"):
            import_model(path)

    def test_missing_external_data(self, tmp_path):
        path = tmp_path / "model.onnx"
        onnx.save(
            onnx_model(1, 3, 6, 6),
            path,
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=0,
        )
        assert ops(import_model(path)) == {"nn.conv2d": 1}
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(ModelError, match="can't read"):
            import_model(path)

    @pytest.mark.parametrize("name", ["inception_v2", "shufflenet"])
    def test_light_models(self, name):
        """Four more are in tests/passes/test_canonicalize_conv.py; the rest are slow to read."""
        canonical = ops(CanonicalizeConv()(import_model(light_models.path(name))))
        assert canonical["matmul"] == canonical["call_tir"] == 0
        # Besides the input, ShuffleNet permutes in its sixteen shuffles.
        assert canonical["permute_dims"] == (17 if name == "shufflenet" else 1)


class TestOtherSources:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("missing.onnx", "no such file: 'missing.onnx'"),
            ("resnet50", "zoo:NAME"),
            (".", "is not a file"),
            (42, "can't import a int"),
        ],
    )
    def test_refused(self, source, message):
        with pytest.raises(ModelError, match=message):
            import_model(source)

    def test_unknown_suffix(self, tmp_path):
        path = tmp_path / "model.h5"
        path.write_bytes(b"x")
        with pytest.raises(ModelError, match="unknown kind"):
            import_model(path)

    def test_dtype(self):
        mod = module(lambda emit, x: nn.relu(x), (1, 3))
        noted = import_model(mod, dtype="float16")
        assert noted.attrs["optifx.dtype"] == "float16"
        assert mod.attrs is None or "optifx.dtype" not in mod.attrs
        tvm.ir.assert_structural_equal(noted["main"], mod["main"])
        with pytest.raises(OptionError, match="int8"):
            import_model(mod, dtype="int8")

    def test_torch_that_is_not_installed(self, tmp_path, monkeypatch):
        def missing(name):
            raise ImportError(name)

        monkeypatch.setattr(torch_import.importlib, "import_module", missing)
        path = tmp_path / "model.pt2"
        path.write_bytes(b"x")
        with pytest.raises(ModelError, match=r"pip install torch"):
            import_model(path)


@pytest.mark.skipif(not HAS_TORCH, reason="the torch import is not tested: torch is not installed")
@pytest.mark.filterwarnings("default")
class TestTorch:
    @staticmethod
    def network():
        import torch
        from torch import nn as tnn

        class Net(tnn.Module):
            def __init__(self):
                super().__init__()
                self.up = tnn.ConvTranspose2d(3, 4, 2, 2)
                self.conv = tnn.Conv2d(4, 6, 3, padding=1, groups=2)
                self.norm = tnn.BatchNorm2d(6)
                self.prelu = tnn.PReLU(6)
                self.pool = tnn.MaxPool2d(3, 2, 1, ceil_mode=True)
                self.gate = tnn.Conv2d(6, 6, 1)
                self.head = tnn.Linear(6, 5)

            def forward(self, x):
                x = tnn.functional.hardswish(self.norm(self.conv(self.up(x))))
                x = tnn.functional.gelu(x) + tnn.functional.leaky_relu(x, 0.2)
                x = self.pool(self.prelu(x))
                x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
                first, second = tnn.functional.silu(x).chunk(2, 1)
                x = torch.cat([second, first], 1)
                return self.head(tnn.functional.adaptive_avg_pool2d(x, 1).flatten(1))

        torch.manual_seed(0)
        net = Net().eval()
        net.norm.running_mean.normal_()
        net.norm.running_var.uniform_(0.5, 1.5)
        return net

    def test_program_file_and_dynamic_batch(self, tmp_path):
        import torch

        net, x = self.network(), torch.randn(2, 3, 9, 7)
        dynamic = {"x": {0: torch.export.Dim("batch", min=1, max=8)}}
        with torch.no_grad():
            want = net(x).numpy()
            program = torch.export.export(net, (x,))
            open_batch = torch.export.export(net, (x,), dynamic_shapes=dynamic)
        path = tmp_path / "net.pt2"
        torch.export.save(program, path)
        with pytest.raises(ModelError, match="open dimensions"):
            import_model(open_batch)
        for imported in (import_model(path), import_model(open_batch, "x:[2,3,9,7]")):
            canonical = CanonicalizeConv()(imported)
            assert ops(canonical)["permute_dims"] == 1
            assert ops(canonical)["matmul"] == 0
            np.testing.assert_allclose(run(canonical, x.numpy())[0], want, rtol=1e-4, atol=1e-5)

    def test_refused(self, tmp_path):
        import torch

        path = tmp_path / "net.pt2"
        path.write_bytes(b"not a program")
        with pytest.raises(ModelError, match="no torch.export program"):
            import_model(path)

        class Decomposition(torch.nn.Module):
            def forward(self, x):
                return torch.linalg.svd(x)[0]

        program = torch.export.export(Decomposition(), (torch.randn(3, 3),))
        with pytest.raises(ModelError, match="linalg_svd"):
            import_model(program)
