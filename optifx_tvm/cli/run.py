"""``optifx run``: run a compiled model and time it."""

from __future__ import annotations

import argparse
import lzma
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from optifx_tvm import artifact
from optifx_tvm.cli.options import positive
from optifx_tvm.errors import InputError

# What numpy and zipfile raise on damaged archives, and on a header that promises terabytes.
_UNREADABLE = (
    EOFError,
    MemoryError,
    OSError,
    RuntimeError,
    ValueError,
    lzma.LZMAError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("run", help="run a compiled model", description=__doc__)
    parser.add_argument("model", metavar="OUT.so", type=Path, help="written by optifx compile")
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="X.npz",
        help="one array for each input, by name (default: random, seeded)",
    )
    parser.add_argument("--outputs", type=Path, metavar="Y.npz", help="write the outputs here")
    parser.add_argument(
        "--repeat", type=positive, default=30, metavar="N", help="timed runs (default: 30)"
    )
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> None:
    """Run once for the outputs, then ``--repeat`` times for the clock."""
    from optifx_tvm import runtime  # TVM takes a second to load: not for --help

    if options.outputs is not None:
        artifact.check_writable(options.outputs, source=options.model)
    model = runtime.load(options.model)
    inputs = runtime.random_inputs(model.inputs) if options.inputs is None else _read(options)
    outputs = model.run(inputs)
    for info, array in zip(model.outputs, outputs, strict=True):
        print(f"{info.name}: {info.dtype} {list(info.shape)}, L2 norm {_norm(array):.6g}")
    if options.outputs is not None:
        named = {info.name: array for info, array in zip(model.outputs, outputs, strict=True)}
        with artifact.replacing(options.outputs) as out:
            np.savez(out, allow_pickle=False, **named)
        print(f"wrote {options.outputs}")
    result = model.benchmark(options.repeat, inputs=inputs)
    print(
        f"{options.repeat} runs: median {result.median * 1e3:.3f} ms, "
        f"min {result.min * 1e3:.3f} ms, max {result.max * 1e3:.3f} ms"
    )


def _read(options: argparse.Namespace) -> dict[str, np.ndarray]:
    path = options.inputs
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"{path} holds one array without a name: write it by numpy.savez")
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}") from error
    except _UNREADABLE as error:
        raise InputError(f"{path} is not a sound .npz of plain arrays: {error}") from error


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype("float64").ravel()))
