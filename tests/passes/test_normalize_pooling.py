"""NormalizePooling: global and adaptive pooling as windows."""

from __future__ import annotations

import numpy as np
import pytest

from optifx_tvm.passes import NormalizePooling
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    calls,
    module,
    nn,
    op,
    ops,
    run,
)

NCHW = (2, 3, 6, 4)


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [[2, 3], [-1, -2], [1, 2]])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_global(reduce, axes, keepdims):
    before = module(lambda emit, x: getattr(op, reduce)(x, axes, keepdims), NCHW)
    after = apply(NormalizePooling(), before)
    pool = "nn.avg_pool2d" if reduce == "mean" else "nn.max_pool2d"
    assert ops(after) == {pool: 1} if keepdims else {pool: 1, "reshape": 1}
    (call,) = calls(after, pool)
    assert call.attrs.layout == ("NHWC" if axes == [1, 2] else "NCHW")
    assert list(call.attrs.padding) == [0, 0, 0, 0]
    assert_same_numbers(after, before)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_adaptive(size, layout):
    shape = NCHW if layout == "NCHW" else (2, 6, 4, 3)
    before = module(lambda emit, x: nn.adaptive_avg_pool2d(x, size, layout), shape)
    after = apply(NormalizePooling(), before)
    assert ops(after) == {"nn.avg_pool2d": 1}
    assert_same_numbers(after, before)


@pytest.mark.parametrize("build", [op.mean, nn.adaptive_avg_pool2d])
def test_a_large_image_is_averaged_by_rows(build):
    """One sum of 12544 numbers lost two digits more than onnxruntime."""
    arguments = ([2, 3], True) if build is op.mean else ((1, 1),)
    before = module(lambda emit, x: build(x, *arguments), (1, 3, 112, 112))
    after = apply(NormalizePooling(), before)
    assert ops(after) == {"nn.avg_pool2d": 2}
    data = np.random.default_rng(0).uniform(0, 1, (1, 3, 112, 112)).astype("float32")
    (mean,) = run(after, data)
    exact = data.astype("float64").mean((2, 3), keepdims=True)
    assert np.abs(mean / exact - 1).max() < 5e-7


def test_adaptive_to_its_own_size_disappears():
    before = module(lambda emit, x: nn.relu(emit(nn.adaptive_avg_pool2d(x, (6, 4)))), NCHW)
    assert ops(apply(NormalizePooling(), before)) == {"nn.relu": 1}


def test_left_alone():
    def build(emit, x):
        uneven = emit(nn.adaptive_avg_pool2d(x, (4, 3)))
        channels = emit(op.mean(x, [1], True))
        total = emit(op.sum(x, [2, 3]))
        return [uneven, channels, total, emit(nn.avg_pool2d(x, (2, 2)))]

    assert_left_alone(NormalizePooling(), module(build, NCHW))
    assert_left_alone(
        NormalizePooling(), module(lambda emit, x: op.mean(x, [2, 3]), (2, 3, 4, 5, 6))
    )
