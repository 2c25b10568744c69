"""Named faults of hostile use, found by hand: each test is one that once went wrong."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import optifx_tvm
from optifx_tvm import artifact
from optifx_tvm.cli import main
from optifx_tvm.errors import InputError, ModelError, OptionError, OutputError, TargetError
from optifx_tvm.frontend import import_model, parse_input_shapes
from optifx_tvm.target import resolve_target
from tests.support.small_models import (
    INPUT_SHAPE,
    conv_relu,
    conv_relu_reference,
    onnx_conv,
    two_inputs,
)


@pytest.fixture(scope="module")
def model():
    return optifx_tvm.compile(conv_relu(), "llvm")


@pytest.fixture(scope="module")
def pair():
    return optifx_tvm.compile(two_inputs(), "llvm")


@pytest.fixture
def data():
    return np.random.default_rng(1).standard_normal(INPUT_SHAPE).astype("float32")


def check(outputs, data):
    np.testing.assert_allclose(outputs[0], conv_relu_reference(data), rtol=1e-5, atol=1e-5)


def test_a_file_written_anew_is_what_is_loaded_next(model, pair, data, tmp_path):
    """``dlopen`` gave the library that was loaded from the same path before."""
    path = tmp_path / "model.so"
    model.save(path)
    first = optifx_tvm.load(path)
    check(first.run(data), data)
    pair.save(path)
    ones = np.ones((2, 3), "float32")
    np.testing.assert_array_equal(optifx_tvm.load(path).run([ones, ones])[0], 2 * ones)
    check(first.run(data), data)


def test_a_loaded_model_outlives_its_file(model, data, tmp_path):
    path = tmp_path / "model.so"
    model.save(path)
    loaded = optifx_tvm.load(path)
    path.write_bytes(b"")
    check(loaded.run(data), data)
    loaded.save(tmp_path / "again.so")
    check(optifx_tvm.load(tmp_path / "again.so").run(data), data)


def test_threads_share_one_model(model, data):
    wrong = []

    def work(factor):
        reference = conv_relu_reference(data * factor)
        for _ in range(50):
            if not np.allclose(model.run(data * factor)[0], reference, 1e-4, 1e-4):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(np.float32(k),)) for k in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_write_one_file(model, tmp_path):
    """The name of the file written aside was the same for all threads of a process."""
    failures = []

    def work():
        try:
            for _ in range(20):
                model.save(tmp_path / "model.so")
        except OutputError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["model.so"]
    assert optifx_tvm.load(tmp_path / "model.so").info == model.info


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_compiled_model_is_not_pickled(model, duplicate):
    with pytest.raises(TypeError, match="save it"):
        duplicate(model)


@pytest.mark.parametrize("inputs", [None, 5, [[[1, 2], [3]]], {"data": [[1, 2], [3]]}])
def test_inputs_that_are_no_arrays(model, inputs):
    with pytest.raises(InputError):
        model.run(inputs)


@pytest.mark.parametrize(
    "target",
    [
        5,
        b"llvm",
        {"kind": "cuda", "arch": "sm_1"},
        {"kind": "cuda", "arch": "sm_90", "host": {"kind": "cuda", "arch": "sm_90"}},
        {"kind": "llvm", "num-cores": -3},
        {"kind": "cuda", "arch": "sm_90", "max_threads_per_block": -1},
        tvm.target.Target("vulkan"),
    ],
)
def test_impossible_targets(target):
    with pytest.raises(TargetError) as error:
        resolve_target(target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "shapes",
    [
        [1, 3, 8, 8],
        {"data": 5},
        {"data": "1,3,8,8"},
        {"data": (1.5, 3, 8, 8)},
        "data:[1,3,8,8] data:[2,3,8,8]",
        "data:[1,3,1000000000,1000000000]",
    ],
)
def test_impossible_input_shapes(shapes):
    with pytest.raises(OptionError):
        parse_input_shapes(shapes)


@pytest.mark.parametrize("name", ["a" * 300 + ".onnx", "a\0.onnx"])
def test_impossible_file_names(name):
    with pytest.raises(ModelError, match="can't read|no such file"):
        import_model(name)


@pytest.mark.parametrize("size", [1, 2])
def test_an_image_smaller_than_the_kernel_is_refused(size):
    with pytest.raises(ModelError, match="too small"):
        import_model(onnx_conv("N"), input_shapes={"data": (1, 3, size, size)})


def test_an_input_name_that_is_not_text():
    content = onnx_conv().SerializeToString().replace(b"data", b"da\xfea")
    with pytest.raises(ModelError, match="not text"):
        import_model(onnx.ModelProto.FromString(content))


def test_a_float64_network_keeps_its_type():
    """Constants were narrowed to float32, and the types of an operator's arguments differed."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 1, 1))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Conv", ["data", "w"], ["out"])],
        "double",
        [info("data", TensorProto.DOUBLE, INPUT_SHAPE)],
        [info("out", TensorProto.DOUBLE, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    double = optifx_tvm.compile(
        helper.make_model(graph, opset_imports=opsets, ir_version=8), "llvm"
    )
    data = np.random.default_rng(1).standard_normal(INPUT_SHAPE)
    (result,) = double.run(data)
    reference = np.einsum("nchw,oc->nohw", data, weight[:, :, 0, 0])
    np.testing.assert_allclose(result, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("opt_level", [0, 3])
def test_the_pipeline_is_registered_with_the_passes(opt_level):
    """In a process that has imported nothing but ``optifx_tvm.passes``."""
    program = (
        "from optifx_tvm import passes\n"
        "import tvm\n"
        "from tvm import relax\n"
        f"with tvm.transform.PassContext(opt_level={opt_level}), tvm.target.Target('llvm'):\n"
        "    print(relax.get_pipeline('optifx')(tvm.IRModule()).functions)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "{}\n")


def test_an_interrupt_inside_a_pass_is_a_keyboard_interrupt():
    def interrupt(_mod, _ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tvm.transform.module_pass(interrupt, opt_level=0)(relax.BlockBuilder().get())


@pytest.mark.parametrize("kind", ["compressed", "terabytes", "syntax", "method"])
def test_run_with_damaged_archives(model, tmp_path, capsys, data, kind):
    model.save(tmp_path / "m.so")
    path = tmp_path / "x.npz"
    if kind == "compressed":
        np.savez_compressed(path, data=data)
        content = bytearray(path.read_bytes())
        content[60:90] = bytes(30)
        path.write_bytes(content)
    elif kind == "method":
        np.savez(path, allow_pickle=False, data=data)
        content = bytearray(path.read_bytes())
        entry = content.rfind(b"PK\x01\x02")
        content[entry + 10] = 77
        path.write_bytes(content)
    else:
        extent = "1000000000000000" if kind == "terabytes" else "(((("
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 8, {extent}), }}"
        header = text.encode() if kind == "terabytes" else text.rstrip("), }").encode()
        header = header.ljust(117) + b"\n"
        array = io.BytesIO(b"\x93NUMPY\x01\x00\x76\x00" + header)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.npy", array.getvalue())
    assert main(["run", str(tmp_path / "m.so"), "--inputs", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(path) in err


def test_the_model_is_not_overwritten(model, tmp_path, capsys):
    onnx.save(onnx_conv(), tmp_path / "m.onnx")
    model.save(tmp_path / "m.so")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.onnx")]) == 2
    assert main(["run", str(tmp_path / "m.so"), "--outputs", str(tmp_path / "m.so")]) == 2
    assert capsys.readouterr().err.count("the model that is read") == 2


def test_a_longest_file_name(model, tmp_path):
    """The name of the file written aside was longer than its own, and too long."""
    model.save(tmp_path / ("x" * 255))
    assert os.listdir(tmp_path) == ["x" * 255]


def test_unwritable_folder_is_found_before_the_work():
    with pytest.raises(OutputError, match="can't write"):
        artifact.check_writable(artifact.Path("/proc/model.so"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_standard_output(tmp_path):
    onnx.save(onnx_conv(), tmp_path / "m.onnx")
    command = [sys.executable, "-m", "optifx_tvm", "explain", str(tmp_path / "m.onnx")]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "optifx explain: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("compiler", ["/nonexistent", "/bin/false"])
def test_a_compiler_that_cannot_link(monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(TargetError, match="can't link"):
        optifx_tvm.compile(two_inputs(), "llvm")


def test_a_forked_process_leaves_the_library():
    compiled = optifx_tvm.compile(two_inputs(), "llvm")
    child = os.fork()
    if child == 0:
        compiled = None
        os._exit(0)
    os.waitpid(child, 0)
    assert compiled is not None
    assert compiled._library.exists()


def test_ctrl_c_ends_a_compilation(tmp_path):
    out = tmp_path / "m.so"
    command = ["compile", "zoo:squeezenet1_1", "--input-shapes", "data:[1,3,64,64]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "optifx_tvm", *command, "--target", "llvm", "-o", str(out)],
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130, -signal.SIGINT)  # 0: it was done already
    assert "internal error" not in err
    assert process.returncode == 0 or not out.exists()
