"""The command ``optifx``: compile, run and explain.

Exit codes: 0 done; 1 a defect of ours; 2 the command line, the model, an option or an input is at
fault, said in one line on the standard error stream; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from optifx_tvm import __version__
from optifx_tvm.cli import compile, explain, run
from optifx_tvm.errors import OptiFXError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage text."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: the process's own) and return the exit code."""
    parser = _Parser(prog="optifx", description="Fused convolutional networks on TVM.")
    parser.add_argument("--version", action="version", version=f"optifx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (compile, run, explain):
        command.add_parser(commands)
    for sub in commands.choices.values():
        sub.add_argument("--debug", action="store_true", help="show Python tracebacks of errors")
    options = parser.parse_args(arguments)
    if arguments is None and not options.debug:
        sys.excepthook = _report_defect
    try:
        options.function(options)
        sys.stdout.flush()
    except OptiFXError as error:
        if options.debug:
            raise
        print(f"optifx {options.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"optifx {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        _drop_output()
    except OSError as error:  # the machine: a full disk, no temporary folder
        if options.debug:
            raise
        print(f"optifx {options.command}: error: {_one_line(error)}", file=sys.stderr)
        _drop_output()
        return 2
    return 0


def _drop_output() -> None:
    """What is still buffered for the standard output is not written: it can't be."""
    with contextlib.suppress(io.UnsupportedOperation):  # captured: no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_defect(
    kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    """``sys.excepthook``: whatever reaches it is a defect of ours (exit code 1)."""
    print(
        f"optifx: internal error: {kind.__name__}: {_one_line(error)}; "
        "please report it with the output of the same command and --debug",
        file=sys.stderr,
    )


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-290:]}"
