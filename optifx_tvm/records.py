"""What ScheduleFusionGroups asks a database of tuned, verified schedules."""

from __future__ import annotations

from typing import Protocol

from tvm.target import Target

from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile


class Database(Protocol):
    """Records of groups on devices; anything with this method will do."""

    def best_tile(self, group: ConvGraph, target: Target) -> Tile | None:
        """The fastest tile on record for ``group`` (canonical names) on ``target``, or None.

        Every record must have been checked against an unfused reference on that device.
        """
        ...
