"""Relax passes. Import them from ``optifx_tvm.passes``."""

from __future__ import annotations

import tvm_ffi

from optifx_tvm import errors
from optifx_tvm.passes.afusion import AFusion
from optifx_tvm.passes.canonicalize_conv import CanonicalizeConv
from optifx_tvm.passes.clean_up_imports import CleanUpImports
from optifx_tvm.passes.convert_precision import ConvertPrecision
from optifx_tvm.passes.convert_to_nhwc import ConvertToNHWC
from optifx_tvm.passes.dense_to_conv import DenseToConv
from optifx_tvm.passes.fold_batch_norm import FoldBatchNorm
from optifx_tvm.passes.fold_constants import FoldConstantsInNumpy
from optifx_tvm.passes.fold_padding import FoldPadding
from optifx_tvm.passes.lower_fusion_groups import LowerFusionGroups
from optifx_tvm.passes.normalize_pooling import NormalizePooling
from optifx_tvm.passes.restore_layout import RestoreTransposedConvLayout
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
    "FoldConstantsInNumpy",
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
