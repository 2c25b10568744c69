"""What an output position reads through the window of a convolution or pooling."""

from __future__ import annotations

from tvm import tirx

from optifx_tvm.analysis.region import Region1D
from optifx_tvm.graph import Node
from optifx_tvm.schedules.positions import Expr, Pos, all_of, i64


def taps(node: Node, axis: int) -> int:
    """Extent of the reduction over the window on one axis."""
    k, s = node.window.kernel[axis], node.window.strides[axis]
    phased = node.op == "conv2d_transpose" and node.window.dilation[axis] == 1
    return -(-k // s) if phased else k


def tap_position(
    node: Node,
    axis: int,
    pos: Pos,
    box: Region1D,
    region: Region1D,
    origin: Region1D,
    tap: Expr,
) -> tuple[Pos, Expr, list[Expr]]:
    """For output position ``pos`` of ``box`` and reduction index ``tap``: the position in the
    input relative to ``origin``, the index into the kernel, and when the tap counts."""
    w = node.window
    k, s, d, p = w.kernel[axis], w.strides[axis], w.dilation[axis], w.padding[axis]
    count = taps(node, axis)
    index = Pos(tap, 0, count - 1)
    if node.op != "conv2d_transpose":
        start = (pos + (box.base - region.base)) * s
        return (start.plus(index * d) if count > 1 else start), tap, []
    # Output o reads input (o + p - y * d) / s for the kernel rows y where that is whole.
    shifted = pos + (box.base + p)
    if d == 1:
        # Without dilation these are y = (o + p) mod s + s * j: no tap is tried in vain.
        source = (shifted // s).plus(index * -1) + -origin.base
        # truncmod of what is not negative: TVM's FlattenBuffer mixes up the offsets of two
        # floormods in one index (IterMapSimplify), and reads the wrong tap.
        phase = tirx.truncmod((pos + (box.base + p) % s).expr, i64(s))
        kernel = phase + tap * s if s > 1 else tap
        return source, kernel, [kernel < k] if k % s else []
    numerator = shifted.plus(index * -d)
    whole = [tirx.floormod(numerator.expr, s) == 0] if s > 1 else []
    return numerator // s + -origin.base, tap, whole


def pool_divisor(node: Node, position: tuple[Pos, Pos], size: tuple[int, ...]) -> Expr:
    """How many positions average pooling divides by at ``position`` of its result; ``size`` is its
    input's height and width."""
    w = node.window
    # Counted in integers and cast once: TVM's code generator can fail on a variable bound to a
    # product of casts (its IntSetAnalyzer makes an integer constant of the float's type).
    divisor: Expr = i64(1)
    for i, pos in enumerate(position):
        before, after = w.padding[i], w.padding[2 + i]
        low, high = (-before, size[i] + after) if w.count_include_pad else (0, size[i])
        start = pos * w.strides[i] + (-before)
        tried = [start + k * w.dilation[i] for k in range(w.kernel[i])]
        if tried[0].low >= low and tried[-1].high < high:
            count: Expr = i64(w.kernel[i])
        elif w.dilation[i] == 1:
            first = tirx.max(start.expr, i64(low))
            last = tirx.min(start.expr + w.kernel[i], i64(high))
            count = tirx.max(last - first, i64(1))
        else:
            inside = [all_of([t.expr >= low, t.expr < high]) for t in tried]
            ones = [tirx.Select(c, i64(1), i64(0)) for c in inside]
            count = tirx.max(sum(ones[1:], ones[0]), i64(1))
        divisor = divisor * count
    return divisor.astype("float32")
