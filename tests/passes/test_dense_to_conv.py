"""DenseToConv: matmuls on flattened images."""

from __future__ import annotations

import pytest

from optifx_tvm.passes import DenseToConv
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    calls,
    const,
    module,
    nn,
    op,
    ops,
)


def image(emit, x, layout):
    kernel = "OIHW" if layout == "NCHW" else "OHWI"
    shape = (4, 3, 3, 3)
    return emit(nn.conv2d(x, const(*shape), data_layout=layout, kernel_layout=kernel))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_flattened_image(layout):
    """The constant follows the order of the flatten: (C, H, W) or (H, W, C)."""

    def build(emit, x):
        flat = emit(op.reshape(image(emit, x, layout), (2, 4 * 3 * 5)))
        return op.add(emit(op.matmul(flat, const(60, 7))), const(7))

    before = module(build, (2, 3, 5, 7) if layout == "NCHW" else (2, 5, 7, 3))
    after = apply(DenseToConv(), before)
    assert ops(after) == {"nn.conv2d": 2, "add": 1, "reshape": 1}
    assert list(calls(after, "nn.conv2d")[1].attrs.padding) == [0, 0, 0, 0]
    assert_same_numbers(after, before)


def test_layers_in_a_row():
    def build(emit, x):
        pooled = emit(nn.avg_pool2d(image(emit, x, "NCHW"), (3, 5)))
        y = emit(op.reshape(pooled, (2, 4)))
        y = emit(nn.relu(emit(op.add(emit(op.matmul(y, const(4, 9))), const(1, 9)))))
        y = emit(op.multiply(y, emit(op.sigmoid(y))))
        return emit(op.matmul(y, const(9, 5)))

    before = module(build, (2, 3, 5, 7))
    after = apply(DenseToConv(), before)
    assert "matmul" not in ops(after)
    assert ops(after)["reshape"] == 1
    assert_same_numbers(after, before)


@pytest.mark.parametrize("case", ["matrix", "variable weight", "batched flatten", "layout unknown"])
def test_left_alone(case):
    def build(emit, x, *rest):
        if case == "matrix":
            return op.matmul(x, const(6, 5))
        flat = emit(op.reshape(image(emit, x, "NCHW"), (2, 60)))
        if case == "variable weight":
            return op.matmul(flat, rest[0])
        return op.matmul(emit(op.reshape(flat, (4, 30))), const(30, 5))

    shapes = [(2, 6)] if case == "matrix" else [(2, 3, 5, 7), (60, 5)]
    if case == "layout unknown":
        before = module(
            lambda emit, x: op.matmul(emit(op.reshape(x, (2, 105))), const(105, 4)), (2, 3, 5, 7)
        )
    else:
        before = module(build, *shapes)
    assert_left_alone(DenseToConv(), before)
