"""Weights as the tile programs read them.

    (ceil(O / 16), kh, kw, I / groups, 16)            in general
    (ceil(O / 8), kh, kw, ceil(I / 32), 8, 32)        float16 dense convolutions
    (ceil(O / 8), kh, 1, ceil(kw * 4 / 32), 8, 32)    the same with at most 4 input channels

In the first, one block holds 16 output channels for every tap and input channel, so that a register
tile streams it front to back. In the others, the 32 lanes of a warp find their operands of tensor
core instructions (product_half.py) in one piece of 512 bytes; of an image's 3 channels those of a
whole kernel row follow each other, 4 for every tap. What fills up the last blocks is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from optifx_tvm.analysis.products import (
    LANES,
    MATRIX_BLOCK,
    NARROW,
    is_matrix_packed,
    is_narrow,
    weight_depth,
)
from optifx_tvm.graph import ConvGraph, Node


def packed_weight_shape(node: Node, group: ConvGraph) -> tuple[int, ...]:
    """Shape of the packed weight of a convolution node."""
    channels, depth = group.shape(node.name)[3], weight_depth(node, group)
    if is_matrix_packed(node, group):
        outer, inner = MATRIX_BLOCK
        kh, kw = node.window.kernel
        if is_narrow(node, group):
            kw, depth = 1, kw * NARROW
        return (-(-channels // outer), kh, kw, -(-depth // inner), outer, inner)
    return (-(-channels // LANES), *node.window.kernel, depth, LANES)


def packed_index(node: Node, group: ConvGraph, channel: Any, tap: list[Any], k: Any) -> list[Any]:
    """Index into the packed weight of (output channel, kernel row and column, input channel)."""
    if is_matrix_packed(node, group):
        outer, inner = MATRIX_BLOCK
        if is_narrow(node, group):
            tap, k = [tap[0], 0], tap[1] * NARROW + k
        blocks = tirx.floordiv(channel, outer), tirx.floordiv(k, inner)
        within = tirx.floormod(channel, outer), tirx.floormod(k, inner)
        return [blocks[0], *tap, blocks[1], *within]
    return [tirx.floordiv(channel, LANES), *tap, k, tirx.floormod(channel, LANES)]


def packed_weight(weight: np.ndarray, node: Node, group: ConvGraph) -> np.ndarray:
    """Pack OHWI (conv2d) or IHWO (conv2d_transpose) weights."""
    if node.op == "conv2d_transpose":
        depth, kh, kw, per_group = weight.shape
        weight = weight.reshape(node.groups, depth // node.groups, kh, kw, per_group)
        weight = weight.transpose(0, 4, 2, 3, 1).reshape(-1, kh, kw, depth // node.groups)
    channels, kh, kw, depth = weight.shape
    shape = packed_weight_shape(node, group)
    if is_matrix_packed(node, group):
        outer, inner = MATRIX_BLOCK
        if is_narrow(node, group):
            rows = np.zeros((channels, kh, kw, NARROW), weight.dtype)
            rows[..., :depth] = weight
            weight, kw, depth = rows.reshape(channels, kh, 1, -1), 1, kw * NARROW
        padded = np.zeros((shape[0] * outer, kh, kw, shape[3] * inner), weight.dtype)
        padded[:channels, :, :, :depth] = weight
        packed = padded.reshape(shape[0], outer, kh, kw, shape[3], inner)
        return np.ascontiguousarray(packed.transpose(0, 2, 3, 4, 1, 5))
    padded = np.zeros((shape[0] * LANES, kh, kw, depth), weight.dtype)
    padded[:channels] = weight
    packed = padded.reshape(shape[0], LANES, kh, kw, depth).transpose(0, 2, 3, 4, 1)
    return np.ascontiguousarray(packed)
