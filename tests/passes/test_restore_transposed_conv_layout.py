"""RestoreTransposedConvLayout."""

from __future__ import annotations

import pytest
import tvm

from optifx_tvm.passes import ConvertToNHWC, RestoreTransposedConvLayout
from tests.support.rewriting import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    calls,
    const,
    module,
    nn,
    ops,
)

LAYOUTS = {"data_layout": "NHWC", "kernel_layout": "IHWO"}


@pytest.mark.parametrize("groups", [1, 2])
def test_restored(groups):
    def build(emit, x):
        weight = const(4, 3, 3, 2)
        return nn.conv2d_transpose(x, weight, strides=(2, 3), padding=(1, 0, 2, 1), groups=groups)

    before = module(build, (2, 4, 5, 6))
    after = apply(RestoreTransposedConvLayout(), ConvertToNHWC()(before))
    (call,) = calls(after, "nn.conv2d_transpose")
    assert (call.attrs.data_layout, call.attrs.kernel_layout) == ("NCHW", "IOHW")
    assert_same_numbers(after, before)


def test_variable_weight():
    before = module(
        lambda emit, x, w: nn.conv2d_transpose(x, w, **LAYOUTS), (1, 5, 6, 4), (4, 3, 2, 3)
    )
    assert ops(apply(RestoreTransposedConvLayout(), before))["permute_dims"] == 3


def test_nchw_is_left_alone():
    before = module(lambda emit, x: nn.conv2d_transpose(x, const(4, 3, 3, 2)), (1, 4, 5, 6))
    assert_left_alone(RestoreTransposedConvLayout(), before)


def test_tvm_needs_it():
    """When TVM lowers NHWC by itself, this pass can go."""
    before = module(
        lambda emit, x: nn.conv2d_transpose(x, const(4, 3, 2, 3), **LAYOUTS), (1, 5, 6, 4)
    )
    legalized = tvm.relax.transform.LegalizeOps()(before)
    assert "nn.conv2d_transpose" in ops(legalized)
