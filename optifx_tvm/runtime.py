"""Compiled models: run, time, save and load them."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tvm
from tvm import relax

from optifx_tvm import artifact
from optifx_tvm.artifact import ModelInfo, TensorInfo
from optifx_tvm.errors import InputError, ModelError, OptionError, TargetError
from optifx_tvm.target import default_threads

Inputs = Mapping[str, Any] | Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class BenchResult:
    """Times of one inference, in seconds."""

    median: float
    min: float
    max: float
    times: tuple[float, ...]
    """Each measured time, in the order of measurement."""


class ScratchFolder:
    """A temporary folder that is removed with the last reference to this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="optifx-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the object too, and must leave the folder
        shutil.rmtree(folder, ignore_errors=True)


class CompiledModel:
    """A model compiled for one target: ``run`` it, ``benchmark`` it, ``save`` it to one file.

    ``info`` says what it is: inputs, outputs, target, versions and the fusion plan. Made by
    ``optifx_tvm.compile`` and ``optifx_tvm.load``. Threads that use one model take turns; for
    inferences at the same time load it once a thread. It can't be pickled or copied: ``save`` it.
    """

    def __init__(self, library: Path, info: ModelInfo, folder: ScratchFolder) -> None:
        self.info = info
        self._library = library
        self._folder = folder  # kept as long as the library in it is needed
        self._lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CompiledModel can't be pickled or copied: save it, and load that file")

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Names, shapes and dtypes of the inputs, in order."""
        return self.info.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Names, shapes and dtypes of the outputs, in order."""
        return self.info.outputs

    def run(self, inputs: Inputs) -> list[np.ndarray]:
        """One inference; returns the outputs in the order of ``outputs``.

        ``inputs``: a mapping from input names to arrays, the arrays in order, or the one array.
        Raises InputError where names, shapes or dtypes don't fit ``self.inputs``, TargetError
        where the model was compiled for a GPU and there is none.
        """
        arrays = check_inputs(inputs, self.inputs)
        with self._lock:
            results = self._main(*self._to_device(arrays))
            return [tensor.numpy() for tensor in _flatten(results)]

    def benchmark(
        self, repeat: int = 30, warmup: int = 5, inputs: Inputs | None = None
    ) -> BenchResult:
        """Time ``repeat`` inferences one by one after ``warmup`` untimed ones.

        Inputs lie on the device before the clock starts; without ``inputs`` they are random and
        seeded. On a GPU each time includes waiting for the device.
        """
        if repeat < 1 or warmup < 0:
            raise OptionError(
                f"repeat={repeat}, warmup={warmup}: at least 1 timed and 0 warm-up runs are needed"
            )
        arrays = random_inputs(self.inputs) if inputs is None else inputs
        checked = check_inputs(arrays, self.inputs)
        times = []
        with self._lock:
            tensors = self._to_device(checked)
            for _ in range(warmup):
                self._main(*tensors)
            for _ in range(repeat):
                self._device.sync()
                start = time.perf_counter()
                self._main(*tensors)
                self._device.sync()
                times.append(time.perf_counter() - start)
        return BenchResult(statistics.median(times), min(times), max(times), tuple(times))

    def save(self, path: str | Path) -> None:
        """Write the model to one file, for ``load`` and ``optifx run``.

        A good file already there is replaced only once the new one is complete. Raises
        OutputError where ``path`` can't be written.
        """
        artifact.write(Path(path), self._library, self.info)

    @cached_property
    def _device(self) -> tvm.runtime.Device:
        if self.info.target_kind != "cuda":
            return tvm.cpu()
        if not tvm.cuda(0).exist:
            raise TargetError(
                "this model was compiled for CUDA and there is no GPU here: "
                "run it on a machine with one, or compile it with --target llvm"
            )
        return tvm.cuda(0)

    @cached_property
    def _main(self) -> Any:
        device = self._device
        self._check_origin()
        # TVM's pool takes half of the processors for cores with two threads each; it reads this
        # when it starts. A user's own value stays.
        os.environ.setdefault("TVM_NUM_THREADS", str(default_threads()))
        module = tvm.runtime.load_module(str(self._library))
        self._machine = relax.VirtualMachine(module, device)
        return self._machine["main"]

    def _check_origin(self) -> None:
        if self.info.tvm_version != tvm.__version__:
            raise ModelError(
                f"this model was compiled with TVM {self.info.tvm_version} and this is TVM "
                f"{tvm.__version__}: compile it again"
            )
        here = artifact.machine_architecture()
        if self.info.host_architecture != here:
            raise TargetError(
                f"this model was compiled for {self.info.host_architecture} processors and this "
                f"machine is {here}: run it there, or compile it for this machine"
            )

    def _to_device(self, arrays: list[np.ndarray]) -> list[tvm.runtime.Tensor]:
        return [tvm.runtime.tensor(array, device=self._device) for array in arrays]


def load(path: str | Path) -> CompiledModel:
    """Load a file written by ``CompiledModel.save``. It holds machine code: load what you trust.

    Raises ModelError where it is missing, truncated, altered or not ours. The GPU of a CUDA model
    is looked for when it runs, not here.
    """
    folder = ScratchFolder()
    library = folder.path / "model.so"
    return CompiledModel(library, artifact.read(Path(path), library), folder)


def check_inputs(inputs: Inputs, expected: tuple[TensorInfo, ...]) -> list[np.ndarray]:
    """``inputs`` as contiguous arrays in the order of ``expected``; raises InputError."""
    names = [info.name for info in expected]
    if isinstance(inputs, Mapping):
        unknown = [name for name in inputs if name not in names]
        missing = [name for name in names if name not in inputs]
        if unknown or missing:
            raise InputError(
                f"inputs named {_listing(inputs)} given; the model takes {_listing(names)}"
            )
        values = [inputs[name] for name in names]
    else:
        if not isinstance(inputs, Iterable):
            inputs = [inputs]
        values = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        if len(values) != len(expected):
            raise InputError(
                f"{len(values)} inputs given; the model takes {len(expected)}: {_listing(names)}"
            )
    return [_check_array(value, info) for value, info in zip(values, expected, strict=True)]


def random_inputs(expected: tuple[TensorInfo, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs of the expected shapes and dtypes: normal floats, integers from 0 to 9."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for info in expected:
        if np.issubdtype(np.dtype(info.dtype), np.floating):
            inputs[info.name] = rng.standard_normal(info.shape).astype(info.dtype)
        else:
            high = 2 if info.dtype == "bool" else 10
            inputs[info.name] = rng.integers(0, high, info.shape).astype(info.dtype)
    return inputs


def _check_array(value: Any, info: TensorInfo) -> np.ndarray:
    try:
        array = value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, torch's gradients
        raise InputError(f"input {info.name!r} can't be made an array: {error}") from error
    if array.shape != info.shape:
        raise InputError(
            f"input {info.name!r} has shape {list(array.shape)}; "
            f"the model was compiled for {list(info.shape)}"
        )
    if str(array.dtype) != info.dtype:
        raise InputError(
            f"input {info.name!r} has dtype {array.dtype}; the model takes {info.dtype}: "
            f'convert it, for example with array.astype("{info.dtype}")'
        )
    return np.ascontiguousarray(array).reshape(info.shape)


def _listing(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names) or "none"


def _flatten(result: Any) -> list[tvm.runtime.Tensor]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flatten(part)]
