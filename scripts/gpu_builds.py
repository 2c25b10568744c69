"""Networks and blocks compiled for a GPU by worker processes, for ``bench_networks.py``,
``bench_blocks.py`` and ``sanitize.py``.

What nvcc makes of a source can be kept in a folder, under a hash of the source. A network's source
depends on target, plan, batch size and precision, not on its weights or on the machine. So nvcc's
work can be done on a machine without a GPU, and used on one where time is dear.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from blocks import Block, relax_module
from measure_networks import planned_bytes
from tvm import relax
from tvm.support import nvcc
from tvm.target import Target

from optifx_tvm import zoo
from optifx_tvm.build import pass_context
from optifx_tvm.errors import OptiFXError
from optifx_tvm.pipelines import pipeline
from optifx_tvm.target import resolve_target

TVM_DEFAULT = "tvm-default"
"""In place of a planner: TVM's default pipeline."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OptiFXError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What somebody who can't do a network may raise: it is recorded, and the others go on."""


@dataclass(frozen=True)
class Case:
    """One network at one batch size and precision."""

    network: str
    batch: int
    dtype: str


@dataclass(frozen=True)
class BlockCase:
    """One block at one batch size and precision, which its inputs and output have too."""

    block: Block
    batch: int
    dtype: str


@dataclass(frozen=True)
class Order:
    """What a worker is to build."""

    case: Case | BlockCase
    planner: str
    target: str
    """As JSON or tag, since a Target can't be sent to another process."""
    kernels: Path | None
    """Folder of nvcc's results."""
    library: Path | None = None
    """Where to write the linked executable; None: only nvcc's results are wanted."""


@dataclass(frozen=True)
class Built:
    """What came of an order."""

    seconds: float
    memory_bytes: int = 0
    """Weights and planned activations."""
    nvcc_runs: int = 0
    spared_runs: int = 0
    """Sources whose result was in the folder."""
    error: str = ""


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
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(binary)
            partial.replace(path)  # another worker may be writing the same
        return binary


def workers(jobs: int) -> ProcessPoolExecutor:
    """Processes of their own, since most of a build is Python; they inherit no CUDA context."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def build(order: Order) -> Built:
    """Carry out an order, in a worker. Failures are returned as one line."""
    start = time.perf_counter()
    try:
        target = resolve_target(order.target)
        kernels = KernelCache(order.kernels, target)
        # With a GPU, TVM calls this while it compiles; without one it keeps the source only.
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", kernels.compile, override=True)
        executable, memory = compile_case(order.case, target, order.planner)
        if order.library is not None:
            executable.export_library(str(order.library))
        elif not tvm.cuda(0).exist:
            for source in cuda_sources(executable.mod):
                kernels.compile(source)
    except FAILURES as error:
        return Built(time.perf_counter() - start, error=first_line(error))
    return Built(time.perf_counter() - start, memory, kernels.missed, kernels.found)


def compile_case(
    case: Case | BlockCase, target: Target, planner: str
) -> tuple[relax.VMExecutable, int]:
    """The executable, without a CUDA graph of its own, and the bytes of its memory.

    TVM's default pipeline gets a float16 network, ours is told to compute the float32 one in
    float16: its input and output stay float32.
    """
    default = planner == TVM_DEFAULT
    dtype = None
    if isinstance(case, BlockCase):
        module = relax_module(case.block, case.batch, case.dtype)
    elif default:
        module = zoo.build(case.network, batch=case.batch, dtype=case.dtype)
    else:
        module = zoo.build(case.network, batch=case.batch)
        dtype = None if case.dtype == "float32" else case.dtype
    if default:
        passes = relax.get_default_pipeline(target)
    else:
        passes = pipeline(target, dtype=dtype, planner=planner)
    settings = tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": False})
    with settings, nullcontext() if default else pass_context(target), target:
        lowered = passes(module)
        executable = tvm.compile(lowered, target, relax_pipeline=None)
    return executable, planned_bytes(lowered) + constant_bytes(lowered)


def cuda_sources(module: tvm.runtime.Module) -> Iterator[str]:
    """The CUDA sources in a compiled module."""
    if module.kind == "cuda":
        yield module.inspect_source()
    for imported in module.imports:
        yield from cuda_sources(imported)


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


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
