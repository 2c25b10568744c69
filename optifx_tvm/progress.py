"""Progress of a compilation: long steps report, whoever called listens.

A step calls ``report("schedule", done, total)``; nothing happens unless a caller up the stack has
opened ``listening(callback)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Called with the stage's name, what is done and the total, in units of the stage."""

_listener: ContextVar[Listener | None] = ContextVar("optifx_progress", default=None)


def report(stage: str, done: int, total: int) -> None:
    """Tell the listener, if there is one, that ``done`` of ``total`` of ``stage`` are done."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Send the reports made inside to ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def bar() -> Iterator[None]:
    """Show the reports made inside as progress bars on the standard error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total)
            display.update(tasks[stage], completed=done, total=total)

        with listening(show):
            yield
