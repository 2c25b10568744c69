"""Dense convolutions as products of matrices: which can be, and of what size.

A product sums over *steps* of the reduction: of float32 four input channels of one tap, of float16
32 of one tap, or of one kernel row where there are at most four input channels (an image), each
padded to four. A transposed convolution whose windows do not overlap is a product too: its rows are
the input positions, its columns the output channels of every tap.
"""

from __future__ import annotations

from typing import NamedTuple

from optifx_tvm.graph import ConvGraph, Node

LANES = 16
"""Output channels in one packed block."""
MATRIX_BLOCK = (8, 32)
"""Output and input channels in one block of a matrix-packed weight."""
NARROW = 4
"""Most input channels of a narrow convolution, and what they are padded to."""
HALF_STEP = 32
"""Input channels of one step of a float16 product: two mma.m16n8k16."""
FLOAT_STEP = 4
"""Input channels of one step of a float32 product: 16 bytes."""


class ProductShape(NamedTuple):
    """Size of the product of one tile. (A tuple: a search looks up hundreds of thousands.)"""

    rows: int
    """Positions."""
    columns: int
    """Output channels; transposed convolution: of every tap, in whole packed blocks."""
    steps: int
    blocks: int
    """Steps of one tap, of a narrow convolution of one kernel row."""
    depth: int
    """Input channels of a step."""
    half: bool
    """float16 on tensor cores, else float32."""
    streamed: bool
    """Is the input read from global memory (else from shared memory)?"""


def product_shape(
    node: Node, group: ConvGraph, extents: tuple[int, int], channels: int, streamed: bool
) -> ProductShape:
    """The product that computes ``extents`` (rows, columns) positions and ``channels`` output
    channels of a convolution."""
    half = is_matrix_packed(node, group)
    step = HALF_STEP if half else FLOAT_STEP
    kh, kw = node.window.kernel
    depth = padded_depth(node, group)
    tall, wide = (kh, kw) if is_phased(node) else (1, 1)
    taps = kh * kw // (tall * wide)
    if is_narrow(node, group):
        taps, depth = kh, kw * NARROW
    blocks = -(-depth // step)
    rows = -(-extents[0] // tall) * -(-extents[1] // wide)
    if tall * wide > 1:
        lanes = lanes_of(node, group)
        channels = tall * wide * -(-channels // lanes) * lanes
    return ProductShape(rows, channels, taps * blocks, blocks, step, half, streamed)


def is_matrix_packed(node: Node, group: ConvGraph) -> bool:
    """Is the weight of a convolution packed for tensor cores?"""
    assert node.weight is not None, node
    spec = group.tensors[node.weight]
    dense = node.op == "conv2d" or is_phased(node)
    return dense and node.groups == 1 and spec.dtype == "float16"


def is_phased(node: Node) -> bool:
    """Is this a transposed convolution whose windows do not overlap, so that every output position
    reads one input position through one tap?"""
    w = node.window
    plain = w.kernel == w.strides and w.padding == (0, 0, 0, 0) and w.dilation == (1, 1)
    return node.op == "conv2d_transpose" and plain


def lanes_of(node: Node, group: ConvGraph) -> int:
    """Output channels in one block of the packed weight of a convolution."""
    return MATRIX_BLOCK[0] if is_matrix_packed(node, group) else LANES


def is_narrow(node: Node, group: ConvGraph) -> bool:
    """Is the reduction of a matrix-packed convolution over whole kernel rows?"""
    narrow = weight_depth(node, group) <= NARROW and node.window.dilation[1] == 1
    return node.op == "conv2d" and narrow and is_matrix_packed(node, group)


def is_product(node: Node, group: ConvGraph, channels: int, slices: int) -> bool:
    """Can a convolution be computed as a product of warp tiles (schedules/product.py)?

    ``channels`` are the output channels in each of ``slices``; a slice must start at a whole piece
    of 16 bytes.
    """
    if node.weight is None or node.groups != 1:
        return False
    granule = MATRIX_BLOCK[0] if is_matrix_packed(node, group) else 4
    if node.op == "conv2d_transpose":
        if not is_phased(node):
            return False
        granule = lanes_of(node, group)
    return slices == 1 or channels % granule == 0


def padded_depth(node: Node, group: ConvGraph) -> int:
    """Input channels of a product as its operand must hold them: whole pieces of 16 bytes, of
    narrow float16 convolutions 8."""
    depth = weight_depth(node, group)
    if is_narrow(node, group):
        return NARROW
    granule = 8 if is_matrix_packed(node, group) else 4
    return -(-depth // granule) * granule


def weight_depth(node: Node, group: ConvGraph) -> int:
    """Input channels that one output channel of a convolution reads."""
    assert node.weight is not None, node
    shape = group.shape(node.weight)
    return shape[3] if node.op == "conv2d" else shape[0] // node.groups
