"""Which owned rows other ranks need as ghosts.

A row is needed by a rank when some periodic image of it lies within `width` of that rank's bounding box,
measured perpendicular to the faces: two points further apart than `width` along any such direction are further
apart than `width`. Boxes are tight around the rows that a rank owns now, wherever they have moved.

Invariant: a needed row is sent once, not once an image.
Layer: partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvdd_core.comm import Mesh
from nvdd_core.partition.box import Frame, segment_bounds

_MARGIN = 1e-9


@dataclass(frozen=True)
class Bounds:
    """Bounding boxes in folded fractional coordinates, shape (ranks, S, 3) each; low > high where empty."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def gather(cls, frac: torch.Tensor, segment: torch.Tensor, n_segments: int, mesh: Mesh) -> Bounds:
        """Collect every rank's bounding boxes (collective)."""
        low, high = segment_bounds(frac, segment, n_segments)
        both = mesh.all_gather_vector(torch.stack([low, high]).cpu()).to(frac.device)
        return cls(both[:, 0], both[:, 1])


def ghost_destinations(
    frac: torch.Tensor, segment: torch.Tensor, bounds: Bounds, frame: Frame, width: float, mesh: Mesh
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Choose the owned rows to send to each rank.

    Parameters
    ----------
    frac : Tensor, shape (n_owned, 3)
        Folded fractional coordinates.
    segment : Tensor, shape (n_owned,)
    bounds : Bounds
    frame : Frame
    width : float
        Ghost width, in the unit of the positions.
    mesh : Mesh

    Returns
    -------
    send_index : Tensor, shape (sum(send_splits),), int64
    send_splits : tuple of int, length ``mesh.size``
    """
    reach = width * (1 + _MARGIN) / frame.box.heights
    index: list[torch.Tensor] = []
    for rank in range(mesh.size):
        if rank == mesh.rank:
            index.append(torch.zeros(0, dtype=torch.int64, device=frac.device))
        else:
            needed = _near(frac, segment, bounds.low[rank], bounds.high[rank], reach, frame.box.periodic)
            index.append(needed.nonzero()[:, 0])
    return torch.cat(index), tuple(int(i.shape[0]) for i in index)


def _near(
    frac: torch.Tensor,
    segment: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    reach: torch.Tensor,
    periodic: torch.Tensor,
) -> torch.Tensor:
    low, high, reach = low[segment], high[segment], reach[segment]
    ahead = frac - low
    # distance past the upper face going up, and before the lower face going down, around a periodic axis
    around = torch.where(periodic[segment], ahead - torch.floor(ahead), ahead)
    size = high - low
    above = around - size
    below = torch.where(periodic[segment], 1.0 - around, -around)
    gap = torch.minimum(above.clamp_min(0.0), torch.where(above <= 0, torch.zeros_like(below), below))
    gap = torch.where(periodic[segment], gap, torch.maximum(above, below).clamp_min(0.0))
    return ((gap < reach) & (size >= 0)).all(1)


def all_remote_rows(n_owned: int, mesh: Mesh, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Send every owned row to every other rank: the ghost rule of graph partition."""
    splits = tuple(0 if r == mesh.rank else n_owned for r in range(mesh.size))
    return torch.arange(n_owned, device=device).repeat(mesh.size - 1), splits
