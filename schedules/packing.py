"""Weights as the tile programs read them.

    (ceil(O / 16), kh, kw, I / groups, 16)        in general
    (ceil(O / 8), kh, kw, ceil(I / 32), 8, 32)    float16, dense, I a multiple of 8

In the first, one block holds 16 output channels for every tap and input channel, so that a register
tile streams it front to back. In the second, the 32 lanes of a warp find their operands of tensor
core instructions (matrix.py) in one piece of 512 bytes. What fills up the last blocks is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from optifx_tvm.graph import ConvGraph, Node

LANES = 16
"""Output channels in one packed block."""
MATRIX_BLOCK = (8, 32)
"""Output and input channels in one block of a matrix-packed weight."""
MATRIX_GRANULE = 8
"""Input channels of a matrix-packed weight are a multiple of this: 16 bytes of an activation."""


def is_matrix_packed(node: Node, group: ConvGraph) -> bool:
    """Is the weight of a convolution packed for tensor cores?"""
    assert node.weight is not None, node
    spec = group.tensors[node.weight]
    dense = node.op == "conv2d" and node.groups == 1
    return dense and spec.dtype == "float16" and spec.shape[3] % MATRIX_GRANULE == 0


def weight_depth(node: Node, group: ConvGraph) -> int:
    """Input channels that one output channel of a convolution reads."""
    assert node.weight is not None, node
    shape = group.shape(node.weight)
    return shape[3] if node.op == "conv2d" else shape[0] // node.groups


def packed_weight_shape(node: Node, group: ConvGraph) -> tuple[int, ...]:
    """Shape of the packed weight of a convolution node."""
    channels, depth = group.shape(node.name)[3], weight_depth(node, group)
    if is_matrix_packed(node, group):
        outer, inner = MATRIX_BLOCK
        return (-(-channels // outer), *node.window.kernel, -(-depth // inner), outer, inner)
    return (-(-channels // LANES), *node.window.kernel, depth, LANES)


def packed_index(node: Node, group: ConvGraph, channel: Any, tap: list[Any], k: Any) -> list[Any]:
    """Index into the packed weight of (output channel, kernel row and column, input channel)."""
    if is_matrix_packed(node, group):
        outer, inner = MATRIX_BLOCK
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
        padded = np.zeros((shape[0] * outer, kh, kw, shape[3] * inner), weight.dtype)
        padded[:channels, :, :, :depth] = weight
        packed = padded.reshape(shape[0], outer, kh, kw, shape[3], inner)
        return np.ascontiguousarray(packed.transpose(0, 2, 3, 4, 1, 5))
    padded = np.zeros((shape[0] * LANES, kh, kw, depth), weight.dtype)
    padded[:channels] = weight
    packed = padded.reshape(shape[0], LANES, kh, kw, depth).transpose(0, 2, 3, 4, 1)
    return np.ascontiguousarray(packed)
