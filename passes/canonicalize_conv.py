"""The canonical form that fusion works on: one pass made of the small ones beside it.

Runs first. The numbers are the order, and why:

1. ``ConvertToDataflow``: the others rewrite dataflow blocks.
2. ``CleanUpImports``: one way of writing each thing.
3. ``NormalizePooling``: needs plain reductions; leaves one-pixel images for 6.
4. ``FoldPadding``: before 5, since padding decides whether a shift may move through a convolution.
5. ``FoldBatchNorm``: in the importer's layout, where constants are still (1, C, 1, 1).
6. ``DenseToConv``: reads the layout that operators before a flatten have.
7. ``ConvertToNHWC``.
8. ``CleanUpImports`` again: permutes and reshapes that met each other.
9. ``ConvertPrecision``, if a type is given: on the NHWC form.

After it: convolutions NHWC with OHWI weights (transposed: IHWO) and four-sided padding, poolings
NHWC, per-channel constants (1, 1, 1, C), ``permute_dims`` at network inputs and outputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from optifx_tvm.graph import DTYPE_ATTR
from optifx_tvm.passes.clean_up_imports import CleanUpImports
from optifx_tvm.passes.convert_precision import ConvertPrecision
from optifx_tvm.passes.convert_to_nhwc import ConvertToNHWC
from optifx_tvm.passes.dense_to_conv import DenseToConv
from optifx_tvm.passes.fold_batch_norm import FoldBatchNorm
from optifx_tvm.passes.fold_padding import FoldPadding
from optifx_tvm.passes.normalize_pooling import NormalizePooling


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeConv")
@dataclass(frozen=True)
class CanonicalizeConv:
    """Brings a convolutional network into the canonical form."""

    dtype: str | None = None
    """"float16" for half precision with float32 accumulation, "float32" keeps types; None: what
    ``import_model`` noted on the module, else types are kept."""

    keep_fp32_outputs: bool = True
    """With "float16": whether network outputs stay float32."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Returns a rewritten copy of ``mod``."""
        passes = [
            relax.transform.ConvertToDataflow(min_size=2),
            CleanUpImports(),
            NormalizePooling(),
            FoldPadding(),
            FoldBatchNorm(),
            DenseToConv(),
            ConvertToNHWC(),
            CleanUpImports(),
        ]
        noted = mod.attrs.get(DTYPE_ATTR) if mod.attrs is not None else None
        dtype = self.dtype or noted
        if dtype is not None:
            passes.append(ConvertPrecision(str(dtype), self.keep_fp32_outputs))
        passes.append(relax.transform.CanonicalizeBindings())
        return tvm.transform.Sequential(passes, name="CanonicalizeConv")(mod)
