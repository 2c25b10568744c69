"""Writes dense layers that follow an image as convolutions.

Runs after ``CleanUpImports`` and ``NormalizePooling``, before ``ConvertToNHWC``.
``matmul(reshape(x[N, C, H, W], (N, K)), w[K, M])`` is a convolution with an H x W window and no
padding, whose result (N, M, 1, 1) is reshaped to (N, M); the constant ``w`` is permuted to the
order in which the reshape laid the image out (NCHW or NHWC, told by the operators before it).
Element-wise operators move from the reshaped matrix to the image, so that biases, activations and
the next dense layer follow. A matmul of anything else is left alone.
"""

from __future__ import annotations

import tvm
from tvm import relax

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    array_of,
    constant,
    dtype_of,
    op_name,
    per_channel,
    rewrite_functions,
    static_shape,
)
from optifx_tvm.passes.layouts import BINARY, UNARY, layout_of

_MAX_WINDOW = 32 * 32
"""A dense layer on more positions than this is no convolution that tiles could serve."""


class _DenseToConv(DataflowRewriter):
    def rewrite_call(self, call: Call, source: Call) -> Expr:
        name = op_name(call)
        if name == "relax.matmul":
            return self._dense(self.normalized(call))
        if name in UNARY and isinstance(call.args[0], relax.Var):
            return self._move_unary(call)
        if name in BINARY:
            return self._move_binary(self.normalized(call))
        return call

    def _image_of(self, x: Expr) -> Expr | None:
        """The image (N, ...) of which the matrix ``x`` (N, K) is a reshape."""
        reshape = self.call_of(x, "relax.reshape", "relax.flatten", "relax.nn.batch_flatten")
        if reshape is None:
            return None
        image, flat = static_shape(reshape.args[0]), static_shape(reshape)
        if image is None or flat is None or len(image) != 4 or len(flat) != 2:
            return None
        return reshape.args[0] if image[0] == flat[0] else None

    def _dense(self, call: Call) -> Expr:
        image, weight = self._image_of(call.args[0]), array_of(call.args[1])
        if image is None or weight is None or weight.ndim != 2:
            return call
        shape = static_shape(image)
        layout = layout_of(self, image)
        assert shape is not None
        if layout is None or dtype_of(call) != dtype_of(image):
            return call
        extent = dict(zip(layout, shape, strict=True))
        if extent["H"] * extent["W"] > _MAX_WINDOW:
            return call
        spread = weight.reshape(shape[1:] + (weight.shape[1],))
        positions = layout[1:]
        order = [3, *(positions.index(axis) for axis in positions)]
        kernel = constant(spread.transpose(order), dtype_of(call.args[1]))
        conv = relax.op.nn.conv2d(
            image,
            kernel,
            padding=(0, 0, 0, 0),
            data_layout=layout,
            kernel_layout="O" + positions.replace("C", "I"),
        )
        return relax.op.reshape(self.emit(conv), (shape[0], weight.shape[1]))

    def _pixel_of(self, x: Expr) -> tuple[Expr, str] | None:
        """The one-pixel image of which the matrix ``x`` is a reshape, and its layout."""
        image = self._image_of(x)
        shape = static_shape(image) if image is not None else None
        layout = layout_of(self, image) if image is not None else None
        if image is None or shape is None or layout is None:
            return None
        extent = dict(zip(layout, shape, strict=True))
        return (image, layout) if extent["H"] == extent["W"] == 1 else None

    def _on_image(self, call: Call, operands: list[Expr]) -> Expr:
        """``call`` on images, and the reshape that it moves behind itself."""
        shape = static_shape(call.args[0])
        assert shape is not None
        moved = self.emit(Call(call.op, [*operands, *call.args[len(operands) :]], call.attrs))
        return relax.op.reshape(moved, shape)

    def _move_unary(self, call: Call) -> Expr:
        image = self._image_of(call.args[0])
        if image is None or layout_of(self, image) is None:
            return call
        return self._on_image(call, [image])

    def _move_binary(self, call: Call) -> Expr:
        image, other = self._image_of(call.args[0]), call.args[1]
        layout = layout_of(self, image) if image is not None else None
        shape = static_shape(call)
        if image is None or layout is None or static_shape(call.args[0]) != shape:
            return call
        vector = array_of(other)
        if vector is not None and vector.size == 1:
            scalar = constant(vector.reshape(()), dtype_of(other))
            return self._on_image(call, [image, scalar])
        pixel = self._pixel_of(call.args[0])
        operand = self._beside_pixel(pixel[1], other, shape) if pixel is not None else None
        return call if operand is None else self._on_image(call, [image, operand])

    def _beside_pixel(self, layout: str, other: Expr, shape: tuple[int, ...] | None) -> Expr | None:
        """The second operand of a matrix operator, for one-pixel images of ``layout``."""
        vector = array_of(other)
        if vector is None or shape is None:
            second = self._pixel_of(other)
            same = second is not None and second[1] == layout and static_shape(other) == shape
            return second[0] if second is not None and same else None
        if per_channel(vector, 2, 1, shape[1]) is None:
            return None
        one_pixel = [1] * 4
        one_pixel[layout.index("C")] = vector.size
        return constant(vector.reshape(one_pixel), dtype_of(other))


@tvm.transform.module_pass(opt_level=0, name="DenseToConv")
class DenseToConv:
    """Dense layers on flattened images, and what follows them, as convolutions on images."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _DenseToConv)
