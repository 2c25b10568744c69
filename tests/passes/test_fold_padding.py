"""FoldPadding."""

from __future__ import annotations

import pytest

from optifx_tvm.passes import FoldPadding
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    calls,
    const,
    module,
    nn,
)

IMAGE = (1, 3, 7, 6)
WIDTHS = [0, 0, 0, 0, 1, 2, 0, 3]


def test_before_conv():
    def build(emit, x):
        return nn.conv2d(
            emit(nn.pad(x, WIDTHS)), const(4, 3, 3, 3), padding=(1, 0, 0, 2), strides=2
        )

    before = module(build, IMAGE)
    after = apply(FoldPadding(), before)
    (conv,) = calls(after)
    assert list(conv.attrs.padding) == [2, 0, 2, 5]
    assert_same_numbers(after, before)


def test_before_nhwc_conv():
    def build(emit, x):
        padded = emit(nn.pad(x, [0, 0, 1, 2, 0, 3, 0, 0]))
        return nn.conv2d(padded, const(4, 3, 3, 3), data_layout="NHWC", kernel_layout="OHWI")

    before = module(build, (1, 7, 6, 3))
    after = apply(FoldPadding(), before)
    assert len(calls(after)) == 1
    assert_same_numbers(after, before)


def test_before_average_pooling():
    """The padded zeros were counted as data, and still are."""
    before = module(lambda emit, x: nn.avg_pool2d(emit(nn.pad(x, WIDTHS)), (3, 2), 2), IMAGE)
    after = apply(FoldPadding(), before)
    (pool,) = calls(after)
    assert pool.attrs.count_include_pad
    assert_same_numbers(after, before)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: nn.max_pool2d(x, (3, 3)),
        lambda x: nn.avg_pool2d(x, (3, 3), padding=1),
        lambda x: nn.conv2d_transpose(x, const(3, 4, 3, 3)),
    ],
    ids=["max pooling", "average pooling with padding of its own", "transposed convolution"],
)
def test_readers_that_keep_the_pad(use):
    assert_left_alone(FoldPadding(), module(lambda emit, x: use(emit(nn.pad(x, WIDTHS))), IMAGE))


@pytest.mark.parametrize(
    "pad",
    [
        lambda x: nn.pad(x, WIDTHS, "constant", 1.0),
        lambda x: nn.pad(x, WIDTHS, "reflect"),
        lambda x: nn.pad(x, [0, 0, 0, 1, 0, 0, 0, 0]),
    ],
    ids=["of ones", "by reflection", "of channels"],
)
def test_pads_that_stay(pad):
    channels = int(module(lambda emit, x: pad(x), IMAGE)["main"].ret_ty.shape[1])
    before = module(lambda emit, x: nn.conv2d(emit(pad(x)), const(4, channels, 3, 3)), IMAGE)
    assert_left_alone(FoldPadding(), before)
