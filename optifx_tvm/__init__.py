"""OptiFX for TVM: aggressive fusion of region operators for CNN inference.

The names below load on first use, so that ``import optifx_tvm`` is quick and ``optifx_tvm.passes``
can be imported without the pipeline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optifx_tvm import config

if TYPE_CHECKING:
    from optifx_tvm.build import compile
    from optifx_tvm.frontend import import_model
    from optifx_tvm.pipelines import pipeline
    from optifx_tvm.runtime import CompiledModel, load

__version__ = "0.1.0"
__all__ = ["CompiledModel", "__version__", "compile", "import_model", "load", "pipeline"]

_LAZY = {
    "CompiledModel": "optifx_tvm.runtime",
    "compile": "optifx_tvm.build",
    "import_model": "optifx_tvm.frontend",
    "load": "optifx_tvm.runtime",
    # Not optifx_tvm.pipeline: importing a submodule of that name would hide the function.
    "pipeline": "optifx_tvm.pipelines",
}

config.set_environment_defaults()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
