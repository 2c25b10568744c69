"""The zoo's networks as torch modules that hold the same weights, and torch's ways to run them.

For ``bench_networks.py``. Needs torch, torchvision and, for NASNet, timm: none is a dependency of
the package, so they are imported when they are used.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optifx_tvm import zoo
from optifx_tvm.zoo.moments import set_batch_norm_statistics
from optifx_tvm.zoo.weights import random_weights

NETWORKS = (
    "squeezenet1_1",
    "mobilenet_v2",
    "googlenet",
    "resnet18",
    "resnet50",
    "densenet121",
    "unet",
    "nasnet_a_large",
)
PEERS = ("cudnn-nchw", "cudnn-nhwc", "inductor", "inductor-max-autotune")
_SMALL = 64
"""Height and width of an input that every network takes."""
_UNET_WIDTHS = (64, 128, 256, 512, 1024)


def missing_packages(networks: Sequence[str]) -> list[str]:
    """The packages that these networks need and that are not installed."""
    needed = ["torch", "torchvision"] + (["timm"] if "nasnet_a_large" in networks else [])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def zoo_weights(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The parameters that ``zoo.build(name, seed=seed)`` binds, by name, float32.

    Their batch norm statistics fit the activations, so that these neither vanish nor explode and
    outputs depend on every input: with torch's own initial weights several of these networks
    forget their input, and an output then says little about the kernels.
    """
    main = zoo.build(name, bind=False)["main"]
    shapes = {str(p.name): tuple(int(n) for n in p.ty.shape) for p in main.params[1:]}
    values = random_weights(shapes, seed)
    set_batch_norm_statistics(main, values, seed)
    return values


def torch_network(name: str, weights: Mapping[str, np.ndarray]) -> Any:
    """The reference implementation in eval mode, float32 on the CPU, with ``weights``."""
    torch = importlib.import_module("torch")
    if name == "unet":
        module = _unet()
    elif name == "nasnet_a_large":
        module = importlib.import_module("timm").create_model("nasnetalarge", pretrained=False)
    else:
        options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        create = getattr(importlib.import_module("torchvision").models, name)
        module = create(weights=None, **options)
    state = {key: torch.from_numpy(value) for key, value in weights.items()}
    counters = {k: v for k, v in module.state_dict().items() if k.endswith("num_batches_tracked")}
    module.load_state_dict(state | counters)
    return module.eval()


def fold_batch_norm(module: Any) -> Any:
    """A copy whose batch norms behind a convolution are folded into it, as users of cuDNN do.

    What follows what is seen in a small inference, since not every network can be traced.
    """
    torch = importlib.import_module("torch")
    folded = copy.deepcopy(module)
    convolved: dict[int, Any] = {}
    outputs = []  # kept, so that no two have the same id
    pairs = []

    def watch_conv(conv: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output)
        convolved[id(output)] = conv

    def watch_norm(norm: Any, inputs: Any, _output: Any) -> None:
        if id(inputs[0]) in convolved:
            pairs.append((convolved[id(inputs[0])], norm))

    hooks = []
    for layer in folded.modules():
        if isinstance(layer, torch.nn.Conv2d):
            hooks.append(layer.register_forward_hook(watch_conv))
        elif isinstance(layer, torch.nn.BatchNorm2d):
            hooks.append(layer.register_forward_hook(watch_norm))
    with torch.no_grad():
        folded(torch.zeros(1, 3, _SMALL, _SMALL))
    for hook in hooks:
        hook.remove()
    for conv, norm in pairs:
        fused = torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
        conv.weight, conv.bias = fused.weight, fused.bias
    norms = {norm for _, norm in pairs}
    for parent in list(folded.modules()):
        for name, child in list(parent.named_children()):
            if child in norms:
                setattr(parent, name, torch.nn.Identity())
    return folded


def torch_call(peer: str, module: Any, data: Any) -> tuple[Callable[[], Any], Any, int]:
    """What runs ``module`` the way of ``peer``; its input on the GPU; bytes of its weights.

    ``data``: the input, NCHW, float32 or float16 on the GPU; the result may be another tensor.
    Inductor's kernels are those of its modes reduce-overhead and max-autotune, but their CUDA graph
    is the caller's business: so neither guards nor copies of the input cost time.
    """
    torch = importlib.import_module("torch")
    module = copy.deepcopy(module if peer.startswith("inductor") else fold_batch_norm(module))
    layout = torch.contiguous_format if peer == "cudnn-nchw" else torch.channels_last
    module = module.to("cuda", data.dtype).to(memory_format=layout)
    data = data.clone(memory_format=layout)
    tensors = (*module.parameters(), *module.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not peer.startswith("inductor"):
        return lambda: module(data), data, size
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    mode = "default" if peer == "inductor" else "max-autotune-no-cudagraphs"
    compiled = torch.compile(module, mode=mode, dynamic=False)
    return lambda: compiled(data), data, size


def warm_inductor(peer: str, network: str, batch: int, size: int, dtype: str) -> float:
    """Fill Inductor's caches on disk for one case, in a process of its own; seconds.

    It saves the measuring process the compilation of kernels; with frozen weights torch may trace
    and lower the network once more. Nothing that this process has timed is used.
    """
    start = time.perf_counter()
    torch = importlib.import_module("torch")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    data = torch.zeros(batch, 3, size, size, device="cuda", dtype=getattr(torch, dtype))
    call, _, _ = torch_call(peer, torch_network(network, zoo_weights(network)), data)
    with torch.no_grad():
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def forget_compiled(peers: Sequence[str]) -> None:
    """Drop what torch.compile keeps of former networks, if it is among the peers."""
    if any(peer.startswith("inductor") for peer in peers):
        importlib.import_module("torch._dynamo").reset()


def _unet() -> Any:
    """milesial/Pytorch-UNet with transposed convolutions, for sizes that 16 divides."""
    nn = importlib.import_module("torch").nn
    cat = importlib.import_module("torch").cat

    class DoubleConv(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            layers = []
            for channels in (inputs, outputs):
                layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
                layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            self.double_conv = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            return self.double_conv(x)

    class Down(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs))

        def forward(self, x: Any) -> Any:
            return self.maxpool_conv(x)

    class Up(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
            self.conv = DoubleConv(inputs, outputs)

        def forward(self, x: Any, skip: Any) -> Any:
            return self.conv(cat([skip, self.up(x)], 1))

    class Head(nn.Module):
        def __init__(self, inputs: int, classes: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(inputs, classes, 1)

        def forward(self, x: Any) -> Any:
            return self.conv(x)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = _UNET_WIDTHS
            self.inc = DoubleConv(3, widths[0])
            self.down1, self.down2, self.down3, self.down4 = (
                Down(*pair) for pair in zip(widths, widths[1:], strict=False)
            )
            self.up1, self.up2, self.up3, self.up4 = (
                Up(*pair) for pair in zip(widths[:0:-1], widths[-2::-1], strict=True)
            )
            self.outc = Head(widths[0], 2)

        def forward(self, x: Any) -> Any:
            skips = [self.inc(x)]
            for down in (self.down1, self.down2, self.down3, self.down4):
                skips.append(down(skips[-1]))
            x = skips.pop()
            for up in (self.up1, self.up2, self.up3, self.up4):
                x = up(x, skips.pop())
            return self.outc(x)

    return UNet()
