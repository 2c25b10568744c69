"""Relax passes. Import them from ``optifx_tvm.passes``."""

from __future__ import annotations

import importlib
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from optifx_tvm import errors
from optifx_tvm.passes.afusion import AFusion
from optifx_tvm.passes.canonicalize_conv import CanonicalizeConv
from optifx_tvm.passes.clean_up_imports import CleanUpImports
from optifx_tvm.passes.convert_precision import ConvertPrecision
from optifx_tvm.passes.convert_to_nhwc import ConvertToNHWC
from optifx_tvm.passes.dense_to_conv import DenseToConv
from optifx_tvm.passes.fold_batch_norm import FoldBatchNorm
from optifx_tvm.passes.fold_padding import FoldPadding
from optifx_tvm.passes.lower_fusion_groups import LowerFusionGroups
from optifx_tvm.passes.normalize_pooling import NormalizePooling
from optifx_tvm.passes.restore_transposed_conv_layout import RestoreTransposedConvLayout
from optifx_tvm.passes.schedule_fallback import ScheduleFallback
from optifx_tvm.passes.schedule_fusion_groups import ScheduleFusionGroups

__all__ = [
    "AFusion",
    "CanonicalizeConv",
    "CleanUpImports",
    "ConvertPrecision",
    "ConvertToNHWC",
    "DenseToConv",
    "FoldBatchNorm",
    "FoldPadding",
    "LowerFusionGroups",
    "NormalizePooling",
    "RestoreTransposedConvLayout",
    "ScheduleFallback",
    "ScheduleFusionGroups",
]

# TVM's pass runner is C++: it gives an exception back as the class registered under its name.
for _error in (errors.OptiFXError, *errors.OptiFXError.__subclasses__()):
    tvm_ffi.register_error(_error.__name__, _error)
# As for Ctrl-C while a pass runs: without this it comes back as a RuntimeError without a message.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)


@relax.register_pipeline("optifx")
def _pipeline(**options: Any) -> tvm.transform.Pass:
    """``relax.get_pipeline("optifx")``: here, so that it is known wherever the passes are."""
    # By name and only when called: it imports this package.
    return importlib.import_module("optifx_tvm.pipelines").pipeline(**options)
