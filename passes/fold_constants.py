"""Evaluates operators on constants with numpy, for CleanUpImports.

TVM's own ``FoldConstant`` compiles a kernel for every operator and shape (some 0.1 s each); the
operators that importers put on weights and biases are a line of numpy each. Operators missing here
are left for ``FoldConstant``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from optifx_tvm.passes.dataflow import (
    Call,
    constant,
    dtype_of,
    ints,
    op_name,
    static_shape,
)

# A broadcast of a scalar to an image is better left to the kernel that reads it.
MAX_GROWTH_ELEMENTS = 1 << 16


def _axes(call: Call) -> tuple[int, ...] | None:
    axis = call.attrs.axis
    return None if axis is None else ints(axis)


def _permute(call: Call, x: np.ndarray) -> np.ndarray:
    axes = call.attrs.axes
    return np.transpose(x, None if axes is None else ints(axes))


def _to_shape(call: Call, x: np.ndarray) -> np.ndarray:
    return np.reshape(x, static_shape(call) or ())


def _broadcast(call: Call, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, static_shape(call) or ())


def _clip(call: Call, x: np.ndarray) -> np.ndarray:
    return np.clip(x, float(call.args[1].value), float(call.args[2].value))


def _reduce(function: Callable) -> Callable:
    def fold(call: Call, x: np.ndarray) -> np.ndarray:
        return function(x, axis=_axes(call), keepdims=bool(call.attrs.keepdims))

    return fold


def _elementwise(function: Callable) -> Callable:
    return lambda call, *arrays: function(*arrays)


def _cast(call: Call, x: np.ndarray) -> np.ndarray:
    return x.astype(str(call.attrs.dtype))


_FOLDERS: dict[str, Callable[..., np.ndarray]] = {
    "relax.reshape": _to_shape,
    "relax.flatten": _to_shape,
    "relax.expand_dims": _to_shape,
    "relax.squeeze": _to_shape,
    "relax.nn.batch_flatten": _to_shape,
    "relax.broadcast_to": _broadcast,
    "relax.permute_dims": _permute,
    "relax.astype": _cast,
    "relax.clip": _clip,
    "relax.add": _elementwise(np.add),
    "relax.subtract": _elementwise(np.subtract),
    "relax.multiply": _elementwise(np.multiply),
    "relax.divide": _elementwise(np.divide),
    "relax.maximum": _elementwise(np.maximum),
    "relax.minimum": _elementwise(np.minimum),
    "relax.power": _elementwise(np.power),
    "relax.negative": _elementwise(np.negative),
    "relax.sqrt": _elementwise(np.sqrt),
    "relax.rsqrt": _elementwise(lambda x: 1 / np.sqrt(x)),
    "relax.exp": _elementwise(np.exp),
    "relax.abs": _elementwise(np.abs),
    "relax.square": _elementwise(np.square),
    "relax.isnan": _elementwise(np.isnan),
    "relax.where": _elementwise(np.where),
    "relax.mean": _reduce(np.mean),
    "relax.sum": _reduce(np.sum),
    "relax.zeros": lambda call: np.zeros(static_shape(call) or ()),
    "relax.ones": lambda call: np.ones(static_shape(call) or ()),
    "relax.zeros_like": lambda call, x: np.zeros_like(x),
    "relax.ones_like": lambda call, x: np.ones_like(x),
}


def fold_call(call: Call) -> GenericConst | None:
    """The constant that ``call`` (normalised) evaluates to; None when an argument is not constant,
    the operator is not known here, or the result would be a large broadcast."""
    folder = _FOLDERS.get(op_name(call) or "")
    if folder is None:
        return None
    arrays = []
    for arg in call.args:
        if isinstance(arg, GenericConst):
            arrays.append(arg.value.numpy())
        elif isinstance(arg.ty, relax.TensorType):
            return None
    shape, dtype = static_shape(call), dtype_of(call)
    if shape is None or dtype == "bfloat16":
        return None
    size = int(np.prod(shape))
    if size > MAX_GROWTH_ELEMENTS and size > max((a.size for a in arrays), default=0):
        return None
    # Integer division rounds differently in numpy and TVM.
    if op_name(call) == "relax.divide" and not np.issubdtype(np.dtype(dtype), np.floating):
        return None
    with np.errstate(all="ignore"):
        return constant(np.asarray(folder(call, *arrays)), dtype)
