"""The blocks of ``blocks.py`` as torch modules, and torch's ways to run them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from blocks import Block, Layer, block_weights

PEERS = ("cudnn-nchw", "cudnn-nhwc", "inductor")


def torch_block(block: Block, fused: bool = False) -> Any:
    """A module, float32 on the CPU, from and to tensors (N, H, W, C) whatever their strides.

    ``fused``: with cuDNN's calls for convolution + bias (+ residual) + ReLU, on a GPU alone.
    """
    torch = importlib.import_module("torch")

    class TorchBlock(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.ParameterList(
                torch.nn.Parameter(torch.from_numpy(value), requires_grad=False)
                for values in block_weights(block)
                for value in values
            )

        def forward(self, *inputs: Any) -> Any:
            values = [x.permute(0, 3, 1, 2) for x in inputs]
            parameters = iter(self.values)
            for layer in block.layers:
                chosen = [values[i] for i in layer.inputs]
                count = 2 if layer.op in ("conv", "transposed", "affine", "dense") else 0
                own = [next(parameters) for _ in range(count)]
                values.append(_apply(torch, layer, chosen, own, fused))
            return values[-1].permute(0, 2, 3, 1)

    return TorchBlock().eval()


def _apply(
    torch: Any, layer: Layer, inputs: Sequence[Any], parameters: Sequence[Any], fused: bool
) -> Any:
    x, functional = inputs[0], torch.nn.functional
    if layer.op == "concat":
        return torch.cat(list(inputs), 1)
    if layer.op == "relu":
        return functional.relu(x)
    if layer.op == "global_pool":
        return functional.adaptive_avg_pool2d(x, 1)
    if layer.op == "max_pool":
        return functional.max_pool2d(x, layer.kernel, layer.stride, layer.padding)
    if layer.op == "avg_pool":
        return functional.avg_pool2d(x, layer.kernel, layer.stride, layer.padding)
    weight, bias = parameters
    if layer.op == "dense":
        return functional.linear(x.flatten(1), weight, bias)[:, :, None, None]
    if layer.op == "transposed":
        return functional.conv_transpose2d(x, weight, bias, layer.stride)
    if layer.op == "affine":
        y = x * weight[:, None, None] + bias[:, None, None]
    elif fused and layer.act == "relu":
        stride, padding = (layer.stride,) * 2, (layer.padding,) * 2
        window = (bias, stride, padding, (1, 1), layer.groups)
        if len(inputs) == 1:
            return torch.cudnn_convolution_relu(x, weight, *window)
        return torch.cudnn_convolution_add_relu(x, weight, inputs[1], 1, *window)
    else:
        y = functional.conv2d(x, weight, bias, layer.stride, layer.padding, 1, layer.groups)
        for added in inputs[1:]:
            y = y + added
    if layer.act == "relu":
        return functional.relu(y)
    return functional.relu6(y) if layer.act else y


def reference(block: Block, data: Sequence[Any]) -> Any:
    """The block's output (N, H, W, C) in float64, on the CPU, computed where ``data`` is."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        module = torch_block(block).to(data[0].device, torch.float64)
        return module(*(x.double() for x in data)).cpu()


def peer_call(
    peer: str, block: Block, data: Sequence[Any]
) -> tuple[Callable[[], Any], tuple[Any, ...], int]:
    """What runs the block the way of ``peer``; its inputs; bytes of its weights.

    ``data``: (N, H, W, C) on the GPU, float32 or float16; copies in the peer's layout are read.
    """
    torch = importlib.import_module("torch")
    nchw = peer == "cudnn-nchw"
    layout = torch.contiguous_format if nchw else torch.channels_last
    module = torch_block(block, fused=peer != "inductor")
    module = module.to("cuda", data[0].dtype).to(memory_format=layout)
    read = tuple(
        x.permute(0, 3, 1, 2).clone(memory_format=layout).permute(0, 2, 3, 1) for x in data
    )
    size = sum(value.numel() * value.element_size() for value in module.values)
    if peer == "inductor":
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.freezing = True
        module = torch.compile(module, dynamic=False)
    return lambda: module(*read), read, size


def warm_block(block: Block, batch: int, dtype: str) -> float:
    """Fill Inductor's caches on disk for one block, in a process of its own; seconds."""
    start = time.perf_counter()
    torch = importlib.import_module("torch")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    kind = getattr(torch, dtype)
    data = [torch.zeros(batch, *shape, device="cuda", dtype=kind) for shape in block.inputs]
    call, _, _ = peer_call("inductor", block, data)
    with torch.no_grad():
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
