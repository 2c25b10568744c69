"""Can a group be computed in tiles of a given size?"""

from __future__ import annotations

from optifx_tvm.analysis.channels import ChannelError, channel_plan
from optifx_tvm.analysis.region import RegionError, tile_space
from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile


def tile_fault(group: ConvGraph, tile: Tile) -> str | None:
    """Why ``group`` can't be computed in tiles like ``tile``; None if it can."""
    if min(tile.height, tile.width, tile.channel_slices) < 1:
        return f"tile {tile.height}x{tile.width} in {tile.channel_slices} slices is not positive"
    if len({group.shape(node.name)[0] for node in group.nodes}) > 1:
        return "its operators differ in batch size"
    try:
        tile_space(group, (tile.height, tile.width))
        channel_plan(group, tile.channel_slices)
    except (RegionError, ChannelError) as error:
        return str(error)
    return None
