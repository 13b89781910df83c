"""Short lattice vectors for a cell that has long ones.

Key objects: `shorter_basis`, `in_bases`. A sum over a lattice doesn't depend on the vectors that it is written with,
but the error of a mesh grows with lengths over heights of its cell, and an Ewald sum has to look at more wave vectors
in a skewed one. Nothing but the cell is looked at, so all ranks find the same vectors. Layer: plugin.
"""

from __future__ import annotations

import torch
from ase.geometry import minkowski_reduce

Bases = tuple[torch.Tensor | None, ...]
"""Of each system, as from `shorter_basis`."""

NOTABLY_SHORTER = 0.9
"""Product of lengths, relative to that of the cell's own vectors, up to which others are taken.

Common lattices (hexagonal, face-centred) have several bases of equal lengths: a cell that fluctuates about one of them
has to keep its basis, and with it its mesh.
"""


def shorter_basis(cell: torch.Tensor) -> torch.Tensor | None:
    """Return the whole numbers that make a cell's vectors the shortest ones of their lattice.

    Parameters
    ----------
    cell : Tensor, shape (3, 3), float64
        On the CPU.

    Returns
    -------
    Tensor, shape (3, 3), float64, or None
        Rows of this times `cell` are lattice vectors, the longest first, since ranks share a mesh along the first axis.
        None where those of `cell` are about as short.
    """
    whole = minkowski_reduce(cell.numpy())[1]
    basis = torch.from_numpy(-whole).flip(0).double()  # negative, so of the same handedness
    return basis if _box(basis @ cell) < NOTABLY_SHORTER * _box(cell) else None


def _box(cell: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(cell, dim=1).prod())


def in_bases(cells: torch.Tensor, bases: Bases) -> list[torch.Tensor]:
    """Return cells (S, 3, 3) with the vectors that `bases` make, differentiable with respect to `cells`."""
    return [cell if basis is None else basis @ cell for cell, basis in zip(cells, bases, strict=True)]
