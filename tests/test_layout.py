"""Rules of the source tree: imports point one way, and files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("optifx_tvm", "passes", "schedules")
LAYERS = (
    ("config", "errors", "graph", "progress"),
    ("device", "partition", "target"),
    ("records", "analysis"),
    ("cost_model", "schedules", "partition_check"),
    ("search", "extract_elementwise"),
    ("extract_ops",),
    ("extract_stages",),
    ("extract",),
    ("passes",),
    ("onnx_operators",),
    ("onnx_import", "torch_import", "zoo", "cuda_source"),
    ("frontend", "pipelines", "artifact"),
    ("runtime",),
    ("build",),
    ("explain",),
    ("cli",),
    ("__main__",),
)
"""Parts of the package: each imports only from lines above its own, or itself."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MOST_LINES = 450


def _sources() -> list[Path]:
    """Every source file once: ``optifx_tvm/passes`` and ``optifx_tvm/schedules`` are links."""
    files = (f for folder in FOLDERS for f in ROOT.joinpath(folder).rglob("*.py"))
    links = [ROOT / "optifx_tvm" / name for name in FOLDERS[1:]]
    return sorted(f for f in files if not any(f.is_relative_to(link) for link in links))


def _part(file: Path) -> str:
    top, *rest = file.relative_to(ROOT).with_suffix("").parts
    return rest[0] if top == "optifx_tvm" else top


def _imported(text: str) -> Iterator[str]:
    """Parts of the package that a source imports, also inside functions."""
    for node in ast.walk(ast.parse(text)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "optifx_tvm":
            modules = [f"optifx_tvm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            package, _, rest = module.partition(".")
            if package == "optifx_tvm" and rest and not rest.startswith("__"):
                yield rest.split(".")[0]


def _wrong(part: str, text: str) -> list[str]:
    return [other for other in _imported(text) if other != part and LEVEL[other] >= LEVEL[part]]


@pytest.mark.parametrize("file", _sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file: Path) -> None:
    part = _part(file)
    if part != "__init__":  # the package's own names, which load on first use
        assert not _wrong(part, file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from optifx_tvm import passes", ["passes"]),
        ("def f():\n    from optifx_tvm.build import compile", ["build"]),
        ("import optifx_tvm.search.dag", ["search"]),
        ("from optifx_tvm.graph import Node\nfrom optifx_tvm import __version__", []),
    ],
)
def test_an_import_of_a_higher_layer_is_found(text: str, expected: list[str]) -> None:
    assert _wrong("analysis", text) == expected


def test_files_stay_small() -> None:
    files = [*_sources(), *ROOT.joinpath("scripts").glob("*.py"), *ROOT.glob("tests/**/*.py")]
    assert len(files) > 100
    lines = {f: f.read_text(encoding="utf-8").count("\n") for f in files}
    assert [str(f) for f, count in lines.items() if count >= MOST_LINES] == []
