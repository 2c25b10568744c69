"""Targets: from what a user writes to a complete ``tvm.target.Target``."""

from __future__ import annotations

import difflib
import json
import os
import re

import psutil
import tvm
import tvm_ffi
from tvm.target import Target, codegen

from optifx_tvm.errors import TargetError

_SUPPORTED = (
    "llvm, cuda, a TVM tag such as nvidia/nvidia-h100, "
    'or JSON such as {"kind": "cuda", "arch": "sm_90"}'
)


def resolve_target(target: str | dict[str, object] | Target | None = None) -> Target:
    """The target to compile for.

    ``None``: the GPU found, else this machine's CPU. ``"llvm"``: this machine's CPU with all its
    features. ``"cuda"``: the GPU found. Otherwise a TVM tag, JSON, or a ``Target``, which is taken
    as it is. A CUDA target without a host gets this machine's CPU as its host.

    Raises TargetError for anything else, and for ``"cuda"`` without a GPU.
    """
    if isinstance(target, Target):
        resolved = _checked(target, str(target))
    elif target is None:
        resolved = _gpu_target() if tvm.cuda(0).exist else host_target()
    elif target == "llvm":
        resolved = host_target()
    elif target == "cuda":
        if not tvm.cuda(0).exist:
            raise TargetError(
                "target cuda: no GPU found here whose architecture could be taken; name one by a "
                'TVM tag such as nvidia/nvidia-h100 or JSON such as {"kind": "cuda", "arch": '
                '"sm_90"}'
            )
        resolved = _gpu_target()
    elif isinstance(target, dict):
        resolved = _from_config(target, json.dumps(target))
    elif not isinstance(target, str):
        raise TargetError(f"target is a {type(target).__name__}; supported: {_SUPPORTED}")
    elif target.lstrip().startswith("{"):
        resolved = _from_json(target)
    else:
        resolved = _from_tag(target)
    return _with_host(resolved)


def target_or_current(target: str | dict[str, object] | Target | None) -> Target:
    """What a pass works for: ``target`` (as ``resolve_target`` understands it), else the current
    one (``with target:``), else plain llvm."""
    if target is None:
        target = Target.current(allow_none=True) or Target("llvm")
    return target if isinstance(target, Target) else resolve_target(target)


def host_target() -> Target:
    """llvm for this machine's CPU, with exactly the features it reports, and all its cores."""
    triple, cpu = codegen.llvm_get_system_triple(), codegen.llvm_get_system_cpu()
    config: dict[str, object] = {
        "kind": "llvm",
        "mtriple": triple,
        "mcpu": cpu,
        "num-cores": _usable_cores(),
    }
    # LLVM names some processors by family alone; a virtual machine may hide part of the features.
    present = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    implied = {str(name) for name in codegen.llvm_get_cpu_features(Target(config))}
    hidden = sorted(str(name) for name, there in present.items() if not there)
    missing = [f"-{name}" for name in hidden if name in implied]
    if missing:
        config["mattr"] = missing
    return Target(config)


def is_cuda(target: Target) -> bool:
    """Does the target run on an NVIDIA GPU?"""
    return target.kind.name == "cuda"


def host_architecture(target: Target) -> str:
    """Processor architecture of the host code: the first part of its triple ("x86_64")."""
    host = target.host if is_cuda(target) and target.host is not None else target
    triple = host.attrs.get("mtriple", "") or codegen.llvm_get_system_triple()
    return str(triple).split("-")[0]


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: a container may grant fewer than the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Threads of a model on this CPU: one for every core that may be used (not for every thread
    of a core: kernels keep the vector units of a core busy)."""
    return min(_usable_cores(), psutil.cpu_count(logical=False) or _usable_cores())


def _gpu_target() -> Target:
    return Target.from_device(tvm.cuda(0))


def _from_json(text: str) -> Target:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise TargetError(f"target {text!r} is not valid JSON: {error}") from error
    return _from_config(config, text)


def _from_config(config: dict[str, object], text: str) -> Target:
    if "kind" not in config and "tag" not in config:
        raise TargetError(f'target {text} has neither "kind" nor "tag"; supported: {_SUPPORTED}')
    if config.get("kind") == "cuda" and "arch" not in config:
        raise TargetError(f'target {text} needs "arch", for example "sm_90"')
    return _create(config, text)


def _from_tag(tag: str) -> Target:
    if tag not in tvm.target.list_tags():
        near = difflib.get_close_matches(tag, list(tvm.target.list_tags()), n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise TargetError(f"unknown target {tag!r}: {hint}supported: {_SUPPORTED}")
    return _create({"tag": tag}, tag)  # unlike Target(tag), this keeps the tag: it tells the device


def _create(config: str | dict[str, object], text: str) -> Target:
    try:
        target = Target(config)
    except (TypeError, ValueError) as error:
        reason = str(error).split(". Target creation from")[0].replace("\n", " ")
        raise TargetError(f"target {text}: {reason}") from error
    return _checked(target, text)


def _checked(target: Target, text: str) -> Target:
    """``target`` unless code can't be generated for it."""
    if target.kind.name not in ("llvm", "cuda"):
        raise TargetError(f"target {text} is of kind {target.kind.name}; supported: {_SUPPORTED}")
    if target.host is not None and target.host.kind.name != "llvm":
        raise TargetError(f"target {text} has a host of kind {target.host.kind.name}, not llvm")
    for name, value in target.attrs.items():
        if isinstance(value, int) and value < 0:
            raise TargetError(f"target {text}: {name} is {value}, it can't be negative")
    arch = target.attrs.get("arch", "")
    if is_cuda(target) and not re.fullmatch(r"sm_[1-9][0-9]{1,2}[a-z]?", arch):
        raise TargetError(f"target {text}: there is no arch {arch!r}; one is for example sm_90")
    cpu, triple = target.attrs.get("mcpu", ""), target.attrs.get("mtriple", "")
    if cpu and not codegen.llvm_is_valid_cpu(cpu, triple or codegen.llvm_get_system_triple()):
        raise TargetError(f"target {text}: LLVM knows no CPU {cpu!r} for this triple")
    return target


def _with_host(target: Target) -> Target:
    if is_cuda(target) and target.host is None:
        return target.with_host(host_target())
    return target
