"""Region analysis: which box of every tensor one tile of a fusion group needs (AFusioN).

Per spatial axis the region of a tensor is ``[step * t + base, step * t + base + extent)`` where t
is the index of the tile on that axis. Backwards through an operator with kernel k, stride s,
dilation d and leading padding p (docs/architecture.md, "Region algebra"):

    step' = step * s      base' = base * s - p      extent' = (extent - 1) * s + (k - 1) * d + 1

A transposed convolution divides instead: output row o reads input rows (o + p - y * d) / s for the
taps y where that is whole. Element-wise operators and concat pass a region on; a tensor with
several consumers gets the hull. Regions may reach outside the image: such positions of an input or
intermediate hold the next operator's padding value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from optifx_tvm.graph import ConvGraph, Node


class Region1D(NamedTuple):
    """Positions ``[step * t + base, step * t + base + extent)`` on one axis for tile t."""

    step: int
    base: int
    extent: int

    @property
    def end(self) -> int:
        """One past the last position for tile 0."""
        return self.base + self.extent

    def start(self, t: int) -> int:
        """First position for tile t; may be negative (outside the image)."""
        return self.step * t + self.base

    def hull(self, other: Region1D) -> Region1D | None:
        """The smallest region with both, or None if they move at different speeds."""
        if self.step != other.step:
            return None
        base = min(self.base, other.base)
        return Region1D(self.step, base, max(self.end, other.end) - base)


class Region(NamedTuple):
    """A box of positions of one NHWC tensor: rows and columns."""

    rows: Region1D
    cols: Region1D

    def hull(self, other: Region) -> Region | None:
        """The smallest box with both, or None if they move at different speeds."""
        rows, cols = self.rows.hull(other.rows), self.cols.hull(other.cols)
        return None if rows is None or cols is None else Region(rows, cols)


class RegionError(ValueError):
    """The group has no single tile space; the message says why (used as a refusal reason)."""


def through_axis(node: Node, axis: int, region: Region1D) -> Region1D:
    """The positions of ``node.inputs`` on one axis that ``region`` of its output depends on."""
    if node.op in ("elementwise", "concat", "opaque"):
        return region
    w = node.window
    k, s, d, p = w.kernel[axis], w.strides[axis], w.dilation[axis], w.padding[axis]
    if node.op == "conv2d_transpose":
        if region.step % s:
            raise RegionError(
                f"tile step {region.step} of {node.name} is not a multiple of its up-sampling {s}"
            )
        first = -((-(region.base + p - (k - 1) * d)) // s)
        last = (region.end - 1 + p) // s
        return Region1D(region.step // s, first, max(last - first + 1, 1))
    return Region1D(region.step * s, region.base * s - p, (region.extent - 1) * s + (k - 1) * d + 1)


def input_region(node: Node, region: Region) -> Region:
    """The region of ``node.inputs`` that ``region`` of its output depends on.

    Raises RegionError if a transposed convolution's tiles do not start at whole input positions.
    """
    return Region(through_axis(node, 0, region.rows), through_axis(node, 1, region.cols))


@dataclass(frozen=True)
class AxisSpace:
    """Tiles of one group on one axis, see ``TileSpace``."""

    count: int
    regions: Mapping[str, Region1D]
    owned: Mapping[str, Region1D]


@dataclass(frozen=True)
class TileSpace:
    """Tiles of one group: their number per axis and the region of every activation."""

    count: tuple[int, int]
    """Tiles in (height, width)."""
    regions: Mapping[str, Region]
    """Activation (inputs, intermediates, outputs) -> region read or computed."""
    owned: Mapping[str, Region]
    """Output -> the part of its region that the tile writes; owned parts of all tiles are
    disjoint and cover the image."""

    @staticmethod
    def of(rows: AxisSpace, cols: AxisSpace) -> TileSpace:
        """The tiles whose rows and columns these are."""
        return TileSpace(
            (rows.count, cols.count),
            {t: Region(axis, cols.regions[t]) for t, axis in rows.regions.items()},
            {t: Region(axis, cols.owned[t]) for t, axis in rows.owned.items()},
        )


def tile_space(group: ConvGraph, tile: tuple[int, int]) -> TileSpace:
    """Regions of all activations of ``group`` when one tile is ``tile`` = (rows, columns) of its
    *anchor* (the last node).

    An axis with a single tile has step 0 everywhere: nothing moves, so any regions have a hull.
    Raises RegionError if the outputs do not share one tile space.
    """
    return TileSpace.of(axis_space(group, 0, tile[0]), axis_space(group, 1, tile[1]))


def axis_space(group: ConvGraph, axis: int, tile: int) -> AxisSpace:
    """``tile_space`` on one axis (0: rows, 1: columns), on which a tile is ``tile`` positions."""
    anchor = group.nodes[-1].name
    count = -(-group.shape(anchor)[1 + axis] // tile)
    regions: dict[str, Region1D] = {}
    owned: dict[str, Region1D] = {}

    def need(tensor: str, region: Region1D) -> None:
        known = regions.get(tensor)
        hull = region if known is None or known == region else known.hull(region)
        if hull is None:
            raise RegionError(f"consumers of {tensor} need tiles that move at different speeds")
        regions[tensor] = hull

    def need_operand(tensor: str, region: Region1D) -> None:
        shape = group.shape(tensor)
        if len(shape) == 4 and shape[1:3] != (1, 1):
            need(tensor, region)
        elif tensor in group.by_name:  # (N, 1, 1, C), perhaps for a larger image
            need(tensor, Region1D(0, 0, 1))

    for node in reversed(group.nodes):
        if node.name in group.outputs:
            known = regions.get(node.name)
            owned[node.name] = _owned(group, node.name, axis, tile, count, known)
            need(node.name, owned[node.name])
        if node.name not in regions:
            raise RegionError(f"{node.name} is neither read nor written by the group")
        region = regions[node.name]
        source = through_axis(node, axis, region)
        for tensor in node.inputs:
            need(tensor, source)
        for steps, where in ((node.prologue, source), (node.epilogue, region)):
            for step in steps:
                for tensor in step.tensors:
                    need_operand(tensor, where)
    return AxisSpace(count, regions, owned)


def _owned(
    group: ConvGraph, name: str, axis: int, tile: int, count: int, known: Region1D | None
) -> Region1D:
    """The part of output ``name`` that one tile writes, if ``known`` of it is read."""
    anchor, extent = group.nodes[-1].name, group.shape(name)[1 + axis]
    if count == 1:
        return Region1D(0, 0, extent)
    if known is not None:
        step = known.step
    elif extent == group.shape(anchor)[1 + axis]:
        step = tile
    else:
        raise RegionError(f"outputs {name} and {anchor} differ in size and share no consumer")
    if step * count < extent:
        raise RegionError(f"tiles cover {step * count} of {extent} positions of {name}")
    return Region1D(step, 0, step)
