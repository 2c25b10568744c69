"""Index expressions with static bounds, and where a tile program's values are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from optifx_tvm.analysis.region import Region

Expr = Any  # TIR expressions: TVM's Python layer has no precise static types


@dataclass(frozen=True)
class Pos:
    """An index expression with its static bounds (inclusive)."""

    expr: Expr
    low: int
    high: int

    def __add__(self, k: int) -> Pos:
        return Pos(self.expr + k if k else self.expr, self.low + k, self.high + k)

    def __mul__(self, k: int) -> Pos:
        return Pos(self.expr * k if k != 1 else self.expr, self.low * k, self.high * k)

    def __floordiv__(self, k: int) -> Pos:
        if k == 1:
            return self
        return Pos(tirx.floordiv(self.expr, k), self.low // k, self.high // k)

    def plus(self, other: Pos) -> Pos:
        return Pos(self.expr + other.expr, self.low + other.low, self.high + other.high)

    def clamp(self, extent: int) -> Expr:
        """The expression, kept in [0, extent) where its bounds don't guarantee that."""
        expr = self.expr
        if self.low < 0:
            expr = tirx.max(expr, i64(0))
        if self.high >= extent:
            expr = tirx.min(expr, i64(extent - 1))
        return expr

    def inside(self, extent: int) -> list[Expr]:
        """The conditions for being in [0, extent) that the bounds don't guarantee."""
        low = [self.expr >= 0] if self.low < 0 else []
        return low + ([self.expr < extent] if self.high >= extent else [])


@dataclass(frozen=True)
class View:
    """Where a tensor's values are read: a tile buffer, or (region None) global memory."""

    buffer: Any
    region: Region | None = None
    slice_extent: int | None = None
    """Channels of the slice that the tile buffer holds; None: all channels."""


@dataclass(frozen=True)
class At:
    """A position: row and column relative to the start of ``region`` in the current tile."""

    lead: tuple[Expr, ...]
    region: Region
    row: Pos
    col: Pos
    guarded: bool = False
    """Is it only evaluated inside the image (so that reads need no clamping)?"""


def i64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def constant(value: float, dtype: str) -> tirx.FloatImm:
    """A constant, the lowest float32 as the lowest number of ``dtype``."""
    return tirx.FloatImm(dtype, max(value, float(np.finfo(str(dtype)).min)))


def all_of(conditions: list[Expr]) -> Expr | None:
    result = None
    for condition in conditions:
        result = condition if result is None else tirx.all(result, condition)
    return result
