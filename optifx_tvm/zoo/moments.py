"""Batch norm statistics for random weights: mean and variance, channel by channel, op by op.

Random statistics would let activations vanish or explode within a few dozen layers, and without
the means all inputs end up with the same output. So both are propagated through the network from
a standard normal input, under the usual simplifications: elements independent, pre-activations
normal, borders ignored. Hence the statistics do not depend on the input's size. Each is then
moved a little at random, so that a batch norm folded wrongly shows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tvm import relax

from optifx_tvm.zoo.weights import parameter_rng


class Moments(NamedTuple):
    """Of each channel, (C,) float64."""

    mean: np.ndarray
    var: np.ndarray


# What a window of k x k correlated elements does: deviations added to the mean, share of variance.
_MAX_SHIFT = {1: 0.0, 2: 0.9, 3: 1.4}
_MAX_SHRINK = {1: 1.0, 2: 1.1, 3: 0.9}
_AVG_SHRINK = {1: 1.0, 2: 0.5, 3: 0.3}


def set_batch_norm_statistics(
    main: relax.Function, values: dict[str, np.ndarray], seed: int
) -> None:
    """Fills in ``running_mean`` and ``running_var`` in ``values``.

    ``main``'s parameters are the input, then those of ``values`` in the same order. What follows
    the last batch norm (global pooling, classifier) is of no interest and not traced.
    """
    data, *parameters = main.params
    names = dict(zip(parameters, values, strict=True))
    channels = int(data.ty.shape[1])
    tracer = _Tracer(values, names, seed)
    tracer.moments[data] = Moments(np.zeros(channels), np.ones(channels))
    for block in main.body.blocks:
        for binding in block.bindings:
            moments = tracer.trace(binding.value)
            if moments is not None:
                tracer.moments[binding.var] = moments


class _Tracer:
    def __init__(
        self, values: dict[str, np.ndarray], names: dict[relax.Var, str], seed: int
    ) -> None:
        self.values, self.names, self.seed = values, names, seed
        self.moments: dict[relax.Var, Moments] = {}

    def trace(self, value: relax.Expr) -> Moments | None:
        """Moments of a bound value; None for what depends on parameters alone or is not needed."""
        if isinstance(value, relax.TupleGetItem):
            return self.moments.get(value.tuple_value)
        if not isinstance(value, relax.Call):
            return None
        op = value.op.name
        if op == "relax.concat":
            parts = [self.moments[field] for field in value.args[0]]
            return Moments(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        x = self.moments.get(value.args[0])
        if x is None:
            return None
        if op in ("relax.nn.conv2d", "relax.nn.conv2d_transpose"):
            return self._convolution(x, value)
        if op == "relax.nn.batch_norm":
            return self._batch_norm(x, value)
        if op == "relax.add":
            y = self.moments.get(value.args[1])
            return x if y is None else Moments(x.mean + y.mean, x.var + y.var)
        if op in ("relax.nn.relu", "relax.clip"):
            return _rectified(x)
        if op == "relax.nn.max_pool2d":
            kernel = int(value.attrs.pool_size[0])
            shifted = x.mean + _MAX_SHIFT[kernel] * np.sqrt(x.var)
            return Moments(shifted, x.var * _MAX_SHRINK[kernel])
        if op == "relax.nn.avg_pool2d":
            return Moments(x.mean, x.var * _AVG_SHRINK[int(value.attrs.pool_size[0])])
        if op in ("relax.strided_slice", "relax.nn.pad"):
            return x
        return None

    def _convolution(self, x: Moments, call: relax.Call) -> Moments:
        weight = self.values[self.names[call.args[1]]]
        sums = weight.sum((2, 3), dtype="float64")
        squares = np.square(weight).sum((2, 3), dtype="float64")
        if call.op.name == "relax.nn.conv2d_transpose":
            # (I, O): each output position meets one window position in strides[0] * strides[1]
            share = 1.0 / (int(call.attrs.strides[0]) * int(call.attrs.strides[1]))
            return Moments(share * (x.mean @ sums), share * (x.var @ squares))
        groups = int(call.attrs.groups)

        def per_group(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
            matrix = matrix.reshape(groups, -1, matrix.shape[1])
            return (matrix @ vector.reshape(groups, -1, 1)).ravel()

        return Moments(per_group(sums, x.mean), per_group(squares, x.var))

    def _batch_norm(self, x: Moments, call: relax.Call) -> Moments:
        scale, bias, mean, var = (self.names[p] for p in call.args[1:])
        rng = parameter_rng(mean, self.seed)
        off_mean = x.mean + 0.1 * np.sqrt(x.var) * rng.standard_normal(x.mean.shape)
        off_var = x.var * rng.uniform(0.8, 1.25, x.var.shape)
        self.values[mean] = off_mean.astype("float32")
        self.values[var] = off_var.astype("float32")
        factor = self.values[scale] / np.sqrt(off_var + call.attrs.epsilon)
        return Moments((x.mean - off_mean) * factor + self.values[bias], x.var * factor**2)


def _rectified(x: Moments) -> Moments:
    """Of max(0, a normal variable); its distribution function as GELU's tanh approximates it."""
    deviation = np.sqrt(x.var)
    z = x.mean / deviation
    below = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    mean = x.mean * below + deviation * density
    square = (x.mean**2 + x.var) * below + x.mean * deviation * density
    return Moments(mean, np.maximum(square - mean**2, 1e-6))
