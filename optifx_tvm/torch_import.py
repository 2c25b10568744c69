"""torch ``ExportedProgram`` to Relax. Needs the extra ``torch``, imported only when it is used."""

from __future__ import annotations

import importlib
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm import relax

from optifx_tvm.errors import ModelError

# What torch.export.load raises on a file that is not what it should be, and the importer on an
# operator that it doesn't know.
_FAILURES = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)


def _torch() -> ModuleType:
    try:
        importlib.import_module("torch.export")
        return importlib.import_module("torch")
    except ImportError as error:
        raise ModelError(
            "importing from torch needs the package torch: pip install torch"
        ) from error


def load(path: Path) -> Any:
    """Reads a ``.pt2`` file as an ``ExportedProgram``."""
    torch = _torch()
    if not zipfile.is_zipfile(path):
        # torch would log a page before it raises.
        raise ModelError(f"'{path}' is no torch.export program, or it is truncated")
    try:
        return torch.export.load(str(path))
    except _FAILURES as error:
        raise ModelError(
            f"'{path}' is no torch.export program, or it is truncated: {_first_line(error)}"
        ) from error


def is_exported_program(source: object) -> bool:
    """True for a torch ``ExportedProgram``; torch is not imported to find out."""
    cls = type(source)
    return cls.__name__ == "ExportedProgram" and cls.__module__.startswith("torch.")


def from_torch(program: Any) -> tvm.IRModule:
    """Imports an ``ExportedProgram``, its parameters as constants.

    Its operators are decomposed first: without that TVM 0.27 imports batch normalisation in
    training mode.
    """
    _torch()
    # The importer of TVM imports torch as it loads.
    frontend = importlib.import_module("tvm.relax.frontend.torch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = frontend.from_exported_program(program, unwrap_unit_return_tuple=True)
    except _FAILURES as error:
        raise ModelError(f"the torch program can't be imported: {_first_line(error)}") from error
    return relax.transform.DeadCodeElimination(["main"])(module)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
