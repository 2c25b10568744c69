"""The command line: what it prints, and exit code 2 with one line for every error of a user."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import tvm

import optifx_tvm
from optifx_tvm import build
from optifx_tvm.cli import main
from optifx_tvm.errors import ModelError
from tests.support.small_models import (
    INPUT_SHAPE,
    OUTPUT_SHAPE,
    conv_relu,
    conv_relu_reference,
    onnx_conv,
    two_inputs,
)

no_gpu = pytest.mark.skipif(tvm.cuda(0).exist, reason="a GPU is here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """conv.onnx, dynamic.onnx, relax.json, conv.so, pair.so."""
    path = tmp_path_factory.mktemp("cli")
    onnx.save(onnx_conv(), path / "conv.onnx")
    onnx.save(onnx_conv(batch="N"), path / "dynamic.onnx")
    (path / "relax.json").write_text(tvm.ir.save_json(conv_relu()))
    optifx_tvm.compile(conv_relu(), "llvm").save(path / "conv.so")
    optifx_tvm.compile(two_inputs(), "llvm").save(path / "pair.so")
    return path


def succeed(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def fail(capsys, *arguments):
    """Check exit code 2 and one line on stderr, nothing on stdout; return the line."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as left:  # argparse
        code = left.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("optifx")
    return err


def data():
    return np.random.default_rng(1).standard_normal(INPUT_SHAPE).astype("float32")


@pytest.mark.parametrize("source", ["conv.onnx", "relax.json"])
def test_compile_and_run(folder, tmp_path, capsys, source):
    out = succeed(capsys, "compile", folder / source, "--target", "llvm", "-o", tmp_path / "m.so")
    assert f"wrote {tmp_path / 'm.so'}" in out
    np.savez(tmp_path / "x.npz", data=data())
    out = succeed(
        capsys,
        *("run", tmp_path / "m.so", "--inputs", tmp_path / "x.npz"),
        *("--outputs", tmp_path / "y.npz", "--repeat", "3"),
    )
    assert "3 runs: median" in out
    with np.load(tmp_path / "y.npz") as archive:
        (result,) = (archive[name] for name in archive.files)
    np.testing.assert_allclose(result, conv_relu_reference(data()), rtol=1e-5, atol=1e-5)


def test_input_shapes_fix_a_symbolic_batch(folder, tmp_path, capsys):
    succeed(
        capsys,
        *("compile", folder / "dynamic.onnx", "--target", "llvm", "-o", tmp_path / "m.so"),
        *("--input-shapes", "data:[2,3,8,8]", "--planner", "none"),
    )
    (info,) = optifx_tvm.load(tmp_path / "m.so").inputs
    assert info.shape == (2, 3, 8, 8)


def test_float16(folder, tmp_path, capsys):
    succeed(
        capsys,
        *("compile", folder / "conv.onnx", "--target", "llvm", "--dtype", "float16"),
        *("-o", tmp_path / "m.so"),
    )
    model = optifx_tvm.load(tmp_path / "m.so")
    (result,) = model.run(data().astype(model.inputs[0].dtype))
    reference = conv_relu_reference(data())
    error = np.linalg.norm(result.astype("float64") - reference) / np.linalg.norm(reference)
    assert 0 < error < 5e-3


def test_run_prints_the_same_for_the_same_seeded_inputs(folder, capsys):
    first, second = (succeed(capsys, "run", folder / "pair.so", "--repeat", 1) for _ in range(2))
    assert first.splitlines()[:2] == second.splitlines()[:2]
    assert first.startswith("output_0: float32 [2, 3], L2 norm ")


def test_explain(folder, capsys):
    plan = json.loads(
        succeed(capsys, "explain", folder / "conv.onnx", "--target", "llvm", "--json")
    )
    assert set(plan) >= {
        *("groups", "unfused_kernels", "fused_kernels"),
        *("refused", "planner_seconds", "predicted_us"),
    }
    assert plan["fused_kernels"] >= 1
    text = succeed(capsys, "explain", folder / "conv.onnx", "--target", "llvm")
    assert "kernels:" in text
    assert "predicted" in text


def test_explain_for_a_gpu_that_is_not_here(folder, capsys):
    succeed(capsys, "explain", folder / "conv.onnx", "--target", "nvidia/jetson-agx-orin-64gb")


def test_module_and_version():
    ran = subprocess.run(
        [sys.executable, "-m", "optifx_tvm", "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
    assert ran.stdout == f"optifx {optifx_tvm.__version__}\n"


# Errors: the model


def test_model_files_that_are_no_models(folder, tmp_path, capsys):
    truncated = (folder / "conv.onnx").read_bytes()[:200]
    (tmp_path / "cut.onnx").write_bytes(truncated)
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "text.onnx").write_text("not a model at all")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "cut.json").write_text((folder / "relax.json").read_text()[:300])
    (tmp_path / "text.txt").write_text("hello")
    for path in (*sorted(tmp_path.iterdir()), tmp_path, tmp_path / "none.onnx", tmp_path / "none"):
        said = fail(capsys, "compile", path, "--target", "llvm", "-o", tmp_path / "m.so")
        assert path.name in said
    assert not (tmp_path / "m.so").exists()


def test_truncated_torch_program(tmp_path, capsys):
    """Names the file where torch is here, else the package that is missing."""
    (tmp_path / "cut.pt2").write_bytes(b"PK\x03\x04")
    said = fail(capsys, "explain", tmp_path / "cut.pt2", "--target", "llvm")
    assert ("cut.pt2" if importlib.util.find_spec("torch") else "package torch") in said


def test_unknown_zoo_name(tmp_path, capsys):
    said = fail(capsys, "compile", "zoo:resnet19", "--target", "llvm", "-o", tmp_path / "m.so")
    assert "resnet19" in said
    assert "resnet18" in said


@pytest.mark.parametrize(
    ("operator", "domain"), [("Frobnicate", "org.example"), ("DeformConv", ""), ("Det", "")]
)
def test_unsupported_operator_is_named_with_its_node(tmp_path, capsys, operator, domain):
    onnx.save(onnx_conv(operator=operator, domain=domain), tmp_path / "m.onnx")
    said = fail(capsys, "explain", tmp_path / "m.onnx", "--target", "llvm")
    assert operator in said
    assert "last" in said


def test_dynamic_shape_asks_for_input_shapes(folder, capsys):
    said = fail(capsys, "explain", folder / "dynamic.onnx", "--target", "llvm")
    assert "--input-shapes" in said
    assert "data" in said


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ("image:[1,3,8,8]", "image"),
        ("data:[1,8,8]", "data"),
        ("data:[1,3,8,a]", "data:[1,3,8,a]"),
        ("data:[0,3,8,8]", "data"),
        ("data=[1,3,8,8]", "data=[1,3,8,8]"),
    ],
)
def test_wrong_input_shapes(folder, capsys, shapes, said):
    line = fail(capsys, "explain", folder / "dynamic.onnx", "--input-shapes", shapes)
    assert said in line


# Errors: target, options, output


def test_unknown_target(folder, tmp_path, capsys):
    said = fail(capsys, "compile", folder / "conv.onnx", "--target", "gpu", "-o", tmp_path / "m.so")
    assert "unknown target 'gpu'" in said


@no_gpu
def test_cuda_without_a_gpu(folder, tmp_path, capsys):
    path = tmp_path / "m.so"
    said = fail(capsys, "compile", folder / "conv.onnx", "--target", "cuda", "-o", path)
    assert "no GPU found" in said
    succeed(capsys, "compile", folder / "conv.onnx", "--target", "nvidia/nvidia-h100", "-o", path)
    assert "there is no GPU here" in fail(capsys, "run", path)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("compile", "m.onnx"),
        ("compile", "m.onnx", "-o", "m.so", "--planner", "best"),
        ("compile", "m.onnx", "-o", "m.so", "--dtype", "int8"),
        ("run", "m.so", "--repeat", "0"),
        ("run", "m.so", "--repeat", "many"),
        ("explain",),
    ],
)
def test_wrong_command_lines(capsys, arguments):
    assert "error:" in fail(capsys, *arguments)


def test_output_path_is_checked_before_the_work(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "compile", lambda *_, **__: pytest.fail("compiled"))
    for path in (tmp_path, tmp_path / "none" / "m.so", os.devnull):
        said = fail(capsys, "compile", folder / "conv.onnx", "-o", path)
        assert f"can't write {path}" in said


def test_a_failed_compile_leaves_the_old_file(folder, tmp_path, capsys):
    path = tmp_path / "m.so"
    path.write_bytes((folder / "conv.so").read_bytes())
    fail(capsys, "compile", folder / "dynamic.onnx", "--target", "llvm", "-o", path)
    assert path.read_bytes() == (folder / "conv.so").read_bytes()
    assert os.listdir(tmp_path) == ["m.so"]


# Errors: run


def test_run_of_what_is_not_a_compiled_model(folder, tmp_path, capsys):
    content = (folder / "conv.so").read_bytes()
    (tmp_path / "cut.so").write_bytes(content[: len(content) // 2])
    assert "truncated or no model" in fail(capsys, "run", tmp_path / "cut.so")
    assert "truncated or no model" in fail(capsys, "run", folder / "conv.onnx")
    assert "no such file" in fail(capsys, "run", tmp_path / "none.so")


def test_run_with_wrong_inputs(folder, tmp_path, capsys):
    cases = {
        "names": ({"image": data()}, "inputs named 'image' given; the model takes 'data'"),
        "shape": ({"data": data()[:, :2]}, "has shape [1, 2, 8, 8]"),
        "dtype": ({"data": data().astype("float64")}, "has dtype float64"),
    }
    for name, (arrays, said) in cases.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, allow_pickle=False, **arrays)
        assert said in fail(capsys, "run", folder / "conv.so", "--inputs", path)


def test_run_with_unreadable_inputs(folder, tmp_path, capsys):
    np.savez(tmp_path / "good.npz", data=data())
    content = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", data())
    np.savez(tmp_path / "objects.npz", data=np.array([{}], dtype=object))
    names = ["cut.npz", "empty.npz", "text.npz", "array.npy", "objects.npz", "none.npz"]
    for path in [tmp_path / name for name in names] + [tmp_path]:
        said = fail(capsys, "run", folder / "conv.so", "--inputs", path)
        assert str(path) in said


def test_run_with_outputs_that_cannot_be_written(folder, tmp_path, capsys):
    path = tmp_path / "none" / "y.npz"
    assert "can't write" in fail(capsys, "run", folder / "conv.so", "--outputs", path)


# Errors: ours


def test_debug_shows_the_traceback_of_a_users_error(tmp_path):
    with pytest.raises(ModelError):
        main(["run", str(tmp_path / "none.so"), "--debug"])


@pytest.mark.parametrize("debug", [False, True])
def test_a_defect_of_ours_is_one_line_and_exit_code_1(tmp_path, debug):
    arguments = ["optifx", "compile", "x.onnx", "-o", str(tmp_path / "m.so")]
    program = (
        "import sys\n"
        "from optifx_tvm import build, cli\n"
        "def broken(*_, **__): raise RuntimeError('first line\\nsecond line')\n"
        "build.compile = broken\n"
        f"sys.argv = {arguments + ['--debug'] * debug}\n"
        "sys.exit(cli.main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    if debug:
        assert "Traceback" in ran.stderr
    else:
        assert ran.stderr == (
            "optifx: internal error: RuntimeError: first line second line; "
            "please report it with the output of the same command and --debug\n"
        )


def test_interrupt_and_broken_pipe(folder, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "compile", interrupted)
    arguments = ["compile", str(folder / "conv.onnx"), "-o", str(tmp_path / "m.so")]
    assert main(arguments) == 130
    assert capsys.readouterr().err == "optifx compile: interrupted\n"


def test_reader_that_goes_away(folder):
    """``optifx run ... | head -0`` ends without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "optifx_tvm", "run", str(folder / "conv.so"), "--repeat", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    process.wait()


def test_progress_goes_to_a_terminal_only(folder, tmp_path, capsys):
    assert main(["compile", str(folder / "conv.onnx"), "-o", str(tmp_path / "m.so")]) == 0
    assert capsys.readouterr().err == ""


def test_output_shape_constant_is_right():
    assert conv_relu_reference(data()).shape == OUTPUT_SHAPE
