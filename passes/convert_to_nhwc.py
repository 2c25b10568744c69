"""Moves a network from NCHW to NHWC with no transposes left inside.

Runs after ``CleanUpImports``, ``NormalizePooling``, ``FoldBatchNorm`` and ``DenseToConv``. Every
NCHW value that an operator here understands is computed in NHWC; ``permute_dims`` appears where a
network input is first read, where an operator that is not understood wants NCHW, and before a
four-dimensional network output, which keeps its layout. Convolution weights become OHWI (IHWO for
the transposed one), constants along the channels (1, 1, 1, C). Convolutions whose weights are not
constants, and other layouts and ranks, are left alone.

``ConvertLayout`` of TVM leaves two permutes a convolution on DenseNet, 50 on ShuffleNet, and fails
on dropout and on the way importers write sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from optifx_tvm.passes.dataflow import (
    Call,
    DataflowRewriter,
    Expr,
    Var,
    array_of,
    constant,
    ints,
    op_name,
    rewrite_functions,
    static_shape,
)
from optifx_tvm.passes.layouts import BINARY, ELEMENTWISE, TERNARY, UNARY, named, spatial_layout
from optifx_tvm.passes.operators import CONVOLUTIONS, POOLINGS, conv_like, pool_like

_TO_NHWC, _TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
_AXIS = (0, 3, 1, 2)
"""Where each axis of NCHW is in NHWC."""

_CONV_KERNEL = {"relax.nn.conv2d": ("OIHW", "OHWI"), "relax.nn.conv2d_transpose": ("IOHW", "IHWO")}
_REDUCTIONS = ("relax.mean", "relax.sum", "relax.max", "relax.min")

_PASS_LAYOUT_ON = ELEMENTWISE | named("concat", "split", "strided_slice", "nn.pad")


def _is_image(expr: Expr) -> bool:
    shape = static_shape(expr)
    return shape is not None and len(shape) == 4


def _constant_to_nhwc(value: GenericConst) -> GenericConst | None:
    """A constant of up to four dimensions, broadcast against NCHW, for NHWC."""
    array = value.value.numpy()
    if array.ndim == 0:
        return value
    if array.ndim > 4:
        return None
    full = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return constant(full.transpose(_TO_NHWC))


class _ToNHWC(DataflowRewriter):
    """Keeps, for each value with NCHW meaning, its NHWC twin; the NCHW value itself is made only
    when something asks for it."""

    def __init__(self, mod: tvm.IRModule, func: relax.Function) -> None:
        super().__init__(mod, func)
        self._twins: dict[Var, Var] = {}
        self._plain: dict[Var, Var] = {}
        self._tuples: dict[Var, Var] = {}
        self._wanted = _wanted_in_nhwc(func)
        self._target: Var | None = None
        spatial: tuple[tuple[tuple[str, ...], Callable[[Call], Expr | None]], ...] = (
            (CONVOLUTIONS, self._conv),
            (POOLINGS, self._pool),
            (tuple(UNARY), self._unary),
            (tuple(BINARY | TERNARY), self._broadcasting),
            (_REDUCTIONS, self._reduce),
            (("relax.nn.softmax", "relax.nn.log_softmax"), self._softmax),
            (("relax.nn.adaptive_avg_pool2d",), self._adaptive),
            (("relax.image.resize2d",), self._resize),
            (("relax.concat",), self._concat),
            (("relax.strided_slice",), self._slice),
            (("relax.nn.pad",), self._pad),
        )
        self._rules = {name: rule for names, rule in spatial for name in names}

    # Reading the source's variables.

    def new(self, expr: Expr) -> Expr:
        """As in the base class; a value that so far exists as its twin alone is permuted back."""
        if isinstance(expr, Var) and expr in self._twins and expr not in self._mapped:
            if expr not in self._plain:
                twin = self._twins[expr]
                self._plain[expr] = self.emit(relax.op.permute_dims(twin, _TO_NCHW))
            return self._plain[expr]
        return super().new(expr)

    def _nhwc(self, expr: Expr) -> Var | None:
        """The NHWC twin of a four-dimensional source variable, permuted once if need be."""
        if not isinstance(expr, Var) or not _is_image(expr):
            return None
        if expr not in self._twins:
            value = self.new(expr)
            if not isinstance(value, Var):
                return None
            self._twins[expr] = self._permuted(value)
        return self._twins[expr]

    def _permuted(self, value: Var) -> Var:
        back = self.call_of(value, "relax.permute_dims")
        if back is not None and _permutes(back, _TO_NCHW) and isinstance(back.args[0], Var):
            return back.args[0]
        return self.emit(relax.op.permute_dims(value, _TO_NHWC))

    def _has_twin(self, expr: Expr) -> bool:
        return isinstance(expr, Var) and expr in self._twins

    # Binding.

    def _binding(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        self._hint, self._target = var.name, var
        done = False
        if isinstance(binding, relax.VarBinding):
            if isinstance(value, Call):
                done = self._convert(var, value)
            elif isinstance(value, relax.TupleGetItem):
                done = self._get_item(var, value)
            elif isinstance(value, Var) and self._has_twin(value):
                done = self._set_twin(var, self._twins[value])
        if not done:
            super()._binding(binding)

    def _convert(self, var: Var, call: Call) -> bool:
        name = op_name(call)
        if name == "relax.split":
            return self._split(var, call)
        if name == "relax.permute_dims":
            return self._permute(var, call)
        if name == "relax.reshape":
            return self._reshape(var, call)
        if name in CONVOLUTIONS and str(call.attrs.data_layout) == "NHWC":
            return self._repack_kernel(var, call)
        rule = self._rules.get(name or "")
        if rule is None or not isinstance(call.ty, relax.TensorType):
            return False
        result = rule(call)
        if result is None:
            return False
        if not _is_image(call):
            self.bind(var, result)
            return True
        return self._set_twin(var, result)

    def _set_twin(self, var: Var, value: Expr) -> bool:
        twin = value if isinstance(value, Var) else self.emit(value)
        self._twins[var] = twin
        if not isinstance(var, relax.DataflowVar):
            self.bind(var, relax.op.permute_dims(twin, _TO_NCHW))
        return True

    # Rules: an NHWC expression for a source call, or None to leave the call alone.

    def _conv(self, call: Call) -> Expr | None:
        weight = array_of(call.args[1])
        old, new = _CONV_KERNEL[op_name(call) or ""]
        layouts = (str(call.attrs.data_layout), str(call.attrs.kernel_layout))
        if weight is None or layouts != ("NCHW", old) or str(call.attrs.out_layout) != "NCHW":
            return None
        data = self._nhwc(call.args[0])
        if data is None:
            return None
        kernel = constant(weight.transpose([old.index(axis) for axis in new]))
        return conv_like(call, data, kernel, data_layout="NHWC", kernel_layout=new)

    def _pool(self, call: Call) -> Expr | None:
        attrs = call.attrs
        if str(attrs.layout) != "NCHW" or str(attrs.out_layout) != "NCHW":
            return None
        data = self._nhwc(call.args[0])
        return None if data is None else pool_like(call, data, layout="NHWC")

    def _adaptive(self, call: Call) -> Expr | None:
        attrs = call.attrs
        data = self._nhwc(call.args[0]) if str(attrs.layout) == "NCHW" else None
        if data is None or str(attrs.out_layout) != "NCHW":
            return None
        return relax.op.nn.adaptive_avg_pool2d(data, attrs.output_size, "NHWC", "NHWC")

    def _resize(self, call: Call) -> Expr | None:
        attrs = call.attrs
        data = self._nhwc(call.args[0]) if str(attrs.layout) == "NCHW" else None
        if data is None:
            return None
        return relax.op.image.resize2d(
            data,
            call.args[1],
            roi=tuple(float(v) for v in attrs.roi),
            layout="NHWC",
            method=str(attrs.method),
            coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
            rounding_method=str(attrs.rounding_method),
            cubic_alpha=float(attrs.cubic_alpha),
            cubic_exclude=int(attrs.cubic_exclude),
            extrapolation_value=float(attrs.extrapolation_value),
            out_dtype=attrs.out_dtype,
        )

    def _worth_it(self, operands: list[Expr]) -> bool:
        """True when an operand is in NHWC already, or the result is going to be wanted so."""
        return any(map(self._has_twin, operands)) or self._target in self._wanted

    def _unary(self, call: Call) -> Expr | None:
        if not _is_image(call) or not self._worth_it(list(call.args[:1])):
            return None
        data = self._nhwc(call.args[0])
        return None if data is None else Call(call.op, [data, *call.args[1:]], call.attrs)

    def _broadcasting(self, call: Call) -> Expr | None:
        if not _is_image(call) or not self._worth_it(list(call.args)):
            return None
        operands = []
        for arg in call.args:
            if isinstance(arg, GenericConst):
                operand = _constant_to_nhwc(arg)
            else:
                operand = self.new(arg) if static_shape(arg) == () else self._nhwc(arg)
            if operand is None:
                return None
            operands.append(operand)
        return Call(call.op, operands, call.attrs)

    def _reduce(self, call: Call) -> Expr | None:
        axis = call.attrs.axis
        if axis is None or not self._has_twin(call.args[0]):
            return None
        axes = [a % 4 for a in ints(axis)]
        kept = [a for a in range(4) if a not in axes]
        if not call.attrs.keepdims and kept != sorted(kept, key=lambda a: _AXIS[a]):
            return None
        moved = sorted(_AXIS[a] for a in axes)
        reduce = getattr(relax.op, (op_name(call) or "").removeprefix("relax."))
        return reduce(self._twins[call.args[0]], moved, bool(call.attrs.keepdims))

    def _softmax(self, call: Call) -> Expr | None:
        if not self._has_twin(call.args[0]):
            return None
        softmax = getattr(relax.op.nn, (op_name(call) or "").removeprefix("relax.nn."))
        return softmax(self._twins[call.args[0]], _AXIS[int(call.attrs.axis) % 4])

    def _concat(self, call: Call) -> Expr | None:
        fields = getattr(call.args[0], "fields", None)
        if fields is None or not _is_image(call) or call.attrs.axis is None:
            return None
        if not self._worth_it(list(fields)):
            return None
        parts = []
        for field in fields:
            part = _constant_to_nhwc(field) if isinstance(field, GenericConst) else None
            part = self._nhwc(field) if part is None else part
            if part is None:
                return None
            parts.append(part)
        return relax.op.concat(parts, _AXIS[int(call.attrs.axis) % 4])

    def _slice(self, call: Call) -> Expr | None:
        if not _is_image(call) or not self._worth_it(list(call.args[:1])):
            return None
        bounds = [_constants(arg) for arg in call.args[1:]]
        data = self._nhwc(call.args[0])
        if data is None or any(bound is None for bound in bounds):
            return None
        axes = [_AXIS[axis % 4] for axis in bounds[0] or ()]
        inbound = bool(call.attrs.assume_inbound)
        return relax.op.strided_slice(data, axes, *bounds[1:], assume_inbound=inbound)

    def _pad(self, call: Call) -> Expr | None:
        if not _is_image(call) or not self._worth_it(list(call.args[:1])):
            return None
        data, attrs = self._nhwc(call.args[0]), call.attrs
        if data is None:
            return None
        pairs = np.reshape(ints(attrs.pad_width), (4, 2))[_TO_NHWC]
        widths = [int(width) for width in pairs.reshape(-1)]
        return relax.op.nn.pad(data, widths, str(attrs.pad_mode), float(attrs.pad_value))

    # Rules that bind by themselves.

    def _split(self, var: Var, call: Call) -> bool:
        if not isinstance(var, relax.DataflowVar) or not _is_image(call.args[0]):
            return False
        data = self._nhwc(call.args[0]) if self._worth_it([call.args[0]]) else None
        if data is None:
            return False
        parts = call.attrs.indices_or_sections
        parts = int(parts) if isinstance(parts, int | tvm.tirx.IntImm) else list(ints(parts))
        axis = _AXIS[int(call.attrs.axis) % 4]
        self._tuples[var] = self.emit(relax.op.split(data, parts, axis))
        # Somebody may read the tuple as a whole; unread, the NCHW split disappears again.
        super()._binding(relax.VarBinding(var, call))
        return True

    def _repack_kernel(self, var: Var, call: Call) -> bool:
        """A convolution that is in NHWC, its constant weight in another order than ours."""
        weight, kernel = array_of(call.args[1]), str(call.attrs.kernel_layout)
        wanted = _CONV_KERNEL[op_name(call) or ""][1]
        if weight is None or kernel == wanted or sorted(kernel) != sorted(wanted):
            return False
        packed = constant(weight.transpose([kernel.index(axis) for axis in wanted]))
        self.bind(var, conv_like(call, self.new(call.args[0]), packed, kernel_layout=wanted))
        return True

    def _get_item(self, var: Var, item: relax.TupleGetItem) -> bool:
        source = self._tuples.get(item.tuple_value) if isinstance(item.tuple_value, Var) else None
        if source is None:
            return False
        return self._set_twin(var, relax.TupleGetItem(source, item.index))

    def _permute(self, var: Var, call: Call) -> bool:
        """A permute to NHWC that the source holds itself reads the twin."""
        if not _permutes(call, _TO_NHWC) or not self._has_twin(call.args[0]):
            return False
        self.bind(var, self._twins[call.args[0]])
        return True

    def _reshape(self, var: Var, call: Call) -> bool:
        """A reshape that moves no data in either layout, because one pixel or one channel is all
        there is; and the last step of a channel shuffle."""
        source, target = static_shape(call.args[0]), static_shape(call)
        if source is None or target is None:
            return False
        if source == (*target, 1, 1) and self._has_twin(call.args[0]):
            self.bind(var, relax.op.reshape(self._twins[call.args[0]], target))
            return True
        if target == (*source, 1, 1) and len(source) == 2 and self._worth_it([]):
            shape = (source[0], 1, 1, source[1])
            return self._set_twin(var, relax.op.reshape(self.new(call.args[0]), shape))
        return self._shuffle(var, call)

    def _shuffle(self, var: Var, call: Call) -> bool:
        """(N, C, H, W) -> (N, g, C/g, H, W) -> (N, C/g, g, H, W) -> (N, C, H, W)."""
        permute = self._source_call(call.args[0], "relax.permute_dims")
        if permute is None or permute.attrs.axes is None:
            return False
        spread = self._source_call(permute.args[0], "relax.reshape")
        if spread is None:
            return False
        inner, outer = static_shape(spread), static_shape(call)
        image = spread.args[0]
        if not self._has_twin(image) or static_shape(image) != outer or inner is None:
            return False
        if ints(permute.attrs.axes) != (0, 2, 1, 3, 4) or outer is None or len(inner) != 5:
            return False
        batch, channels, height, width = outer
        if (inner[0], inner[1] * inner[2], *inner[3:]) != outer:
            return False
        groups = (batch, height, width, inner[1], inner[2])
        grouped = self.emit(relax.op.reshape(self._twins[image], groups))
        swapped = self.emit(relax.op.permute_dims(grouped, [0, 1, 2, 4, 3]))
        return self._set_twin(var, relax.op.reshape(swapped, (batch, height, width, channels)))

    def _source_call(self, expr: Expr, name: str) -> Call | None:
        value = self.source_values.get(expr) if isinstance(expr, Var) else None
        return value if op_name(value) == name and isinstance(value, Call) else None


def _wanted_in_nhwc(func: relax.Function) -> set[Var]:
    """Source variables that a convolution, pooling or resize in NCHW reads, directly or through
    operators that pass a layout on."""
    wanted: set[Var] = set()
    body = func.body
    blocks = list(body.blocks) if isinstance(body, relax.SeqExpr) else []
    for block in reversed(blocks):
        for binding in reversed(list(block.bindings)):
            call, name = binding.value, op_name(binding.value)
            if isinstance(call, relax.TupleGetItem) and binding.var in wanted:
                wanted.add(call.tuple_value)
            if not isinstance(call, Call):
                continue
            if spatial_layout(call) == "NCHW":
                wanted.add(call.args[0])
            elif binding.var in wanted and name in _PASS_LAYOUT_ON:
                for arg in call.args:
                    wanted.update(f for f in getattr(arg, "fields", [arg]) if isinstance(f, Var))
    return wanted


def _permutes(call: Call, axes: list[int]) -> bool:
    return call.attrs.axes is not None and list(ints(call.attrs.axes)) == axes


def _constants(expr: Expr) -> list[int] | None:
    """Integers of a tuple of constants (begin, end, strides of a slice)."""
    fields = getattr(expr, "fields", None)
    if fields is None or not all(isinstance(f, tvm.tirx.IntImm) for f in fields):
        return None
    return [int(field) for field in fields]


@tvm.transform.module_pass(opt_level=0, name="ConvertToNHWC")
class ConvertToNHWC:
    """NCHW networks to NHWC, permutes at the borders alone."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        return rewrite_functions(mod, _ToNHWC)
