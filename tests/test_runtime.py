"""CompiledModel: numbers, argument checks, and the one file that it is saved to."""

from __future__ import annotations

import gc
import os
import struct

import numpy as np
import pytest
import tvm
from tvm.relax.transform import BindParams

import optifx_tvm
from optifx_tvm import artifact, build, runtime
from optifx_tvm.errors import InputError, ModelError, OptionError, OutputError, TargetError
from tests.support.small_models import INPUT_SHAPE, conv_relu, conv_relu_reference, two_inputs

H100 = "nvidia/nvidia-h100"
no_gpu = pytest.mark.skipif(tvm.cuda(0).exist, reason="a GPU is here")


@pytest.fixture(scope="module")
def model():
    return optifx_tvm.compile(conv_relu(), "llvm")


@pytest.fixture(scope="module")
def pair():
    return optifx_tvm.compile(two_inputs(), "llvm", planner="none")


@pytest.fixture
def data():
    return np.random.default_rng(1).standard_normal(INPUT_SHAPE).astype("float32")


def check(outputs, data):
    (output,) = outputs
    np.testing.assert_allclose(output, conv_relu_reference(data), rtol=1e-5, atol=1e-5)


def test_run_takes_a_mapping_arrays_or_one_array(model, data):
    check(model.run({"data": data}), data)
    check(model.run([data]), data)
    check(model.run(data), data)
    check(model.run({"data": tvm.runtime.tensor(data)}), data)


def test_run_takes_views(model, data):
    view = np.ascontiguousarray(data.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    assert not view.flags.c_contiguous
    check(model.run(view), data)


def test_several_inputs_and_outputs(pair):
    a, b = np.arange(12, dtype="float32").reshape(2, 2, 3)
    for inputs in ([a, b], {"b": b, "a": a}):
        total, product = pair.run(inputs)
        np.testing.assert_array_equal(total, a + b)
        np.testing.assert_array_equal(product, a * b)


def test_info(model):
    (data,), (output,) = model.inputs, model.outputs
    assert (data.name, data.shape, data.dtype) == ("data", INPUT_SHAPE, "float32")
    assert (output.shape, output.dtype) == ((1, 4, 6, 6), "float32")
    assert model.info.target_kind == "llvm"
    assert model.info.optifx_version == optifx_tvm.__version__


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"image": np.zeros(INPUT_SHAPE, "float32")}, "inputs named 'image' given.*takes 'data'"),
        ({}, "inputs named none given.*takes 'data'"),
        ([], "0 inputs given; the model takes 1: 'data'"),
        (np.zeros((2, 3, 8, 8), "float32"), r"shape \[2, 3, 8, 8\].*\[1, 3, 8, 8\]"),
        (np.zeros(INPUT_SHAPE), "dtype float64; the model takes float32"),
        (np.zeros(INPUT_SHAPE, ">f4"), "dtype >f4; the model takes float32"),
    ],
)
def test_wrong_inputs(model, inputs, said):
    with pytest.raises(InputError, match=said):
        model.run(inputs)


def test_benchmark(model):
    result = model.benchmark(repeat=5, warmup=1)
    assert len(result.times) == 5
    assert 0 < result.min <= result.median <= result.max
    with pytest.raises(OptionError, match="repeat=0"):
        model.benchmark(repeat=0)


def test_random_inputs_are_seeded_and_fit(pair):
    first, second = (runtime.random_inputs(pair.inputs, seed) for seed in (0, 0))
    assert {name: array.shape for name, array in first.items()} == {"a": (2, 3), "b": (2, 3)}
    np.testing.assert_array_equal(first["a"], second["a"])
    assert not np.array_equal(first["a"], first["b"])


def test_save_and_load(model, data, tmp_path):
    path = tmp_path / "model.so"
    model.save(path)
    loaded = optifx_tvm.load(path)
    assert loaded.info == model.info
    check(loaded.run(data), data)
    assert os.listdir(tmp_path) == ["model.so"]


def test_a_loaded_model_can_be_saved_again(model, data, tmp_path):
    model.save(tmp_path / "a.so")
    optifx_tvm.load(tmp_path / "a.so").save(tmp_path / "b.so")
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()


def test_saving_over_a_file_in_use(model, pair, data, tmp_path):
    path = tmp_path / "model.so"
    model.save(path)
    loaded = optifx_tvm.load(path)
    check(loaded.run(data), data)
    pair.save(path)
    check(loaded.run(data), data)
    assert [info.name for info in optifx_tvm.load(path).inputs] == ["a", "b"]


def test_scratch_folder_goes_with_the_model():
    compiled = optifx_tvm.compile(two_inputs(), "llvm")
    folder = compiled._library.parent
    assert folder.is_dir()
    del compiled
    gc.collect()
    assert not folder.exists()


def test_output_paths_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").write_text("kept")
    cases = {
        tmp_path: "it is a folder",
        tmp_path / "none" / "x.so": "there is no folder",
        tmp_path / "file" / "x.so": "there is no folder",
        tmp_path / ("x" * 300): "can't write",
        os.devnull: "not a regular file",
    }
    for path, said in cases.items():
        with pytest.raises(OutputError, match=said):
            model.save(path)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_failed_save_leaves_the_old_file(model, data, tmp_path, monkeypatch):
    path = tmp_path / "model.so"
    model.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.so"]


def test_save_through_a_link_keeps_the_link(model, tmp_path):
    (tmp_path / "link.so").symlink_to(tmp_path / "real.so")
    model.save(tmp_path / "link.so")
    assert (tmp_path / "link.so").is_symlink()
    assert optifx_tvm.load(tmp_path / "real.so").info == model.info


def test_damaged_files_are_refused_before_they_are_loaded(model, tmp_path):
    good = tmp_path / "good.so"
    model.save(good)
    content = good.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    cases = {
        "empty": (b"", "truncated or no model"),
        "short": (b"x", "truncated or no model"),
        "cut": (content[:middle], "truncated or no model"),
        "cut at the end": (content[:-1], "truncated or no model"),
        "beheaded": (content[100:], "damaged"),
        "flipped": (flipped, "checksum"),
        "a library": (model._library.read_bytes(), "truncated or no model"),
        "huge sizes": (struct.pack("<QQ", 2**63, 2**63) + content[-12:], "damaged"),
    }
    for name, (damaged, said) in cases.items():
        path = tmp_path / name
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=said):
            optifx_tvm.load(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        optifx_tvm.load(tmp_path / "none.so")
    with pytest.raises(ModelError, match="can't read"):
        optifx_tvm.load(tmp_path)


def test_another_tvm_is_refused(model, data, tmp_path, monkeypatch):
    model.save(tmp_path / "model.so")
    loaded = optifx_tvm.load(tmp_path / "model.so")
    monkeypatch.setattr(tvm, "__version__", "0.99")
    with pytest.raises(ModelError, match=r"compiled with TVM 0\.27.*this is TVM 0\.99"):
        loaded.run(data)


def test_another_processor_is_refused(model, data, tmp_path, monkeypatch):
    model.save(tmp_path / "model.so")
    loaded = optifx_tvm.load(tmp_path / "model.so")
    monkeypatch.setattr(artifact, "machine_architecture", lambda: "riscv64")
    with pytest.raises(TargetError, match="compiled for .* this machine is riscv64"):
        loaded.run(data)


@no_gpu
def test_cuda_compiles_and_saves_without_a_gpu_and_says_so_when_run(data, tmp_path):
    path = tmp_path / "model.so"
    optifx_tvm.compile(conv_relu(), H100).save(path)
    loaded = optifx_tvm.load(path)
    assert loaded.info.target_kind == "cuda"
    with pytest.raises(TargetError, match="compiled for CUDA and there is no GPU here"):
        loaded.run(data)


@pytest.mark.gpu
def test_run_on_the_gpu(data, tmp_path):
    compiled = optifx_tvm.compile(conv_relu(), "cuda")
    check(compiled.run(data), data)
    compiled.save(tmp_path / "model.so")
    loaded = optifx_tvm.load(tmp_path / "model.so")
    for _ in range(3):  # captured, then replayed
        check(loaded.run(data), data)
        data = data + 1
    assert loaded.benchmark(5, 1).min > 0


def test_a_linker_for_the_targets_processor_is_asked_for(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(TargetError, match="aarch64-linux-gnu-g"):
        optifx_tvm.compile(conv_relu(), "nvidia/jetson-agx-orin-64gb")


def test_options_are_checked():
    with pytest.raises(OptionError, match="unknown dtype 'int8'"):
        optifx_tvm.compile(conv_relu(), "llvm", dtype="int8")
    with pytest.raises(OptionError, match="unknown planner 'best'"):
        optifx_tvm.compile(conv_relu(), "llvm", planner="best")


def test_progress_is_told(data):
    heard = []
    optifx_tvm.compile(
        two_inputs(), "llvm", progress=lambda stage, done, total: heard.append((stage, done, total))
    )
    assert [done for stage, done, _ in heard if stage == "compile"][-1] == 4
    assert {"import", "optimise", "generate code", "link"} <= {stage for stage, _, _ in heard}
    assert all(0 <= done <= total for _, done, total in heard)


def test_pass_context_of_cuda_keeps_what_the_user_set():
    config = {"relax.backend.use_cuda_graph": False}
    with tvm.transform.PassContext(opt_level=3, config=config):
        context = build.pass_context(tvm.target.Target(H100))
    assert context.opt_level == 3
    assert not context.config["relax.backend.use_cuda_graph"]
    assert context.config["tirx.disable_storage_rewrite"]


def test_the_callers_module_is_left_alone():
    module = conv_relu()
    optifx_tvm.compile(module, "llvm")
    tvm.ir.assert_structural_equal(module, conv_relu())


def test_parameters_are_not_needed_at_run_once_bound():
    module = BindParams("main", {"b": np.full((2, 3), 2, "float32")})(two_inputs())
    compiled = optifx_tvm.compile(module, "llvm")
    total, product = compiled.run(np.ones((2, 3), "float32"))
    assert total.sum() == 18
    assert product.sum() == 12
