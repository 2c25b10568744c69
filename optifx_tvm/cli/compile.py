"""``optifx compile``: a model to one file that ``optifx run`` runs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from optifx_tvm import artifact
from optifx_tvm.cli.options import add_model_options


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("compile", help="compile a model", description=__doc__)
    add_model_options(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT.so", help="the file to write"
    )
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> None:
    """Compile and save; an output path that can't be written is refused before the work."""
    artifact.check_writable(options.output, source=Path(options.model))
    from optifx_tvm import build  # TVM takes a second to load: not for --help

    start = time.perf_counter()
    compiled = build.compile(
        options.model,
        options.target,
        dtype=options.dtype,
        input_shapes=options.input_shapes,
        planner=options.planner,
        progress=sys.stderr.isatty(),
    )
    compiled.save(options.output)
    size = options.output.stat().st_size / 1e6
    print(
        f"wrote {options.output} ({size:.1f} MB) for {compiled.info.target_kind} "
        f"in {time.perf_counter() - start:.1f} s"
    )
