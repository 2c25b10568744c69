"""Where the values of a group live: in tiles, in slices of a concat, or in staged copies.

The tile program follows these rules and the footprint counts by them, so there is one of each.
"""

from __future__ import annotations

import numpy as np

from optifx_tvm.analysis.products import is_product, padded_depth, weight_depth
from optifx_tvm.graph import ConvGraph, Node, Step

LOWEST = float(np.finfo(np.float32).min)
"""Padding value of max pooling."""

StageKey = tuple[str, tuple[Step, ...], float | None]
"""What readers that share a staged copy agree in: tensor, prologue, padding value (None: they do
not read outside the image)."""


def needs_padding(node: Node, group: ConvGraph) -> bool:
    """Does a valid output of ``node`` read positions outside its input image?"""
    if node.op in ("elementwise", "concat", "opaque"):
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


BANKS = 128
"""Bytes of one row of the banks of a GPU's shared memory."""


def pitch_rule(channels: int, itemsize: int) -> tuple[int, int]:
    """The pitch of the positions of a tile in shared memory, as (factor, offset) in elements: it is
    offset modulo factor.

    Every position, at least every row, starts at a whole vector; and so does the tile that comes
    next, for TVM packs them without gaps. The lanes of a warp read 16 bytes each of neighbouring
    positions, in float16 four lanes 64 bytes of one (schedules/product_half.py): such pieces of
    different positions fall into different banks.
    """
    vector = 16 // itemsize
    if channels < 2 * vector:
        return (vector, 0) if channels >= vector else (4, 0)
    if itemsize == 2:
        return BANKS // itemsize, BANKS // itemsize // 2
    return 2 * vector, vector


def pitch_of(channels: int, itemsize: int) -> int:
    """The least pitch by ``pitch_rule`` that holds ``channels``."""
    factor, offset = pitch_rule(channels, itemsize)
    return -(-(channels - offset) // factor) * factor + offset


class Placement:
    """Decisions about the tensors of one group."""

    def __init__(self, group: ConvGraph, products: bool = False) -> None:
        """``products``: dense convolutions are products of warp tiles where they can be
        (products.py), whose operands need whole pieces of 16 bytes."""
        self.group = group
        self.products = products
        self._order = {node.name: i for i, node in enumerate(group.nodes)}
        self._readers = {
            tensor: tuple(group.by_name[reader] for reader in readers)
            for tensor, readers in group.consumers.items()
        }
        self._fill = {
            node.name: (LOWEST if node.op == "max_pool2d" else 0.0)
            if needs_padding(node, group)
            else None
            for node in group.nodes
        }

    def readers(self, tensor: str) -> tuple[Node, ...]:
        """Nodes of the group that read ``tensor``."""
        return self._readers[tensor]

    def padding_value(self, node: Node) -> float | None:
        """What ``node`` reads outside its input image; None if it reads nothing there."""
        return self._fill[node.name]

    def tile_fill(self, tensor: str) -> float | None:
        """What tile ``tensor`` holds outside its image: what its first padding reader wants."""
        for reader in self._readers[tensor]:
            fill = self._fill[reader.name]
            if tensor in reader.inputs and not reader.prologue and fill is not None:
                return fill
        return None

    def is_staged(self, node: Node) -> bool:
        """Must ``node`` read its input through a copy (prologue, padding of its own; a product
        applies a prologue without operands to what it reads)?"""
        fill = self._fill[node.name]
        if self.products and is_product(node, self.group, self.group.shape(node.name)[3], 1):
            if padded_depth(node, self.group) > weight_depth(node, self.group):
                return True
            if fill is None and not any(step.tensors for step in node.prologue):
                return False
        if node.op == "concat" or not (node.prologue or fill is not None):
            return False
        source = node.inputs[0]
        in_group = source in self.group.by_name
        return bool(node.prologue) or not in_group or self.tile_fill(source) != fill

    def stage_key(self, node: Node) -> StageKey:
        """Staged readers with equal keys share one copy."""
        return node.inputs[0], node.prologue, self._fill[node.name]

    def is_gathered(self, node: Node) -> bool:
        """Is this concat only read through staged copies, so that it needs no buffer?"""
        return (
            node.op == "concat"
            and node.name not in self.group.outputs
            and not node.epilogue
            and all(
                self.is_staged(r) and node.name not in r.operands for r in self._readers[node.name]
            )
        )

    def concat_of(self, node: Node) -> Node | None:
        """The concat whose slice ``node`` can write in place, if any."""
        readers = self._readers[node.name]
        if len(readers) != 1 or node.name in self.group.outputs or node.op == "concat":
            return None
        (concat,) = readers
        whole = (
            concat.op == "concat"
            and concat.inputs.count(node.name) == 1
            and node.name not in concat.operands
            and not self.is_gathered(concat)
            # Its epilogue runs with the part: what that reads must have been computed by then.
            and all(self._order.get(t, -1) < self._order[node.name] for t in concat.operands)
        )
        return concat if whole else None

    def has_tile(self, node: Node) -> bool:
        """Is the result of ``node`` kept on chip in a buffer of its own?"""
        return (
            bool(self._readers[node.name])
            and not self.is_gathered(node)
            and self.concat_of(node) is None
        )

    def offset(self, concat: Node, index: int) -> int:
        """First channel of the index-th part of a concat."""
        return sum(self.group.shape(t)[3] for t in concat.inputs[:index])
