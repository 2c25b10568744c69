"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
import re

from optifx_tvm.graph import DTYPES
from optifx_tvm.partition import PLANNERS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, --target, --dtype, --input-shapes and --planner."""
    parser.add_argument(
        "model", metavar="MODEL", help="an .onnx, .pt2 or Relax .json file, or zoo:NAME"
    )
    parser.add_argument(
        "--target",
        help="llvm, cuda, a TVM tag such as nvidia/nvidia-h100, or JSON "
        "(default: the GPU found, else this CPU)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="float16 computes in half precision, accumulating in float32 (default: the model's)",
    )
    parser.add_argument(
        "--input-shapes",
        metavar="SHAPES",
        help='fix symbolic sizes, for example "data:[1,3,224,224] mask:[1,10]"',
    )
    parser.add_argument(
        "--planner",
        choices=PLANNERS,
        default="search",
        help="how operators are grouped; none: no fusion of region operators (default: search)",
    )


def positive(text: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
