"""What compiled modules hold: constants and CUDA sources. nvcc's results kept in a folder.

A network's source depends on the target, plan, batch and precision, not on its weights or on the
machine. So it can be compiled on a machine without a GPU and used on one where time is dear. The
folder's files are named by a hash of the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax
from tvm.support import nvcc
from tvm.target import Target


class KernelCache:
    """Compiles sources for ``target``; keeps results in ``folder`` (None: keeps nothing)."""

    def __init__(self, folder: Path | None, target: Target) -> None:
        self.folder, self.target = folder, target
        self.found = self.missed = 0

    def compile(self, source: str) -> bytes:
        """The fat binary of ``source``; RuntimeError with nvcc's message."""
        arch = str(self.target.attrs["arch"])
        path = None
        if self.folder is not None:
            digest = hashlib.sha256(f"{arch}\n{source.strip()}".encode()).hexdigest()
            path = self.folder / f"{digest[:32]}.fatbin"
            if path.exists():
                self.found += 1
                return path.read_bytes()
        self.missed += 1
        with self.target:
            binary = bytes(nvcc.compile_cuda(source, target_format="fatbin", compiler="nvcc"))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(binary)
        return binary

    def install(self) -> None:
        """Make TVM compile CUDA by this."""
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", self.compile, override=True)


def cuda_texts(executable: relax.VMExecutable) -> list[str]:
    """The CUDA sources in an executable."""
    return list(_texts(executable.mod))


def _texts(module: tvm.runtime.Module) -> Iterator[str]:
    if module.kind == "cuda":
        yield module.inspect_source()
    for imported in module.imports:
        yield from _texts(imported)


def constant_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all constants of a module's Relax functions."""
    total = 0

    def visit(expr: relax.Expr) -> None:
        nonlocal total
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            total += expr.value.numpy().nbytes

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return total
