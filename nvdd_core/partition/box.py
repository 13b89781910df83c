"""Cells of the segments: completion of open axes, folding, perpendicular heights.

`Box` holds one cell per segment. An open axis keeps no trace of the vector that the user gave for it: it is
replaced by a unit vector perpendicular to the periodic ones, so its fractional coordinate is a length and a
dummy vector can't change a distance. `Frame` adds the extent along open axes and gives every row

- ``frac``: fractional coordinates, folded into [0, 1) along periodic axes;
- ``unit``: the same scaled to [0, 1] along open axes too, for partitioning;
- ``offset``: what to subtract from the raw position so that it is folded and near the origin.

Invariant: all three depend on the row's own position and on data that all ranks share, so every rank count
gives the same bits.
Layer: partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvdd_core.errors import InputError

_SINGULAR = 1e-10


@dataclass(frozen=True)
class Box:
    """Completed cells of all segments.

    Attributes
    ----------
    cell : Tensor, shape (S, 3, 3), float64
        Rows are cell vectors; open axes hold perpendicular unit vectors.
    inverse : Tensor, shape (S, 3, 3), float64
        ``x @ inverse`` are fractional coordinates.
    heights : Tensor, shape (S, 3), float64
        Perpendicular distance between opposite faces.
    periodic : Tensor, shape (S, 3), bool
    """

    cell: torch.Tensor
    inverse: torch.Tensor
    heights: torch.Tensor
    periodic: torch.Tensor

    @classmethod
    def from_cells(cls, cell: torch.Tensor, periodic: torch.Tensor, what: str = "segment") -> Box:
        """Complete `cell` (S, 3, 3) where `periodic` (S, 3) is false; `what` is the caller's word for a segment.

        Raises
        ------
        InputError
            If a periodic vector is not finite or the periodic vectors are linearly dependent.
        """
        device = cell.device
        full = torch.stack(
            [
                _complete(c, p, f"{what} {s}")
                for s, (c, p) in enumerate(
                    zip(cell.detach().cpu().double(), periodic.cpu().tolist(), strict=True)
                )
            ]
        )
        inverse = torch.linalg.inv(full)
        heights = 1.0 / torch.linalg.vector_norm(inverse, dim=1)
        return cls(full.to(device), inverse.to(device), heights.to(device), periodic.bool().to(device))

    def fractional(self, positions: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """Return unfolded fractional coordinates (n, 3) of `positions` (n, 3)."""
        return apply_by_segment(positions, self.inverse, segment)


def apply_by_segment(rows: torch.Tensor, matrices: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """Multiply each row vector (n, 3) by its segment's matrix (S, 3, 3)."""
    if matrices.shape[0] == 1:
        return rows @ matrices[0]
    return torch.einsum("ni,nij->nj", rows, matrices[segment])


def _complete(cell: torch.Tensor, periodic: list[bool], name: str) -> torch.Tensor:
    axes = [k for k in range(3) if periodic[k]]
    vectors = cell[axes]
    if not torch.isfinite(vectors).all():
        raise InputError(f"{name}: the cell holds a value that is not finite: {cell.tolist()}")
    full = torch.zeros(3, 3, dtype=torch.float64)
    full[axes] = vectors
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    if axes:
        unit = vectors / lengths.clamp_min(1e-300)[:, None]
        volume = torch.linalg.det(unit @ unit.T).clamp_min(0.0).sqrt()
        if bool((lengths == 0).any()) or float(volume) < _SINGULAR:
            raise InputError(
                f"{name}: the cell is singular along its periodic axes {axes}: {cell.tolist()}; give "
                "linearly independent vectors or set pbc to False along an axis without one"
            )
    # The missing directions span the null space of the periodic vectors: the last right singular vectors.
    if len(axes) < 3:
        basis = (
            torch.linalg.svd(vectors, full_matrices=True)[2] if axes else torch.eye(3, dtype=torch.float64)
        )
        missing = [k for k in range(3) if k not in axes]
        full[missing] = basis[len(axes) :]
    return full


@dataclass(frozen=True)
class Frame:
    """A box with the extent of the rows along open axes.

    Attributes
    ----------
    box : Box
    low, high : Tensor, shape (S, 3), float64
        Range of ``frac``: 0 and 1 along periodic axes, the rows' extent along open ones.
    """

    box: Box
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def from_bounds(cls, box: Box, low: torch.Tensor, high: torch.Tensor) -> Frame:
        """Make a frame from the range (S, 3) of unfolded fractional coordinates over all ranks."""
        empty = low > high
        low = torch.where(box.periodic | empty, torch.zeros_like(low), low)
        high = torch.where(box.periodic | empty, torch.ones_like(high), high)
        return cls(box, low, high)

    def fold(self, positions: torch.Tensor, segment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``frac`` (n, 3) and ``offset`` (n, 3) of raw `positions` (n, 3)."""
        frac = self.box.fractional(positions, segment)
        turns = torch.where(self.box.periodic[segment], torch.floor(frac), torch.zeros_like(frac))
        middle = torch.where(self.box.periodic, 0.5, 0.5 * (self.low + self.high))
        offset = apply_by_segment(turns + middle[segment], self.box.cell, segment)
        # floor leaves frac - turns in [0, 1]; a tiny negative value rounds up to 1.0 exactly
        return frac - turns, offset

    def unit(self, frac: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """Return ``frac`` scaled to [0, 1] along every axis (n, 3)."""
        span = (self.high - self.low).clamp_min(1e-300)
        return ((frac - self.low[segment]) / span[segment]).clamp(0.0, 1.0)

    def lengths(self) -> torch.Tensor:
        """Return the length that ``unit`` = 1 stands for along each axis (S, 3)."""
        return (self.high - self.low) * self.box.heights


def segment_bounds(
    values: torch.Tensor, segment: torch.Tensor, n_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per-segment minimum and maximum (S, 3) of `values` (n, 3); inf and -inf where there is no row."""
    shape = (n_segments, values.shape[1])
    low = values.new_full(shape, float("inf"))
    high = values.new_full(shape, float("-inf"))
    if n_segments == 1:
        if values.shape[0]:
            low, high = values.amin(0, keepdim=True), values.amax(0, keepdim=True)
        return low, high
    index = segment[:, None].expand_as(values)
    return low.scatter_reduce(0, index, values, "amin"), high.scatter_reduce(0, index, values, "amax")
