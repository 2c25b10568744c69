"""The file of a compiled model: a shared library followed by what describes it.

Layout: library, description (JSON, UTF-8), trailer. ``dlopen`` ignores what follows the sections of
a library, and reading from the end needs no code of the file to be run: a truncated library would
kill the process with SIGBUS when loaded, so length and checksum are verified before that.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from optifx_tvm.errors import ModelError, OutputError

_TRAILER = struct.Struct("<QQI8s")
"""Bytes of the library, bytes of the description, CRC-32 of both, magic."""
_MAGIC = b"OPTIFX\x00\x01"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of an input or output."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelInfo:
    """What a compiled model is."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    target: str
    """The complete target, as JSON."""
    target_kind: str
    """"llvm" or "cuda"."""
    host_architecture: str
    """Processor architecture of the host code, for example "x86_64"."""
    dtype: str | None
    """"float16" where compiled in half precision; None: as the model is."""
    planner: str
    optifx_version: str
    tvm_version: str
    plan: Any = None
    """The fusion plan, as plain JSON values; None where the pipeline gave none."""


def write(path: Path, library: Path, info: ModelInfo) -> None:
    """Write ``library`` and ``info`` to ``path``, which is replaced only by a complete file."""
    description = json.dumps(asdict(info), separators=(",", ":")).encode()
    with replacing(path) as out:
        with library.open("rb") as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
            checksum = _copy(source, out, size)
        out.write(description)
        checksum = zlib.crc32(description, checksum)
        out.write(_TRAILER.pack(size, len(description), checksum, _MAGIC))


def read(path: Path, library: Path) -> ModelInfo:
    """The description in ``path``, whose library is copied to ``library``; raises ModelError unless
    the whole file is sound and ours.

    The copy is what to load: whatever happens to ``path`` later, it is what was verified, and
    ``dlopen`` would take a new file at the path of one that is still loaded for the old one.
    """
    try:
        with path.open("rb") as source:
            total = source.seek(0, os.SEEK_END)
            trailer = _read_trailer(source)
            if trailer is None:
                raise ModelError(
                    f"{path} is truncated or no model compiled by optifx: "
                    "write it again with optifx compile"
                )
            size, length, expected, _ = trailer
            if total != size + length + _TRAILER.size:
                raise ModelError(
                    f"{path} is damaged (it has {total} bytes, "
                    f"{size + length + _TRAILER.size} were written): compile it again"
                )
            source.seek(0)
            with library.open("wb") as out:
                checksum = _copy(source, out, size)
            description = source.read(length)
    except FileNotFoundError as error:
        raise ModelError(f"no such file: {path}") from error
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    if zlib.crc32(description, checksum) != expected:
        raise ModelError(f"{path} is damaged (its checksum is wrong): compile it again")
    return _info_from_json(json.loads(description))


def check_writable(path: Path, source: Path | None = None) -> None:
    """Raise OutputError where a file at ``path`` could not be written, or would take the place of
    ``source``, what is being read; leaves nothing behind."""
    try:
        real = Path(os.path.realpath(path))
        there, regular = real.exists(), real.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        raise OutputError(f"can't write {str(path)!r}: {error}") from error
    if there and not regular:
        kind = "a folder" if real.is_dir() else "not a regular file"
        raise OutputError(f"can't write {path}: it is {kind}; give the path of a file")
    if there and source is not None and real == Path(os.path.realpath(source)):
        raise OutputError(f"can't write {path}: it is the model that is read; give another path")
    if not real.parent.is_dir():
        raise OutputError(f"can't write {path}: there is no folder {real.parent}; make it first")
    trial = _aside(real)
    try:
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that takes the place of ``path`` once it is complete.

    It is written beside ``path`` and renamed, so a failure leaves what was at ``path`` as it was.
    Raises OutputError where that is impossible.
    """
    check_writable(path)
    real = Path(os.path.realpath(path))
    aside = _aside(real)
    try:
        try:
            with aside.open("xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            aside.replace(real)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror or error}") from error


def machine_architecture() -> str:
    """Processor architecture of this machine, spelled as in LLVM's triples."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _aside(path: Path) -> Path:
    """A new name beside ``path``, of the same length whatever ``path`` is called."""
    return path.with_name(f".optifx-{secrets.token_hex(8)}.tmp")


def _copy(source: BinaryIO, out: BinaryIO, size: int) -> int:
    """Copy ``size`` bytes (fewer if there are no more); returns their CRC-32."""
    checksum = 0
    while size > 0:
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            break
        size -= len(chunk)
        checksum = zlib.crc32(chunk, checksum)
        out.write(chunk)
    return checksum


def _read_trailer(source: BinaryIO) -> tuple[int, int, int, bytes] | None:
    total = source.seek(0, os.SEEK_END)
    if total < _TRAILER.size:
        return None
    source.seek(total - _TRAILER.size)
    size, length, checksum, magic = _TRAILER.unpack(source.read(_TRAILER.size))
    return (size, length, checksum, magic) if magic == _MAGIC else None


def _info_from_json(values: dict[str, Any]) -> ModelInfo:
    tensors = {
        key: tuple(TensorInfo(t["name"], tuple(t["shape"]), t["dtype"]) for t in values[key])
        for key in ("inputs", "outputs")
    }
    return ModelInfo(**{**values, **tensors})
