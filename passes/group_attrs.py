"""The attributes by which functions are known as fusion groups, from AFusion to the kernels."""

from __future__ import annotations

import json

from tvm import relax, tirx

from optifx_tvm.graph import ConvGraph
from optifx_tvm.partition import Tile

GROUP_ATTR, TILE_ATTR, MODE_ATTR = "optifx.group", "optifx.tile", "optifx.mode"
OPAQUE_PATTERN = 8
"""TVM's OpPatternKind kOpaque: FuseOps leaves the kernel alone."""


def group_of(func: relax.Function | tirx.PrimFunc) -> tuple[ConvGraph, Tile] | None:
    """The group and tile that a function's attributes describe, or None."""
    attrs = func.attrs
    if attrs is None or GROUP_ATTR not in attrs:
        return None
    graph = ConvGraph.from_json(str(attrs[GROUP_ATTR]))
    return graph, Tile(**json.loads(str(attrs[TILE_ATTR])))


def with_group_attrs(func: tirx.PrimFunc, source: relax.Function | tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` as a private kernel that remembers the group of ``source``."""
    for key in (GROUP_ATTR, TILE_ATTR, MODE_ATTR):
        if key in source.attrs:
            func = func.with_attr(key, source.attrs[key])
    return func.without_attr("global_symbol").with_attr("op_pattern", OPAQUE_PATTERN)
