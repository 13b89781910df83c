"""Rows in cells: who owns them, who needs copies, and how they move. Layer: partition."""

from nvdd_core.partition.box import Box, Frame, apply_by_segment, segment_bounds
from nvdd_core.partition.ghosts import Bounds, all_remote_rows, ghost_destinations
from nvdd_core.partition.migrate import RowPacker, reshard_by_destination
from nvdd_core.partition.partitioner import Bisection, Grid, IndexBlocks, Partitioner, Rows

__all__ = [
    "Bisection",
    "Bounds",
    "Box",
    "Frame",
    "Grid",
    "IndexBlocks",
    "Partitioner",
    "RowPacker",
    "Rows",
    "all_remote_rows",
    "apply_by_segment",
    "ghost_destinations",
    "reshard_by_destination",
    "segment_bounds",
]
