"""Neighbour lists of local rows. Layer: graph."""

from nvdd_core.graph.neighbors import Images, NeighborList, build_neighbors
from nvdd_core.graph.pairs import open_pairs

__all__ = ["Images", "NeighborList", "build_neighbors", "open_pairs"]
