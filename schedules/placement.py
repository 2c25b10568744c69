"""Where the values of a group live: in tiles, in slices of a concat, or in staged copies."""

from __future__ import annotations

import numpy as np

from optifx_tvm.graph import ConvGraph, Node

LOWEST = float(np.finfo(np.float32).min)
"""Padding value of max pooling."""


def needs_padding(node: Node, group: ConvGraph) -> bool:
    """Does a valid output of ``node`` read positions outside its input image?"""
    if node.op in ("elementwise", "concat"):
        return False
    w = node.window
    source, result = group.shape(node.inputs[0]), group.shape(node.name)
    for i in range(2):
        reach = (w.kernel[i] - 1) * w.dilation[i]
        if node.op == "conv2d_transpose":
            first = -((reach - w.padding[i]) // w.strides[i])
            last = (result[1 + i] - 1 + w.padding[i]) // w.strides[i]
        else:
            first = -w.padding[i]
            last = (result[1 + i] - 1) * w.strides[i] - w.padding[i] + reach
        if first < 0 or last >= source[1 + i]:
            return True
    return False


def fill_of(node: Node) -> float:
    return LOWEST if node.op == "max_pool2d" else 0.0


class Placement:
    """Decisions about the tensors of one group."""

    def __init__(self, group: ConvGraph) -> None:
        self.group = group
        self.order = {node.name: i for i, node in enumerate(group.nodes)}

    def readers(self, tensor: str) -> list[Node]:
        """Nodes of the group that read ``tensor``."""
        return [self.group.by_name[c] for c in self.group.consumers[tensor]]

    def tile_fill(self, tensor: str) -> float | None:
        """What tile ``tensor`` holds outside its image: what its first padding reader wants."""
        for reader in self.readers(tensor):
            if (
                tensor in reader.inputs
                and not reader.prologue
                and needs_padding(reader, self.group)
            ):
                return fill_of(reader)
        return None

    def is_staged(self, node: Node) -> bool:
        """Must ``node`` read its input through a copy (prologue, padding of its own)?"""
        if node.op == "concat" or not (node.prologue or needs_padding(node, self.group)):
            return False
        source = node.inputs[0]
        in_group = source in self.group.by_name
        return bool(node.prologue) or not in_group or self.tile_fill(source) != fill_of(node)

    def is_gathered(self, node: Node) -> bool:
        """Is this concat only read through staged copies, so that it needs no buffer?"""
        return (
            node.op == "concat"
            and node.name not in self.group.outputs
            and not node.epilogue
            and all(
                self.is_staged(r) and node.name not in r.operands for r in self.readers(node.name)
            )
        )

    def concat_of(self, node: Node) -> Node | None:
        """The concat whose slice ``node`` can write in place, if any."""
        readers = self.readers(node.name)
        if len(readers) != 1 or node.name in self.group.outputs or node.op == "concat":
            return None
        (concat,) = readers
        whole = (
            concat.op == "concat"
            and concat.inputs.count(node.name) == 1
            and node.name not in concat.operands
            and not self.is_gathered(concat)
            # Its epilogue runs with the part: what that reads must have been computed by then.
            and all(self.order.get(t, -1) < self.order[node.name] for t in concat.operands)
        )
        return concat if whole else None

    def offset(self, concat: Node, index: int) -> int:
        """First channel of the index-th part of a concat."""
        return sum(self.group.shape(t)[3] for t in concat.inputs[:index])
