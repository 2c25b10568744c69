"""``optifx explain``: which operators are fused, and why others are not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from optifx_tvm.cli.options import add_model_options

_REFUSALS_SHOWN = 10
_MIN_WIDTH = 100


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain", help="show the fusion plan of a model", description=__doc__
    )
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> None:
    """Plan, without generating code, and print."""
    from optifx_tvm.explain import explain  # TVM takes a second to load: not for --help

    plan = explain(
        options.model,
        options.target,
        dtype=options.dtype,
        input_shapes=options.input_shapes,
        planner=options.planner,
    )
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        _print(plan)


def _print(plan: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if console.width < _MIN_WIDTH:
        console = Console(highlight=False, width=_MIN_WIDTH)
    console.print(_groups(plan["groups"]))
    if plan["refused"]:
        console.print(_refusals(plan["refused"]))
    print(
        f"kernels: {plan['unfused_kernels']} unfused, {plan['fused_kernels']} fused; "
        f"predicted {plan['predicted_us']:.1f} us; planned in {plan['planner_seconds']:.2f} s"
        + ("" if plan["complete"] else " (time budget spent: the best plan found until then)")
    )


def _groups(groups: list[dict[str, Any]]) -> Table:
    table = Table(title="Fusion groups, one kernel each")
    table.add_column("#", justify="right")
    table.add_column("operators", overflow="fold")
    table.add_column("mode")
    table.add_column("tile", justify="right")
    table.add_column("recompute", justify="right")
    table.add_column("predicted us", justify="right")
    for index, group in enumerate(groups):
        table.add_row(
            str(index),
            ", ".join(group["operators"]),
            group["mode"],
            "x".join(str(extent) for extent in group["tile"]),
            f"{group['recompute']:.2f}",
            f"{group['predicted_us']:.2f}",
        )
    return table


def _refusals(refused: list[dict[str, Any]]) -> Table:
    shown = refused[:_REFUSALS_SHOWN]
    table = Table(title=f"Refused ({len(shown)} of {len(refused)}; all of them with --json)")
    table.add_column("operators", overflow="fold")
    table.add_column("reason", overflow="fold")
    for refusal in shown:
        table.add_row(", ".join(refusal["operators"]), refusal["reason"])
    return table
