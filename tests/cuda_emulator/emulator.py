"""Compile translated kernels with g++ and run them on numpy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tvm import tirx
from tvm.target import Target

from optifx_tvm.cuda_source import Launch, cuda_source
from tests.cuda_emulator.translate import translate

ORDERS = ("forward", "reverse", "random")
"""In which order the threads of a block take their turns between two barriers."""
GUARD = 256
"""Bytes around every buffer that must not change."""
_HERE = Path(__file__).parent
# Most kernels run for less time than it takes to optimise them.
_FLAGS = ("-O0", "-w", "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
          "-ffp-contract=off", "-I", str(_HERE))  # fmt: skip


class EmulationError(RuntimeError):
    """The kernel did what a GPU would not forgive: an access out of bounds or misaligned, a race
    in shared memory, a barrier that not all threads reach. The message says where."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_long),
        ("cells", ctypes.c_void_p),
    )


class _Buffer:
    """A copy of an array between two guard zones."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.storage = np.full(array.nbytes + 2 * GUARD + 128, 0xA5, np.uint8)
        self.start = GUARD + -(self.storage.ctypes.data + GUARD) % 128
        self.inside = self.storage[self.start : self.start + array.nbytes]
        self.inside[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.address = self.storage.ctypes.data + self.start

    def finish(self) -> bool:
        """Copy the contents back; False if a guard zone was written."""
        self.array[...] = self.inside.view(self.array.dtype).reshape(self.array.shape)
        before = self.storage[: self.start]
        after = self.storage[self.start + self.array.nbytes :]
        return bool((before == 0xA5).all() and (after == 0xA5).all())


class EmulatedKernel:
    """The kernels of one scheduled PrimFunc, ready to run on the CPU."""

    def __init__(
        self, func: tirx.PrimFunc, target: Target, *, storage_rewrite: bool = False
    ) -> None:
        self.parameters = [p.name for p in func.params]
        source = cuda_source({"main": func}, target, storage_rewrite=storage_rewrite)
        self.library = load(source.text)
        self.launches = source.launches["main"]
        self.workspace = source.workspace["main"]

    def run(self, args: Sequence[np.ndarray], order: str = "forward", seed: int = 0) -> None:
        """Run on ``args`` (in the order of the PrimFunc's parameters, outputs written in place).

        Raises EmulationError.
        """
        arrays = dict(zip(self.parameters, args, strict=True))
        for name, (elements, dtype) in self.workspace.items():
            arrays[name] = np.full(elements, np.nan, dtype)
        launch_all(self.library, self.launches, arrays, order, seed)


def load(source: str) -> ctypes.CDLL:
    """Compile the kernels of a CUDA source for the CPU."""
    return _compile(translate(source).source)


def launch_all(
    library: ctypes.CDLL,
    launches: Sequence[Launch],
    arrays: Mapping[str, np.ndarray],
    order: str = "forward",
    seed: int = 0,
) -> None:
    """Run ``launches`` one after the other on ``arrays`` (by buffer name, written in place).

    Raises EmulationError; the arrays are then unchanged.
    """
    buffers = {name: _Buffer(array) for name, array in arrays.items()}
    launcher = library.emu_launch
    launcher.restype = ctypes.c_char_p
    for launch in launches:
        memories = (_Memory * len(launch.buffers))(
            *(
                _Memory(name.encode(), buffers[name].address, buffers[name].array.nbytes, None)
                for name in launch.buffers
            )
        )
        message = launcher(
            getattr(library, f"run_{launch.kernel}"),
            memories,
            (ctypes.c_uint * 3)(*launch.grid),
            (ctypes.c_uint * 3)(*launch.block),
            ctypes.c_long(launch.shared_bytes),
            ORDERS.index(order),
            ctypes.c_uint(seed),
        )
        if message:
            raise EmulationError(f"{launch.kernel}: {message.decode()}")
    for name, buffer in buffers.items():
        if not buffer.finish():
            raise EmulationError(f"the guard zone around {name} was overwritten")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_emulator_")


@cache
def _scheduler() -> str:
    """The object file of the scheduler."""
    path = os.path.join(_folder().name, "scheduler.o")
    subprocess.run(
        ["g++", *_FLAGS, "-O2", "-c", str(_HERE / "scheduler.cpp"), "-o", path], check=True
    )
    return path


@cache
def _compile(source: str) -> ctypes.CDLL:
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = os.path.join(_folder().name, f"{name}.so")
    unit = Path(_folder().name, f"{name}.cpp")
    unit.write_text(source)
    # Every library has its own scheduler state: symbols are bound inside it.
    command = ["g++", *_FLAGS, "-shared", "-Wl,-Bsymbolic", "-fno-gnu-unique",
               str(unit), _scheduler(), "-o", path]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ refuses the translated kernel:\n{done.stderr[:4000]}")
    return ctypes.CDLL(path)
