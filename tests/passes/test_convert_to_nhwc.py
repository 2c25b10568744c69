"""ConvertToNHWC: every operator, and where permutes may be."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from optifx_tvm.passes import ConvertToNHWC
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

IMAGE = (2, 4, 7, 6)


def conv(emit, x, channels=4, seed=0, **options):
    source = int(x.ty.shape[1])
    return emit(nn.conv2d(x, const(channels, source, 3, 3, seed=seed), padding=1, **options))


def between(body, *shapes):
    """A network in which ``body`` stands between two convolutions."""

    def build(emit, x, *rest):
        y = body(emit, conv(emit, x), *rest)
        return conv(emit, emit(y), 3, seed=1)

    return module(build, *(shapes or (IMAGE,)))


BODIES = {
    "relu": lambda emit, y: nn.relu(y),
    "leakyrelu": lambda emit, y: nn.leakyrelu(y, 0.3),
    "clip": lambda emit, y: op.clip(y, 0, 6),
    "bias": lambda emit, y: op.add(y, const(1, 4, 1, 1)),
    "bias of three dimensions": lambda emit, y: op.add(y, const(4, 1, 1)),
    "constant along width": lambda emit, y: op.multiply(const(6), y),
    "full constant": lambda emit, y: op.subtract(y, const(1, 4, 7, 6)),
    "silu": lambda emit, y: op.multiply(y, emit(op.sigmoid(y))),
    "where": lambda emit, y: op.where(emit(op.greater(y, const(4, 1, 1))), y, const(4, 1, 1)),
    "max_pool": lambda emit, y: nn.max_pool2d(y, (3, 2), (2, 1), (0, 1, 2, 1), ceil_mode=True),
    "avg_pool": lambda emit, y: nn.avg_pool2d(y, 3, 2, 1, count_include_pad=True),
    "adaptive": lambda emit, y: nn.adaptive_avg_pool2d(y, (3, 4)),
    "grouped": lambda emit, y: nn.conv2d(y, const(8, 2, 3, 2), groups=2, dilation=(1, 2)),
    "depthwise": lambda emit, y: nn.conv2d(y, const(8, 1, 3, 3), groups=4, strides=2),
    "transposed": lambda emit, y: nn.conv2d_transpose(
        y, const(4, 3, 3, 2), strides=2, padding=(1, 0, 0, 1), output_padding=1
    ),
    "transposed, grouped": lambda emit, y: nn.conv2d_transpose(y, const(4, 3, 2, 2), groups=2),
    "concat": lambda emit, y: op.concat([y, emit(nn.relu(y)), const(2, 1, 7, 6)], -3),
    "concat of rows": lambda emit, y: op.concat([y, y], 2),
    "slice": lambda emit, y: op.strided_slice(y, [1, -1], [0, 5], [3, 0], [2, -2]),
    "pad": lambda emit, y: nn.pad(y, [0, 0, 1, 0, 2, 3, 0, 1], "constant", 0.5),
    "mean of channels": lambda emit, y: op.mean(y, [1], True),
    "softmax": lambda emit, y: nn.softmax(y, 1),
    "resize": lambda emit, y: op.image.resize2d(
        y, relax.ShapeExpr((9, 12)), layout="NCHW", method="linear"
    ),
    "shuffle": lambda emit, y: op.reshape(
        emit(op.permute_dims(emit(op.reshape(y, (2, 2, 2, 7, 6))), [0, 2, 1, 3, 4])), IMAGE
    ),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_operator_between_convolutions(body):
    before = between(body)
    after = apply(ConvertToNHWC(), before)
    assert_same_numbers(after, before)
    names = [call.op.name for call in calls(after)]
    assert names[0] == names[-1] == "relax.permute_dims"
    inner = [c for c in calls(after, "permute_dims")[1:-1] if len(c.attrs.axes) == 4]
    assert not inner


def test_residual_and_split():
    def build(emit, x):
        y = conv(emit, x)
        parts = emit(op.split(y, [1, 3], 1))
        first, _, last = (emit(relax.TupleGetItem(parts, i)) for i in range(3))
        y = emit(op.add(y, emit(op.concat([last, first, last, first], 1))))
        return conv(emit, y)

    def extended(emit, x):
        y = build(emit, x)
        return op.add(y, y)

    before = module(extended, (1, 3, 5, 6))
    after = apply(ConvertToNHWC(), before)
    assert ops(after)["permute_dims"] == 2
    assert_same_numbers(after, before)


def test_squeeze_and_excite():
    def build(emit, x):
        y = conv(emit, x)
        pooled = emit(op.reshape(emit(nn.avg_pool2d(y, (7, 6))), (2, 4)))
        gate = emit(op.sigmoid(emit(op.matmul(pooled, const(4, 4)))))
        return conv(emit, emit(op.multiply(y, emit(op.reshape(gate, (2, 4, 1, 1))))))

    before = module(build, IMAGE)
    after = apply(ConvertToNHWC(), before)
    assert ops(after)["permute_dims"] == 2
    assert_same_numbers(after, before)


def test_input_arithmetic_moves_behind_the_permute():
    def build(emit, x):
        x = emit(op.divide(emit(op.subtract(x, const(4, 1, 1))), const(4, 1, 1, low=1.0)))
        return conv(emit, x)

    before = module(build, IMAGE)
    after = apply(ConvertToNHWC(), before)
    assert [c.op.name for c in calls(after)][0] == "relax.permute_dims"
    assert ops(after)["permute_dims"] == 2
    assert_same_numbers(after, before)


def test_several_outputs_and_an_input_read_twice():
    def build(emit, x):
        y = conv(emit, x)
        return [y, emit(op.add(y, x)), emit(op.mean(y, [2, 3]))]

    before = module(build, IMAGE)
    after = apply(ConvertToNHWC(), before)
    assert ops(after)["permute_dims"] == 3
    assert_same_numbers(after, before)


def test_unknown_operator_gets_nchw():
    def build(emit, x):
        y = emit(op.cumsum(conv(emit, x), 3))
        return conv(emit, y)

    before = module(build, IMAGE)
    after = apply(ConvertToNHWC(), before)
    assert ops(after)["permute_dims"] == 4
    assert_same_numbers(after, before)


def test_layouts_of_the_result():
    after = apply(ConvertToNHWC(), between(BODIES["transposed"]))
    for call in calls(after, "nn.conv2d"):
        assert (call.attrs.data_layout, call.attrs.kernel_layout) == ("NHWC", "OHWI")
        assert call.attrs.out_layout == "NHWC"
        assert len(call.attrs.padding) == 4
    (transposed,) = calls(after, "nn.conv2d_transpose")
    assert (transposed.attrs.data_layout, transposed.attrs.kernel_layout) == ("NHWC", "IHWO")
    assert [int(n) for n in transposed.args[1].ty.shape] == [4, 3, 2, 3]


def test_nhwc_kernels_of_another_layout_become_ohwi():
    def build(emit, x):
        return nn.conv2d(x, const(3, 3, 4, 5), data_layout="NHWC", kernel_layout="HWIO")

    before = module(build, (1, 7, 6, 4))
    after = apply(ConvertToNHWC(), before)
    assert [c.attrs.kernel_layout for c in calls(after)] == ["OHWI"]
    assert_same_numbers(after, before)


def test_permutes_of_the_source_meet():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 5, 5, 2), "float32")):
            with R.dataflow():
                nchw = R.permute_dims(x, [0, 3, 1, 2])
                pooled = R.nn.max_pool2d(nchw, pool_size=[2, 2])
                gv = R.permute_dims(pooled, [0, 2, 3, 1])
                R.output(gv)
            return gv

    after = apply(ConvertToNHWC(), Before)
    assert ops(after) == {"nn.max_pool2d": 1}
    assert_same_numbers(after, Before)


def test_left_alone():
    assert_left_alone(
        ConvertToNHWC(), module(lambda emit, x, w: nn.conv2d(x, w), IMAGE, (4, 4, 3, 3))
    )
    assert_left_alone(
        ConvertToNHWC(), module(lambda emit, x: nn.conv1d(x, const(4, 4, 3)), (1, 4, 9))
    )
    assert_left_alone(
        ConvertToNHWC(),
        module(lambda emit, x: nn.conv3d(x, const(4, 4, 3, 3, 3)), (1, 4, 5, 5, 5)),
    )
    attention = module(lambda emit, x: nn.softmax(emit(op.multiply(x, x)), 3), (2, 4, 8, 8))
    assert_left_alone(ConvertToNHWC(), attention)
