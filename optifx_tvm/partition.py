"""What a planner decides: frozen values that can be compared, saved and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optifx_tvm.graph import ConvGraph


@dataclass(frozen=True)
class Tile:
    """Tile of a group: rows and columns of its last node's output, and the number of slices of
    its output channels (each slice is one block; full producers are recomputed per slice)."""

    height: int
    width: int
    channel_slices: int = 1


@dataclass(frozen=True)
class Group:
    """Nodes fused into one kernel, in topological order."""

    nodes: tuple[str, ...]
    mode: str
    """"single", "straight", "split", "merge" or "split+merge"."""
    tile: Tile
    predicted_us: float
    """Predicted time of the kernel in microseconds, launch included."""


@dataclass(frozen=True)
class Rejected:
    """A set of nodes that was considered and refused, and why."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Partition:
    """Disjoint groups that cover every fusible node of a graph, in an order that runs."""

    groups: tuple[Group, ...]
    rejected: tuple[Rejected, ...] = ()
    planner: str = ""
    seconds: float = 0.0
    """Planning time."""
    complete: bool = True
    """False: the search's budget (structures priced, states visited, time) ended it; this is the
    best plan found so far."""

    @property
    def predicted_us(self) -> float:
        """Sum of the groups' predicted times, microseconds."""
        return sum(group.predicted_us for group in self.groups)


Planner = Callable[[ConvGraph], Partition]
PLANNERS = ("search", "greedy", "none")
"""Planners that have a name."""
