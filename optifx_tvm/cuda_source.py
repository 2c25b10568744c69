"""Scheduled PrimFuncs -> CUDA source, launches, and what nvcc makes of them. Needs no GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

_AXES = tuple(f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in "xyz")
# As TVM compiles kernels, but for the register usage level, which costs much time.
_NVCC_FLAGS = ("-cubin", "-O3", "--use_fast_math", "-w", "-Xptxas", "-v")


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    buffers: tuple[str, ...]
    """Parameters of the kernel: PrimFunc parameters, or workspace that the host allocates."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """Dynamic shared memory."""


@dataclass(frozen=True)
class CudaSource:
    """PrimFuncs after TVM's own lowering."""

    text: str
    launches: Mapping[str, tuple[Launch, ...]]
    """Function -> its launches, in the order in which the host issues them."""
    workspace: Mapping[str, Mapping[str, tuple[int, str]]]
    """Function -> buffers between its kernels -> (elements, dtype)."""


def cuda_source(
    functions: Mapping[str, tirx.PrimFunc], target: Target, *, storage_rewrite: bool = False
) -> CudaSource:
    """Generate CUDA for scheduled PrimFuncs with TVM's pipeline; kernels of function NAME are
    called NAME_kernel and so on.

    Source and launch sizes come from one and the same lowering: with other PassContext options
    (``storage_rewrite``) the shared memory has another size.
    """
    if target.host is None:
        target = target.with_host(Target("llvm"))
    build = importlib.import_module("tvm.tirx.build")
    with tvm.transform.PassContext(config={"tirx.disable_storage_rewrite": not storage_rewrite}):
        mod = tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})
        mod = tirx.transform.BindTarget(target)(mod)
        pipeline, _, finalize = tirx.get_tir_pipeline("s_tir")
        host, devices = build.split_host_device_mods(pipeline(mod))
        ((device_target, device),) = devices.items()
        runtime = tvm.get_global_func("target.build.cuda")(finalize()(device), device_target)
    kernels = {var.name_hint: kernel for var, kernel in device.functions_items()}
    launches, workspace = {}, {}
    for var, entry in host.functions_items():
        name = var.name_hint
        launches[name] = tuple(_launch(call, kernels) for call in _launch_calls(entry))
        own = {p.name for p in functions[name].params}
        workspace[name] = {
            buffer: size
            for launch in launches[name]
            for buffer, size in _declared(kernels[launch.kernel]).items()
            if buffer in launch.buffers and buffer not in own
        }
    return CudaSource(runtime.inspect_source(), launches, workspace)


def _declared(kernel: tirx.PrimFunc) -> dict[str, tuple[int, str]]:
    """Flat buffers that a kernel declares -> (elements, dtype)."""
    found: dict[str, tuple[int, str]] = {}

    def visit(decl: tirx.DeclBuffer) -> None:
        ty = decl.buffer.ty
        found[decl.buffer.name] = (int(ty.shape[0]), str(ty.dtype))

    tvm_ffi.structural_walk(kernel, (tirx.DeclBuffer, visit))
    return found


def _launch_calls(host: tirx.PrimFunc) -> list[tvm.ir.Call]:
    found: list[tvm.ir.Call] = []

    def visit(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "") == "tirx.call_ffi_kernel":
            found.append(call)

    tvm_ffi.structural_walk(host, (tvm.ir.Call, visit))
    return found


def _launch(call: tvm.ir.Call, kernels: Mapping[str, tirx.PrimFunc]) -> Launch:
    tags = [str(tag) for tag in call.attrs.launch_params]
    kernel = str(call.args[0].value)
    values = list(call.args)[len(call.args) - len(tags) :]
    sizes = {tag: int(value) for tag, value in zip(tags, values, strict=True)}
    extents = [sizes.get(axis, 1) for axis in _AXES]
    return Launch(
        kernel=kernel,
        buffers=tuple(p.name.removesuffix("_ptr") for p in kernels[kernel].params),
        grid=(extents[0], extents[1], extents[2]),
        block=(extents[3], extents[4], extents[5]),
        shared_bytes=sizes.get("tirx.use_dyn_shared_memory", 0),
    )


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel."""

    registers: int
    spill_bytes: int
    """Stores and loads of registers to and from local memory, together."""
    stack_bytes: int
    static_shared_bytes: int


class NvccError(RuntimeError):
    """nvcc does not compile the generated source; the message is what it says."""


def compile_cubin(source: str, arch: str) -> dict[str, Resources]:
    """Compile a source for ``arch`` ("sm_90") and return the resources of every kernel.

    Raises NvccError; FileNotFoundError without nvcc on PATH.
    """
    with tempfile.TemporaryDirectory(prefix="optifx_nvcc_") as folder:
        path = Path(folder, "kernels.cu")
        path.write_text(source)
        command = ["nvcc", *_NVCC_FLAGS, f"-arch={arch}", str(path), "-o", f"{path}bin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NvccError(f"nvcc -arch={arch}: {done.stderr[:2000]}")
    return _parse_report(done.stderr)


def _parse_report(text: str) -> dict[str, Resources]:
    found = {}
    for section in text.split("Compiling entry function '")[1:]:

        def number(pattern: str, section: str = section) -> int:
            return sum(int(n) for n in re.findall(pattern, section))

        found[section.split("'", 1)[0]] = Resources(
            registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            static_shared_bytes=number(r"(\d+) bytes smem"),
        )
    return found
