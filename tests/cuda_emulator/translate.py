"""CUDA source as TVM generates it -> C++ for device.h."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.cuda_emulator.inline_asm import replace_ptx

_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^)]*)\)( \{|;)'
)
_TYPE = r"[A-Za-z_]\w*"
_REWRITES = (
    # Arrays become checked ones. Dynamic shared memory is one array, whatever its names and types.
    (
        re.compile(rf"extern __shared__ (?:__align__\(\d+\) )?({_TYPE}) (\w+)\[\];"),
        r"emu::Pointer<\1> \2 = emu::pointer<\1>(emu::dynamic_shared());",
    ),
    (
        re.compile(rf"__shared__ alignas\(\d+\) ({_TYPE}) (\w+)\[(\d+)\];"),
        r"emu::Pointer<\1> \2 = emu::pointer<\1>("
        r'emu::static_shared(__COUNTER__, "\2", \3 * sizeof(\1)));',
    ),
    (
        re.compile(rf"alignas\(\d+\) ({_TYPE}) (\w+)\[(\d+)\];"),
        r'emu::Local<\1, \3> \2("\2");',
    ),
    # *(type*)(...) is an access, ((type*)name) and ((type*)(...)) are views.
    (re.compile(rf"\*\(({_TYPE})\*\)\("), r"emu::at<\1>("),
    (re.compile(rf"\(\(({_TYPE}) ?\*\)\("), r"(emu::view<\1>("),
    (re.compile(rf"\(\((?:volatile )?({_TYPE})\*\)(\w+)\)"), r"emu::view<\1>(\2)"),
)


@dataclass(frozen=True)
class Translation:
    """A C++ translation unit and the kernels in it."""

    source: str
    parameters: dict[str, tuple[str, ...]]
    """Kernel -> names of its parameters, in order; all are pointers. The unit exports
    ``run_KERNEL(const emu::Memory*)``."""


def translate(source: str) -> Translation:
    """Translate every kernel of a CUDA source."""
    first = _KERNEL.search(source)
    if first is None:
        raise ValueError("no kernel in the CUDA source")
    # What TVM puts before the first kernel (fp16 helpers, PTX wrappers) is in device.h.
    body = source[first.start() :]
    parameters: dict[str, tuple[str, ...]] = {}

    def signature(match: re.Match[str]) -> str:
        name, text, end = match.groups()
        declared, names = [], []
        for parameter in filter(None, (p.strip() for p in text.split(","))):
            found = re.fullmatch(rf"(?:const )?({_TYPE})\* (?:__restrict__ )?(\w+)", parameter)
            if found is None:
                raise ValueError(f"parameter {parameter!r} of {name} is not a pointer")
            declared.append(f"emu::Pointer<{found[1]}> {found[2]}")
            names.append((found[1], found[2]))
        parameters[name] = tuple(n for _, n in names)
        if end == ";":
            return ""
        args = ", ".join(f"emu::pointer<{t}>(args[{i}])" for i, (t, _) in enumerate(names))
        declaration = f"static void {name}({', '.join(declared)})"
        entry = f'extern "C" void run_{name}(const emu::Memory* args) {{ {name}({args}); }}'
        return f"{declaration};\n{entry}\n{declaration} {{"

    body = _KERNEL.sub(signature, body)
    body = replace_ptx(body)
    for pattern, replacement in _REWRITES:
        body = pattern.sub(replacement, body)
    return Translation('#include "ptx.h"\n' + body, parameters)
