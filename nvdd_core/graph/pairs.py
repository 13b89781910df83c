"""Pair search among points in open space, by a field library.

`open_pairs` returns each pair closer than the cutoff once. Periodicity never reaches the library: `neighbors`
lists periodic images as points of their own, so cells that are tiny, huge, skewed, left-handed or singular along
an open axis are all the same case here.

Layer: graph.
"""

from __future__ import annotations

import torch
from vesin import NeighborList as VesinNeighborList

_OPEN_BOX = torch.zeros(3, 3, dtype=torch.float64)


def open_pairs(points: torch.Tensor, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every pair of points closer than `cutoff`, once, in no particular order.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
    cutoff : float

    Returns
    -------
    first, second : Tensor, shape (pairs,), int32
    """
    if points.shape[0] < 2:
        none = torch.zeros(0, dtype=torch.int32, device=points.device)
        return none, none
    search = VesinNeighborList(cutoff=cutoff, full_list=False, n_threads=torch.get_num_threads())
    # views of memory that the search owns; the conversion copies them
    first, second = search.compute(points, _OPEN_BOX.to(points.device), False, "ij", copy=False)
    return first.view(torch.int64).int(), second.view(torch.int64).int()
