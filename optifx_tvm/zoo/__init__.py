"""The yardstick: nine networks as Relax modules, with random or loaded weights.

``build`` gives what an importer would: NCHW, one input ``data``, weights as constants, batch norms
still in place. Parameter names equal those of torchvision (GoogLeNet without auxiliary heads,
ResNet, DenseNet, MobileNetV2, SqueezeNet), timm (NASNet-A-Large), pretrained-models
(NASNet-A-Mobile) and milesial/Pytorch-UNet, so that their checkpoints load by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from optifx_tvm.errors import ModelError
from optifx_tvm.graph import DTYPES
from optifx_tvm.zoo.densenet import DenseNet121
from optifx_tvm.zoo.googlenet import GoogLeNet
from optifx_tvm.zoo.mobilenet import MobileNetV2
from optifx_tvm.zoo.moments import set_batch_norm_statistics
from optifx_tvm.zoo.nasnet import nasnet_a_large, nasnet_a_mobile
from optifx_tvm.zoo.onnx_export import to_onnx
from optifx_tvm.zoo.resnet import resnet18, resnet50
from optifx_tvm.zoo.squeezenet import SqueezeNet11
from optifx_tvm.zoo.unet import UNet
from optifx_tvm.zoo.weights import load_weights, match_weights, random_weights

__all__ = ["build", "load_weights", "names", "to_onnx"]


@dataclass(frozen=True)
class _Network:
    create: Callable[[], nn.Module]
    size: int
    """Default height and width."""
    smallest: int
    """The least height or width that leaves no pooling or slice without input."""


_NETWORKS = {
    "googlenet": _Network(GoogLeNet, 224, 15),
    "resnet18": _Network(resnet18, 224, 1),
    "resnet50": _Network(resnet50, 224, 1),
    "densenet121": _Network(DenseNet121, 224, 29),
    "mobilenet_v2": _Network(MobileNetV2, 224, 1),
    "squeezenet1_1": _Network(SqueezeNet11, 224, 17),
    "nasnet_a_mobile": _Network(nasnet_a_mobile, 224, 19),
    "nasnet_a_large": _Network(nasnet_a_large, 331, 19),
    "unet": _Network(UNet, 256, 16),
}


def names() -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(_NETWORKS)


def build(
    name: str,
    input_shape: Sequence[int] | None = None,
    dtype: str = "float32",
    batch: int = 1,
    seed: int = 0,
    bind: bool = True,
    weights: Mapping[str, np.ndarray] | str | Path | None = None,
) -> tvm.IRModule:
    """A network as a module whose entry is ``main``: ``data`` (N, 3, H, W) -> logits (N, 1000).

    U-Net's output is (N, 2, H, W). ``input_shape`` defaults to (``batch``, 3, S, S) with the
    network's usual S. With ``bind`` the parameters are constants: those of ``weights`` (what
    ``load_weights`` returns, or a path for it), else random ones that depend on ``seed`` and the
    parameter's name, not on the input's shape. Without ``bind`` they are further inputs.
    ``ModelError``: unknown name, dtype that is not float32 or float16, unfit shape or weights.
    """
    network = _NETWORKS.get(name)
    if network is None:
        raise ModelError(f"no network {name!r} in the zoo; it has {', '.join(_NETWORKS)}")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} for zoo:{name} is not supported; use float32 or float16")
    default = (batch, 3, network.size, network.size)
    shape = default if input_shape is None else tuple(input_shape)
    _check_shape(name, network, shape)
    net = network.create()
    net.to(dtype)
    exported, parameters = net.export_tvm(spec={"forward": {"data": nn.spec.Tensor(shape, dtype)}})
    main = exported["forward"].with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": main})
    if not bind:
        return module
    shapes = {key: tuple(int(n) for n in p.shape) for key, p in parameters}
    if weights is None:
        values = random_weights(shapes, seed)
        set_batch_norm_statistics(main, values, seed)
    else:
        loaded = weights if isinstance(weights, Mapping) else load_weights(weights)
        values = match_weights(loaded, shapes, f"zoo:{name}")
    tensors = {key: tvm.runtime.tensor(value.astype(dtype)) for key, value in values.items()}
    return relax.transform.BindParams("main", tensors)(module)


def _check_shape(name: str, network: _Network, shape: tuple[int, ...]) -> None:
    if len(shape) != 4 or shape[1] != 3 or shape[0] < 1:
        raise ModelError(
            f"input shape {list(shape)} for zoo:{name} is not supported; use [N, 3, H, W]"
        )
    if min(shape[2:]) < network.smallest:
        raise ModelError(
            f"input of {shape[2]}x{shape[3]} is too small for zoo:{name}; "
            f"use at least {network.smallest}x{network.smallest}"
        )
