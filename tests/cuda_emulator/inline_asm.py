"""Inline PTX in CUDA source -> calls of the functions in ptx.h."""

from __future__ import annotations

import re

_START = re.compile(r"(?:__asm__|asm) (?:__volatile__|volatile) ?\(|(?:__asm__|asm)\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CALLS = (
    # The wrappers that TVM writes before the kernels.
    (
        re.compile(r"ptx_cp_async_legacy_\w*?_(\d+)_(\d+)_(\d+)\("),
        r"emu::copy_async_call<\1, \2, \3>(",
    ),
    (re.compile(r"tvm_builtin_ptx_cp_async_commit_group\w*\("), "emu::commit_copies("),
    (re.compile(r"tvm_builtin_ptx_prefetch_\w+\("), "emu::prefetch("),
    (re.compile(r"tvm_builtin_ptx_cp_async_wait_group\w*?_(\d+)\("), r"emu::wait_copies(\1"),
)


def replace_ptx(source: str) -> str:
    """Replace asm statements, and TVM's own wrappers of cp.async, by calls."""
    for pattern, replacement in _CALLS:
        source = pattern.sub(replacement, source)
    done, position = [], 0
    while match := _START.search(source, position):
        end = _closing(source, match.end())
        done += [source[position : match.start()], _call(source[match.end() : end])]
        position = end + 1
    return "".join([*done, source[position:]])


def _closing(source: str, start: int) -> int:
    """Index of the parenthesis that closes the one before ``start``."""
    depth = 1
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(source, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError("unbalanced parentheses in inline assembly")


def _call(statement: str) -> str:
    """The inside of ``asm volatile(...)`` -> ``emu::mnemonic(outputs..., inputs...)``."""
    text, rest = "", statement.lstrip()
    while found := _STRING.match(rest):
        text += found[1]
        rest = rest[found.end() :].lstrip()
    mnemonic = re.match(r"[\w.:]+", text.replace("\\n", " ").strip())
    if mnemonic is None:
        raise ValueError(f"no instruction in {text!r}")
    operands: list[str] = []
    while found := re.search(r'"[=+]?\w"\(', rest):
        end = _closing(rest, found.end())
        operands.append(rest[found.end() : end])
        rest = rest[end + 1 :]
    name = re.sub(r"\W+", "_", mnemonic[0]).strip("_")
    return f"emu::{name}({', '.join(operands)})"
