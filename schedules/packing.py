"""Weights as the tile programs read them: (ceil(O / 16), kh, kw, I / groups, 16).

One block holds 16 output channels for every tap and input channel, so that a register tile streams
it front to back; the channels that fill up the last block are zero.
"""

from __future__ import annotations

import numpy as np

from optifx_tvm.graph import ConvGraph, Node

LANES = 16
"""Output channels in one packed block."""


def packed_weight_shape(node: Node, group: ConvGraph) -> tuple[int, ...]:
    """Shape of the packed weight of a convolution node."""
    assert node.weight is not None, node
    shape = group.shape(node.weight)
    depth = shape[3] if node.op == "conv2d" else shape[0] // node.groups
    return (-(-group.shape(node.name)[3] // LANES), *node.window.kernel, depth, LANES)


def packed_weight(weight: np.ndarray, node: Node) -> np.ndarray:
    """Pack OHWI (conv2d) or IHWO (conv2d_transpose) weights."""
    if node.op == "conv2d_transpose":
        depth, kh, kw, per_group = weight.shape
        weight = weight.reshape(node.groups, depth // node.groups, kh, kw, per_group)
        weight = weight.transpose(0, 4, 2, 3, 1).reshape(-1, kh, kw, depth // node.groups)
    channels, kh, kw, depth = weight.shape
    blocks = -(-channels // LANES)
    padded = np.zeros((blocks * LANES, kh, kw, depth), weight.dtype)
    padded[:channels] = weight
    packed = padded.reshape(blocks, LANES, kh, kw, depth).transpose(0, 2, 3, 4, 1)
    return np.ascontiguousarray(packed)
