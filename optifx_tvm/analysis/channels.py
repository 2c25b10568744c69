"""Channel slices: which channels of every activation one block of a group computes or reads.

A tile may be cut into ``slices`` blocks, each with an equal part of every output's channels.
Backwards: depthwise convolution, pooling and element-wise operators need just the same slice of
what they read; any other convolution needs all channels; a concat that is an output passes to
every part that part's own equal slice (its slices are then interleaved in the joined tensor); a
concat that is only read inside is gathered whole. Wanted as a slice by one reader and whole by
another means whole: every slice then recomputes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optifx_tvm.graph import ConvGraph, Node

GRANULE = 8
"""Channels of a slice are a multiple of this (16-byte fp16 access)."""


@dataclass(frozen=True)
class ChannelRange:
    """Channels of one activation that one block computes (nodes) or reads (inputs)."""

    full: bool
    """All channels; else slice ``s`` is ``[s * extent, (s + 1) * extent)``."""
    extent: int


class ChannelError(ValueError):
    """The group's channels can't be cut like this; the message says why."""


def is_depthwise(group: ConvGraph, node: Node) -> bool:
    """Is it a convolution whose output channel c depends on input channel c only?"""
    channels = group.shape(node.inputs[0])[-1]
    return (
        node.op == "conv2d"
        and node.groups == channels == group.shape(node.name)[-1]
        and channels > 1
    )


def passes_slice(group: ConvGraph, node: Node) -> bool:
    """Does a slice of the node's output need just the same slice of its inputs?"""
    return node.op in ("max_pool2d", "avg_pool2d", "elementwise") or is_depthwise(group, node)


def channel_plan(group: ConvGraph, slices: int) -> Mapping[str, ChannelRange]:
    """Channels of every node and input of ``group`` for one of ``slices`` equal slices.

    With one slice everything is full. Raises ChannelError if ``slices`` is not possible.
    """
    whole = {t: ChannelRange(True, group.shape(t)[-1]) for t in (*group.inputs, *group.by_name)}
    if slices == 1:
        return whole
    wants = _wants(group)
    for part in _written(group):
        if part in group.by_name and "full" in wants[part]:
            raise ChannelError(f"{part} is written and read whole inside: its slices overlap")
        channels = group.shape(part)[-1]
        if channels % (slices * GRANULE):
            raise ChannelError(
                f"{channels} channels of {part} are not {slices} slices of whole {GRANULE}s"
            )
    return {
        tensor: everything
        if "full" in wants[tensor]
        else ChannelRange(False, everything.extent // slices)
        for tensor, everything in whole.items()
    }


def _wants(group: ConvGraph) -> Mapping[str, set[str]]:
    """Activation -> how it is wanted: "slice", "full" or both."""
    wants: dict[str, set[str]] = {t: set() for t in (*group.inputs, *group.by_name)}
    for name in group.outputs:
        wants[name].add("slice")
    for node in reversed(group.nodes):
        mine = wants[node.name]
        joins = node.op == "concat"
        for reader in group.consumers[node.name]:
            # The slices of an output concat are interleaved: nobody can read them as a slice.
            if joins and reader in group.by_name:
                mine.add("full")
        passed = {"slice"} if mine == {"slice"} else {"full"}
        for tensor in node.inputs:
            if tensor in wants:
                if passes_slice(group, node):
                    wants[tensor] |= passed
                elif joins:
                    wants[tensor] |= passed if node.name in group.outputs else {"full"}
                else:
                    wants[tensor].add("full")
        for tensor in (t for step in node.prologue for t in step.tensors):
            if tensor in wants:
                wants[tensor] |= passed if passes_slice(group, node) else {"full"}
        for tensor in (t for step in node.epilogue for t in step.tensors):
            if tensor in wants:
                wants[tensor] |= passed if not joins else {"full"}
    return wants


def legal_slices(group: ConvGraph) -> tuple[int, ...]:
    """The numbers of slices that channel_plan accepts, ascending, 1 first."""
    wants, written = _wants(group), _written(group)
    if any(part in group.by_name and "full" in wants[part] for part in written):
        return (1,)
    widths = [group.shape(part)[-1] for part in written]
    if any(width % GRANULE for width in widths):
        return (1,)
    common = math.gcd(*widths) // GRANULE
    return tuple(n for n in range(1, common + 1) if common % n == 0)


def _written(group: ConvGraph) -> tuple[str, ...]:
    """What the blocks write slice by slice: outputs, and the parts of those that are a concat
    (parts that come from outside are copied, so it does not matter who else reads them)."""
    names: list[str] = []
    for name in group.outputs:
        node = group.by_name[name]
        names.append(name)
        if node.op == "concat":
            names += node.inputs
    return tuple(dict.fromkeys(names))
