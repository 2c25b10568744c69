"""Environment variables: the only place that reads or sets them (the README lists them).

``TVM_CUDA_COMPILE_MODE``: TVM's default, NVRTC, needs the ``cuda-bindings`` package; ``nvcc`` comes
with every CUDA toolkit, so it is our default. A value set by the user is kept.
"""

from __future__ import annotations

import os


def set_environment_defaults() -> None:
    """Set the variables that TVM reads later, where the user has not."""
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")


def cuda_compile_mode() -> str:
    """How TVM compiles CUDA sources: "nvcc" or "nvrtc"."""
    return os.environ.get("TVM_CUDA_COMPILE_MODE", "nvcc").lower()
