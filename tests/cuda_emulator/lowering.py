"""Scheduled PrimFunc -> CUDA source and the launches of its kernels, without a GPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

_AXES = tuple(f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in "xyz")


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
class Lowered:
    """A PrimFunc after TVM's own lowering."""

    source: str
    launches: tuple[Launch, ...]
    """In the order in which the host issues them."""
    workspace: dict[str, tuple[int, str]]
    """Buffers between kernels -> (elements, dtype)."""


def lower(func: tirx.PrimFunc, target: Target, *, storage_rewrite: bool = False) -> Lowered:
    """Lower a scheduled PrimFunc for a CUDA target with TVM's pipeline.

    Source and launch sizes come from one and the same lowering: with other PassContext options
    (``storage_rewrite``) the shared memory has another size.
    """
    target = Target(target)
    if target.host is None:
        target = target.with_host(Target("llvm"))
    build = importlib.import_module("tvm.tirx.build")
    with tvm.transform.PassContext(config={"tirx.disable_storage_rewrite": not storage_rewrite}):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        mod = tirx.transform.BindTarget(target)(mod)
        pipeline, _, finalize = tirx.get_tir_pipeline("s_tir")
        host, devices = build.split_host_device_mods(pipeline(mod))
        ((device_target, device),) = devices.items()
        runtime = tvm.get_global_func("target.build.cuda")(finalize()(device), device_target)
    names, workspace = {}, {}
    parameters = {p.name for p in func.params}
    for var, kernel in device.functions_items():
        names[var.name_hint] = tuple(p.name.removesuffix("_ptr") for p in kernel.params)
        buffers = _declared(kernel)
        for name in names[var.name_hint]:
            if name not in parameters:
                workspace[name] = buffers[name]
    launches = tuple(_launch(call, names) for _, f in host.functions_items() for call in _calls(f))
    return Lowered(runtime.inspect_source(), launches, workspace)


def _declared(kernel: tirx.PrimFunc) -> dict[str, tuple[int, str]]:
    """Flat buffers that a kernel declares -> (elements, dtype)."""
    found: dict[str, tuple[int, str]] = {}

    def visit(decl) -> None:
        ty = decl.buffer.ty
        found[decl.buffer.name] = (int(ty.shape[0]), str(ty.dtype))

    tvm_ffi.structural_walk(kernel, (tirx.DeclBuffer, visit))
    return found


def _calls(host: tirx.PrimFunc) -> list[tvm.ir.Call]:
    found: list[tvm.ir.Call] = []

    def visit(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "") == "tirx.call_ffi_kernel":
            found.append(call)

    tvm_ffi.structural_walk(host, (tvm.ir.Call, visit))
    return found


def _launch(call: tvm.ir.Call, names: dict[str, tuple[str, ...]]) -> Launch:
    tags = [str(tag) for tag in call.attrs.launch_params]
    kernel = str(call.args[0].value)
    values = list(call.args)[len(call.args) - len(tags) :]
    sizes = {tag: int(value) for tag, value in zip(tags, values, strict=True)}
    extents = [sizes.get(axis, 1) for axis in _AXES]
    return Launch(
        kernel=kernel,
        buffers=names[kernel],
        grid=(extents[0], extents[1], extents[2]),
        block=(extents[3], extents[4], extents[5]),
        shared_bytes=sizes.get("tirx.use_dyn_shared_memory", 0),
    )
