"""Links, names and what is in the wheel: installed and uninstalled, every module loads once."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import optifx_tvm

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "schedules")
SHIPPED = ("optifx_tvm", *LINKED, "setup.py", "pyproject.toml", "README.md", "LICENSE")


def modules() -> set[str]:
    """Every .py file of the package, by its path when installed."""
    own = (ROOT / "optifx_tvm").rglob("*.py")
    paths = {path.relative_to(ROOT).as_posix() for path in own}
    linked = [path for name in LINKED for path in (ROOT / name).rglob("*.py")]
    return {path for path in paths if path.split("/")[1] not in LINKED} | {
        f"optifx_tvm/{path.relative_to(ROOT).as_posix()}" for path in linked
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a source archive built from a copy of the sources."""
    work = tmp_path_factory.mktemp("packaging")
    source = work / "source"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    archive = build("sdist", source, work)
    with tarfile.open(archive) as tar:
        tar.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return build("wheel", unpacked, work)


def build(kind: str, source: Path, destination: Path) -> Path:
    program = (
        "from setuptools import build_meta; import sys;"
        f"print('built', build_meta.build_{kind}(sys.argv[1]))"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(destination)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return destination / ran.stdout.split()[-1]


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name):
    assert os.readlink(ROOT / "optifx_tvm" / name) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_linked_packages_import_under_one_name(name):
    package = importlib.import_module(f"optifx_tvm.{name}")
    assert package.__name__ == f"optifx_tvm.{name}"
    bare = [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]
    assert bare == []


def test_no_file_imports_the_bare_names():
    for path in [p for top in ("optifx_tvm", *LINKED, "tests", "scripts") for p in walk(top)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & set(LINKED), path


def walk(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def test_lazy_attributes_do_not_load_tvm():
    program = "import sys, optifx_tvm; print('tvm' in sys.modules, optifx_tvm.__version__)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", optifx_tvm.__version__]


@pytest.mark.parametrize("name", [n for n in optifx_tvm.__all__ if n != "__version__"])
def test_public_names_are_callable_and_stay_so(name):
    for _ in range(2):
        assert callable(getattr(optifx_tvm, name))
    assert name in dir(optifx_tvm)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = optifx_tvm.nonsense


def test_wheel_holds_every_module_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert "optifx_tvm/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        (scripts,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        text = archive.read(metadata).decode()
        assert "optifx = optifx_tvm.cli:main" in archive.read(scripts).decode()
    assert f"Version: {optifx_tvm.__version__}\n" in text
    assert "Requires-Dist: apache-tvm==0.27.0.post1\n" in text
    assert "Requires-Dist: apache-tvm-ffi==0.1.14.post1\n" in text
    assert set(re.findall(r"Provides-Extra: (\w+)", text)) == {"torch", "plot", "test"}


def test_installed_wheel_imports(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import optifx_tvm, optifx_tvm.passes, optifx_tvm.schedules, optifx_tvm.cli;"
        "print(optifx_tvm.__file__, optifx_tvm.passes.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(path.startswith(str(tmp_path)) for path in ran.stdout.split())
