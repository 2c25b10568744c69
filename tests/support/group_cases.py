"""Groups and tiles that between them cover every operator, fusion mode and oddity of shape.

Names of cases that once failed say what was wrong; see tests/schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optifx_tvm.graph import ConvGraph, Step
from optifx_tvm.partition import Tile
from tests.support.groups import RELU, GroupBuilder


@dataclass(frozen=True)
class GroupCase:
    """One group with one tile."""

    name: str
    graph: ConvGraph
    tile: Tile

    @property
    def dtype(self) -> str:
        """Of the outputs."""
        return self.graph.tensors[self.graph.outputs[0]].dtype


_CASES: dict[str, Callable[[], GroupCase]] = {}


def _case(dtype: str = "float32", batch: int = 1, tile: tuple[int, ...] = (4, 5)):
    """Register a function that fills a GroupBuilder and returns the outputs' names."""

    def register(function: Callable[[GroupBuilder], tuple[str, ...]]):
        def build() -> GroupCase:
            builder = GroupBuilder(dtype, batch)
            outputs = function(builder)
            return GroupCase(function.__name__, builder.graph(*outputs), Tile(*tile))

        _CASES[function.__name__] = build
        return function

    return register


def case_names() -> list[str]:
    """Every case."""
    return list(_CASES)


def build_case(name: str) -> GroupCase:
    """The case of this name."""
    return _CASES[name]()


# Single operators -----------------------------------------------------------------------------


@_case(tile=(4, 11))
def conv3x3(b):
    return (b.conv(b.input(13, 11, 24), 20, 3),)


@_case("float16", tile=(4, 11))
def conv3x3_half(b):
    return (b.conv(b.input(13, 11, 24), 20, 3),)


@_case(tile=(2, 3, 2))
def conv3x3_stride2_slices(b):
    return (b.conv(b.input(13, 11, 24), 32, 3, s=2),)


@_case("float16", tile=(2, 3))
def conv7x7_stride2_three_channels_half(b):
    return (b.conv(b.input(17, 15, 3), 16, 7, s=2),)


@_case(tile=(3, 4))
def conv_dilated_asymmetric_padding(b):
    return (b.conv(b.input(11, 9, 7), 18, (3, 2), d=(2, 3), pad=(1, 3, 4, 0)),)


@_case(tile=(3, 9))
def conv_1x7(b):
    return (b.conv(b.input(6, 9, 8), 12, (1, 7)),)


@_case(tile=(4, 4))
def conv_unequal_strides(b):
    return (b.conv(b.input(12, 13, 5), 11, 3, s=(1, 2)),)


@_case(tile=(5, 5))
def conv_one_output_channel(b):
    return (b.conv(b.input(9, 9, 12), 1, 3),)


@_case(batch=2, tile=(7, 7, 2))
def conv1x1_batch2_slices(b):
    return (b.conv(b.input(7, 7, 36), 32, 1),)


@_case(tile=(4, 15))
def conv_grouped_pitches_not_of_4(b):
    x = b.conv(b.input(17, 15, 19), 38, 3, groups=19)
    return (b.conv(x, 57, 3, groups=19),)


@_case("float16", tile=(4, 4, 2))
def conv_grouped_slices_half(b):
    return (b.conv(b.input(8, 8, 32), 64, 3, groups=4),)


@_case(tile=(3, 7))
def depthwise_odd_channels(b):
    return (b.depthwise(b.input(9, 7, 21), 3),)


@_case("float16", tile=(3, 3, 2))
def depthwise5x5_stride2_half(b):
    return (b.depthwise(b.input(11, 11, 32), 5, 2),)


@_case(tile=(4, 7))
def depthwise_multiplier(b):
    return (b.conv(b.input(9, 7, 10), 20, 3, groups=10),)


# Transposed convolution -----------------------------------------------------------------------


@_case(tile=(4, 4))
def transposed_k2(b):
    return (b.transposed(b.input(7, 6, 32), 16),)


@_case(tile=(4, 4))
def transposed_k3_padded_reads_right_tap(b):
    return (b.transposed(b.input(7, 6, 32), 16, k=3, s=2, pad=(1, 1, 1, 1), extra=1),)


@_case("float16", tile=(4, 4))
def transposed_k4_padded_half(b):
    return (b.transposed(b.input(5, 6, 16), 24, k=4, s=2, pad=(1, 1, 1, 1)),)


@_case(tile=(6, 6))
def transposed_stride3(b):
    return (b.transposed(b.input(5, 4, 9), 12, k=5, s=3, pad=(2, 1, 0, 2)),)


@_case(tile=(5, 6))
def transposed_stride1(b):
    return (b.transposed(b.input(8, 7, 8), 10, k=3, s=1, pad=(1, 1, 1, 1)),)


@_case(tile=(4, 4))
def transposed_dilated_grouped(b):
    return (b.transposed(b.input(7, 6, 32), 20, k=3, s=2, d=2, pad=(1, 0, 1, 2), groups=2),)


@_case(tile=(4, 4))
def transposed_then_conv(b):
    x = b.transposed(b.input(7, 6, 16), 16, k=3, s=2, pad=(1, 1, 1, 1), extra=1)
    return (b.conv(x, 8, 3),)


# Pooling --------------------------------------------------------------------------------------


@_case(tile=(4, 8))
def max_pool_padded(b):
    return (b.pool(b.input(17, 15, 16), "max", 3, 2, (1, 1, 1, 1)),)


@_case("float16", tile=(3, 4))
def max_pool_ceil_odd_channels_half(b):
    return (b.pool(b.input(12, 11, 13), "max", 3, 2, ceil=True),)


@_case(tile=(4, 3))
def max_pool_dilated(b):
    return (b.pool(b.input(11, 10, 6), "max", 3, 1, (1, 0, 1, 2), d=2),)


@_case(tile=(4, 3))
def avg_pool_include_pad(b):
    return (b.pool(b.input(9, 7, 24), "avg", 3, 1, (1, 1, 1, 1), include=True),)


@_case(tile=(4, 3))
def avg_pool_ceil_include_pad(b):
    return (b.pool(b.input(9, 8, 24), "avg", 3, 2, (1, 1, 1, 1), ceil=True, include=True),)


@_case(tile=(3, 3))
def avg_pool_exclude_pad_dilated(b):
    return (b.pool(b.input(9, 9, 8), "avg", 2, 2, (1, 1, 1, 1), d=2),)


@_case(tile=(1, 1))
def global_pool_then_classifier(b):
    return (b.conv(b.pool(b.input(7, 7, 64), "avg", (7, 7), 1), 50, 1),)


@_case("float16", batch=2, tile=(1, 1, 4))
def global_pool_slices_half(b):
    return (b.pool(b.input(7, 5, 64), "avg", (7, 5), 1),)


# Element-wise ---------------------------------------------------------------------------------

SILU = (Step("sigmoid", (0,)), Step("multiply", (0, 1)))


@_case(tile=(4, 7))
def elementwise_chain(b):
    x, y = b.input(9, 7, 10), b.input(9, 7, 10)
    steps = (
        Step("add", (0, y)), Step("clip", (1, 0.0, 6.0)), Step("leaky_relu", (1, 0.1)),
        Step("erf", (3,)), Step("tanh", (1,)), Step("maximum", (4, 5)), Step("exp", (6,)),
        Step("add", (7, 1.0)), Step("log", (8,)), Step("sqrt", (9,)), Step("subtract", (10, 2)),
    )  # fmt: skip
    return (b.eltwise(x, *steps),)


@_case("float16", tile=(4, 6))
def conv_silu_residual_half(b):
    x = b.input(8, 6, 16)
    y = b.conv(x, 16, 3, epilogue=(*SILU, Step("add", (2, x)), Step("cast:float16", (3,))))
    return (y,)


@_case(batch=2, tile=(3, 5))
def conv_squeeze_excite_operand(b):
    x, scale = b.input(6, 5, 8), b.input(1, 1, 12)
    return (b.conv(x, 12, 3, epilogue=(Step("multiply", (0, scale)), Step("negative", (1,)))),)


# Straight -------------------------------------------------------------------------------------


@_case(batch=2, tile=(4, 5))
def straight_conv_conv_dilated(b):
    return (b.conv(b.conv(b.input(9, 8, 12), 16, 3), 24, 3, d=2),)


@_case("float16", tile=(3, 4))
def straight_three_convs_half(b):
    x = b.input(9, 7, 12)
    return (b.conv(b.conv(b.conv(x, 16, 3), 16, 3), 16, 3),)


@_case(tile=(3, 6))
def straight_inverted_residual_stride2(b):
    x = b.depthwise(b.conv(b.input(13, 11, 12), 40, 1), 3, 2)
    return (b.conv(x, 24, 1, epilogue=()),)


@_case("float16", tile=(3, 12))
def straight_inverted_residual_with_add_half(b):
    x = b.input(9, 12, 16)
    y = b.depthwise(b.conv(x, 48, 1), 3, 1)
    return (b.conv(y, 16, 1, epilogue=(b.bias(16), Step("add", (1, x)))),)


@_case(tile=(4, 3))
def straight_conv_max_pool_ceil(b):
    return (b.pool(b.conv(b.input(17, 15, 8), 16, 3), "max", 3, 2, (1, 1, 0, 0), ceil=True),)


@_case("float16", tile=(3, 3))
def straight_stem_half(b):
    x = b.conv(b.input(21, 19, 3), 16, 7, s=2)
    return (b.pool(x, "max", 3, 2, (1, 1, 1, 1)),)


@_case(tile=(4, 4))
def straight_prologue_before_padded_conv(b):
    x = b.input(9, 10, 12)
    scale, shift = b.param(12), b.param(12)
    steps = (Step("multiply", (0, scale)), Step("add", (1, shift)), Step("relu", (2,)))
    return (b.conv(b.conv(x, 16, 1, prologue=steps), 8, 3, prologue=(RELU,)),)


# Split ----------------------------------------------------------------------------------------


@_case(tile=(4, 5, 2))
def split_fire(b):
    x = b.conv(b.input(13, 11, 24), 16, 1)
    return (b.concat(b.conv(x, 32, 1), b.conv(x, 32, 3)),)


@_case("float16", tile=(4, 5))
def split_fire_odd_slices_half(b):
    x = b.conv(b.input(9, 11, 24), 16, 1)
    return (b.concat(b.conv(x, 18, 1), b.conv(x, 19, 3)),)


@_case(tile=(6, 2))
def split_fire_and_pool_two_outputs(b):
    x = b.conv(b.input(13, 11, 24), 16, 1)
    y = b.concat(b.conv(x, 32, 1), b.conv(x, 32, 3))
    return (y, b.pool(y))


@_case(tile=(5, 4))
def split_intermediate_is_output(b):
    x = b.conv(b.input(9, 8, 8), 16, 3)
    return (x, b.conv(x, 16, 3), b.conv(x, 8, 1))


# Merge ----------------------------------------------------------------------------------------


@_case(tile=(4, 3))
def merge_inception(b):
    x = b.input(11, 9, 8)
    y = b.conv(x, 16, 3)
    parts = b.pool(y, "max", 3, 1, (1,) * 4), b.pool(y, "avg", 3, 1, (1,) * 4), b.conv(y, 16, 3)
    return (b.concat(*parts, x),)


@_case("float16", tile=(4, 4))
def merge_unet_up_half(b):
    skip, deep = b.input(14, 12, 16), b.input(7, 6, 16)
    return (b.conv(b.concat(skip, b.transposed(deep, 16)), 16, 3),)


@_case(tile=(5, 13))
def merge_dense_layer_gathered_concat(b):
    x = b.concat(b.input(11, 13, 16), b.input(11, 13, 8))
    steps = (Step("multiply", (0, b.param(24))), Step("add", (1, b.param(24))), Step("relu", (2,)))
    return (b.conv(b.conv(x, 32, 1, prologue=steps), 16, 3),)


@_case(tile=(4, 3))
def merge_same_tensor_twice(b):
    x = b.input(9, 7, 24)
    c = b.concat(x, x)
    return (b.eltwise(c, RELU), b.conv(c, 8, 3, prologue=(RELU,)))


@_case(tile=(4, 4))
def merge_two_branches_added(b):
    x = b.input(9, 8, 12)
    y = b.depthwise(b.conv(x, 12, 1), 5)
    z = b.pool(x, "avg", 3, 1, (1, 1, 1, 1))
    return (b.eltwise(y, Step("add", (0, z)), Step("relu", (1,))),)


@_case(tile=(4, 4))
def merge_concat_with_epilogue_and_halo(b):
    x = b.input(8, 9, 8)
    parts = b.conv(x, 6, 1), b.conv(x, 10, 3)
    c = b.concat(*parts, epilogue=(Step("multiply", (0, b.param(16))), Step("relu", (1,))))
    return (b.conv(c, 8, 3),)


@_case("float16", tile=(3, 7, 2))
def merge_bottleneck_residual_half(b):
    x = b.input(7, 7, 32)
    y = b.conv(b.conv(x, 16, 1), 16, 3)
    steps = (b.bias(32), Step("add", (1, x)), Step("relu", (2,)))
    return (b.conv(y, 32, 1, epilogue=steps),)


@_case(tile=(1, 1))
def tiles_of_one_position(b):
    return (b.conv(b.conv(b.input(3, 4, 5), 7, 3), 6, 3),)


@_case(tile=(9, 8))
def one_tile_for_the_whole_image(b):
    return (b.conv(b.conv(b.input(9, 8, 5), 17, 3), 33, 3, s=2),)


@_case(tile=(1, 1, 2))
def merge_gathered_concat_read_by_a_slice(b):
    c = b.concat(b.input(2, 2, 32), b.input(2, 2, 96))
    steps = (Step("multiply", (0, b.param(128))), Step("relu", (1,)))
    return (b.pool(c, "avg", 2, 2, prologue=steps),)


@_case(tile=(3, 7, 1))
def merge_concat_parts_written_out_of_order(b):
    first, last = b.input(6, 7, 24), b.conv(b.input(6, 7, 24), 24, 1)
    c = b.concat(first, last)
    return c, b.eltwise(c, Step("relu", (0,)))


@_case(tile=(4, 4, 11))
def tile_read_while_the_next_is_written(b):
    # TVM put the next tile in the place of the one that its nest reads for the last time.
    x = b.conv(b.input(4, 4, 88), 88, 1, epilogue=(b.bias(88),))
    y = b.conv(b.input(4, 4, 88), 88, 1, epilogue=(b.bias(88), Step("add", (x, 1))))
    return (y, b.depthwise(y, 3, prologue=(RELU,), epilogue=()))


@_case("float16", tile=(2, 2, 11))
def parts_of_a_concat_with_tiles_of_one_size_half(b):
    # As above, with wrong numbers in any order of threads.
    x, y = b.input(2, 2, 176), b.input(2, 2, 176)
    parts = []
    for _ in range(2):
        left = b.conv(b.input(2, 2, 176), 176, 1, epilogue=(b.bias(176),))
        parts.append(b.conv(x, 176, 1, epilogue=(b.bias(176), Step("add", (left, 1)))))
    z = b.pool(y, "avg", 3, 1, (1, 1, 1, 1))
    pool = b.pool(y, "avg", 3, 1, (1, 1, 1, 1), epilogue=(Step("add", (z, 0)),))
    deep = b.conv(b.depthwise(b.conv(x, 176, 1), 3, epilogue=()), 176, 1)
    return (b.concat(y, *parts, pool, deep),)
