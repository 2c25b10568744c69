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


def _through_axis(op: str, region: Region1D, k: int, s: int, d: int, p: int, name: str) -> Region1D:
    if op == "conv2d_transpose":
        if region.step % s:
            raise RegionError(
                f"tile step {region.step} of {name} is not a multiple of its up-sampling {s}"
            )
        first = -((-(region.base + p - (k - 1) * d)) // s)
        last = (region.end - 1 + p) // s
        return Region1D(region.step // s, first, max(last - first + 1, 1))
    return Region1D(region.step * s, region.base * s - p, (region.extent - 1) * s + (k - 1) * d + 1)


def input_region(node: Node, region: Region) -> Region:
    """The region of ``node.inputs`` that ``region`` of its output depends on.

    Raises RegionError if a transposed convolution's tiles do not start at whole input positions.
    """
    if node.op in ("elementwise", "concat", "opaque"):
        return region
    w = node.window
    rows, cols = (
        _through_axis(
            node.op, axis, w.kernel[i], w.strides[i], w.dilation[i], w.padding[i], node.name
        )
        for i, axis in enumerate((region.rows, region.cols))
    )
    return Region(rows, cols)


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


def tile_space(group: ConvGraph, tile: tuple[int, int]) -> TileSpace:
    """Regions of all activations of ``group`` when one tile is ``tile`` = (rows, columns) of its
    *anchor* (the last node).

    An axis with a single tile has step 0 everywhere: nothing moves, so any regions have a hull.
    Raises RegionError if the outputs do not share one tile space.
    """
    anchor = group.nodes[-1].name
    size = group.shape(anchor)[1:3]
    count = (-(-size[0] // tile[0]), -(-size[1] // tile[1]))
    regions: dict[str, Region] = {}
    owned: dict[str, Region] = {}

    def need(tensor: str, region: Region) -> None:
        known = regions.get(tensor)
        hull = region if known is None or known == region else known.hull(region)
        if hull is None:
            raise RegionError(f"consumers of {tensor} need tiles that move at different speeds")
        regions[tensor] = hull

    def need_operand(tensor: str, region: Region) -> None:
        shape = group.shape(tensor)
        if len(shape) == 4 and shape[1:3] != (1, 1):
            need(tensor, region)
        elif tensor in group.by_name:  # (N, 1, 1, C), perhaps for a larger image
            need(tensor, Region(Region1D(0, 0, 1), Region1D(0, 0, 1)))

    for node in reversed(group.nodes):
        if node.name in group.outputs:
            owned[node.name] = _owned(group, node.name, anchor, tile, count, regions)
            need(node.name, owned[node.name])
        if node.name not in regions:
            raise RegionError(f"{node.name} is neither read nor written by the group")
        region = regions[node.name]
        source = input_region(node, region)
        for tensor in node.inputs:
            need(tensor, source)
        for steps, where in ((node.prologue, source), (node.epilogue, region)):
            for tensor in (t for step in steps for t in step.tensors):
                need_operand(tensor, where)
    return TileSpace(count, regions, owned)


def _owned(
    group: ConvGraph,
    name: str,
    anchor: str,
    tile: tuple[int, int],
    count: tuple[int, int],
    regions: Mapping[str, Region],
) -> Region:
    """The part of output ``name`` that one tile writes."""
    extents = group.shape(name)[1:3]
    known = regions.get(name)
    axes = []
    for i in range(2):
        if count[i] == 1:
            axes.append(Region1D(0, 0, extents[i]))
            continue
        if known is not None:
            step = (known.rows if i == 0 else known.cols).step
        elif extents[i] == group.shape(anchor)[1 + i]:
            step = tile[i]
        else:
            raise RegionError(f"outputs {name} and {anchor} differ in size and share no consumer")
        if step * count[i] < extents[i]:
            raise RegionError(f"tiles cover {step * count[i]} of {extents[i]} positions of {name}")
        axes.append(Region1D(step, 0, step))
    return Region(axes[0], axes[1])
