"""The interface of a cost model."""

from __future__ import annotations

from typing import Protocol

from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile


class CostModel(Protocol):
    """Predicts how long one kernel takes. Equal structures must get equal predictions."""

    def predict(self, group: ConvGraph, tile: Tile) -> float:
        """Microseconds of ``group`` with ``tile``, launch included; infinite if it does not fit.

        Raises RegionError or ChannelError if the group can't be tiled like this.
        """
        ...
