"""Parameters of the zoo's networks: random ones, checkpoints, and the check that these fit."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from optifx_tvm.errors import ModelError

# Left out of every network: auxiliary heads (torchvision's GoogLeNet), torch's batch counters.
_IGNORED = re.compile(r"^aux\d*\.|\.num_batches_tracked$")
# torchvision's published DenseNets still have "norm.1" where its code has "norm1".
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
_SHOWN = 4

_BIAS = 0.75
# 1 / the variance of max(0, z), z normal with mean _BIAS and deviation 1: He's rule for such z
_GAIN = 1.5


def parameter_rng(name: str, seed: int) -> np.random.Generator:
    """A generator of its own for each parameter, so that their order does not matter."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """float32: scaled normal kernels and matrices, batch norm scales in [0.5, 1.5), biases > 0.

    A network of usual random weights either forgets its input (ReLU makes every mean positive, and
    what all channels have in common takes over) or, with the means removed, amplifies rounding
    errors 1.2 times a layer. So kernels sum to zero, and biases keep about three quarters of the
    pre-activations above zero, which makes the amplification small.
    ``running_mean`` and ``running_var`` are left at 0 and 1.
    """
    return {name: _random(name, shape, seed) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith("running_mean"):
        return np.zeros(shape, "float32")
    if name.endswith("running_var"):
        return np.ones(shape, "float32")
    rng = parameter_rng(name, seed)
    if name.endswith("bias"):
        return rng.normal(_BIAS, 0.25, shape).astype("float32")
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype("float32")
    values = rng.standard_normal(shape, dtype="float32")
    if shape[1] > 1:
        values -= values.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    values *= np.float32(np.sqrt(_GAIN / np.prod(shape[1:])))
    return values


def load_weights(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a ``.npz`` or ``.safetensors`` file by name. ``ModelError`` if unreadable."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"no weights file {path}; give a .npz or .safetensors file")
    if path.suffix not in (".npz", ".safetensors"):
        raise ModelError(f"weights file {path} is not supported; give .npz or .safetensors")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # opened here, since numpy leaves a broken archive open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"weights file {path} can't be read ({reason}); save it anew") from error


def match_weights(
    loaded: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], model: str
) -> dict[str, np.ndarray]:
    """The loaded arrays of exactly the parameters in ``shapes``.

    Batch counters and auxiliary heads are ignored. ``ModelError`` names what is missing,
    unexpected or of another shape.
    """
    found = {
        _OLD_DENSENET.sub(r"\1\2", name): np.asarray(value)
        for name, value in loaded.items()
        if not _IGNORED.search(name)
    }
    misfits = {
        "missing": [name for name in shapes if name not in found],
        "unexpected": [name for name in found if name not in shapes],
        "mismatched": [
            f"{name} {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in found and found[name].shape != shape
        ],
    }
    problems = [_summary(kind, items) for kind, items in misfits.items() if items]
    if problems:
        raise ModelError(
            f"weights do not fit {model}: {'; '.join(problems)}; "
            f"give all {len(shapes)} parameters under the names of its reference implementation"
        )
    return {name: found[name] for name in shapes}


def _summary(kind: str, items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {kind} ({', '.join(items[:_SHOWN])}{more})"
