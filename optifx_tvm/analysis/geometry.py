"""How many positions one tile of a group computes, holds and reads, one axis at a time: a search
tries every height with every width, and the two do not depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optifx_tvm.analysis.channels import passes_slice
from optifx_tvm.analysis.placement import Placement, StageKey
from optifx_tvm.analysis.region import AxisSpace, Region1D, axis_space, through_axis
from optifx_tvm.graph import ConvGraph, Node


@dataclass(frozen=True)
class StagedCopy:
    """A staged copy of a tensor."""

    tensor: str
    readers: tuple[Node, ...]
    sliced: bool
    """Has it just the channels that its readers compute (else all)?"""


def staged_copies(group: ConvGraph, placement: Placement) -> tuple[StagedCopy, ...]:
    """The staged copies: readers with the same prologue and padding value share one."""
    found: dict[StageKey, list[Node]] = {}
    for node in group.nodes:
        if placement.is_staged(node):
            found.setdefault(placement.stage_key(node), []).append(node)
    copies = []
    for readers in found.values():
        tensor = readers[0].inputs[0]
        producer = group.by_name.get(tensor)
        gathered = producer is not None and placement.is_gathered(producer)
        sliced = not gathered and all(passes_slice(group, reader) for reader in readers)
        copies.append(StagedCopy(tensor, tuple(readers), sliced))
    return tuple(copies)


@dataclass(frozen=True)
class AxisGeometry:
    """Numbers of positions on one axis."""

    space: AxisSpace
    area: Mapping[str, int]
    """Computed or read of every activation."""
    buffered: tuple[int, ...]
    """Held of every result that has a buffer."""
    staged: tuple[int, ...]
    """Held of every staged copy."""
    inputs: tuple[int, ...]
    """Read of every input."""


def axis_geometry(
    group: ConvGraph,
    placement: Placement,
    buffered: tuple[str, ...],
    copies: tuple[StagedCopy, ...],
    axis: int,
    tile: int,
) -> AxisGeometry:
    """The numbers for tiles of ``tile`` positions on ``axis`` (0: rows, 1: columns).

    Raises RegionError if the group has no single tile space.
    """
    space = axis_space(group, axis, tile)
    alone = space.count == 1
    size = {t: group.shape(t)[1 + axis] for t in space.regions}
    area = {
        t: _clip(region, size[t]) if alone else region.extent for t, region in space.regions.items()
    }

    def staged(copy: StagedCopy) -> int:
        needs = [through_axis(node, axis, space.regions[node.name]) for node in copy.readers]
        start, end = min(need.base for need in needs), max(need.end for need in needs)
        if alone and placement.padding_value(copy.readers[0]) is None:
            return _clip(Region1D(0, start, end - start), group.shape(copy.tensor)[1 + axis])
        return end - start

    return AxisGeometry(
        space=space,
        area=area,
        buffered=tuple(  # positions outside the image are held where somebody reads them
            area[t] if placement.tile_fill(t) is None else space.regions[t].extent for t in buffered
        ),
        staged=tuple(staged(copy) for copy in copies),
        inputs=tuple(  # what is outside the image is not read; (N, 1, 1, C) has no region
            min(space.regions[t].extent, size[t]) if t in size else 1 for t in group.inputs
        ),
    )


def _clip(region: Region1D, size: int) -> int:
    """With a single tile the positions outside the image are known and left out."""
    return max(min(region.end, size) - max(region.base, 0), 1)
