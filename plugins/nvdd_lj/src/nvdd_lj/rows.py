"""Rows and pairs of one neighbour list, as the kernels read them.

Key object: `PairRows`. Invariant: everything here stays as it is between two rebuilds of the list.
Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvdd_lj.variants import Variant, Want


@dataclass(frozen=True, eq=False)
class PairRows:
    """Rows, pairs and coefficients that stay as they are between two rebuilds.

    Attributes
    ----------
    n_owned, n_local : int
        Rows of this rank, and with ghosts. Extended rows are ``[owned | ghost | image]``.
    row_splits, senders : (n_owned + 1,), (E,) int32
        For each owned row the extended rows it reads.
    image_rows, image_shifts : (M,), (M, 3) int64
        Which local row an image shows, and by how many cell vectors it is moved.
    system : (n_local,) int64
        System of a row.
    n_systems : int
        Number of systems.
    half : bool
        Whether pairs of owned rows are listed once.
    species : (n_local + M,) int32, optional
        Species of extended rows; None when one species serves all.
    coefficients : (T, T, 4)
        As `Parameters.coefficients`, in the dtype of the kernels.
    cutoff : float
        Angstrom.
    linear_term : bool
        Whether the last coefficient is in use.
    """

    n_owned: int
    n_local: int
    row_splits: torch.Tensor
    senders: torch.Tensor
    image_rows: torch.Tensor
    image_shifts: torch.Tensor
    system: torch.Tensor
    n_systems: int
    half: bool
    species: torch.Tensor | None
    coefficients: torch.Tensor
    cutoff: float
    linear_term: bool

    @property
    def n_image(self) -> int:
        """Number of images."""
        return self.image_rows.shape[0]

    @property
    def n_extended(self) -> int:
        """Number of extended rows."""
        return self.n_local + self.n_image

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of positions and results."""
        return self.coefficients.dtype

    @property
    def device(self) -> torch.device:
        """Device of everything."""
        return self.coefficients.device

    def variant(self, want: Want) -> Variant:
        """Kernel variant for a want."""
        return Variant(self.dtype, self.half, self.species is not None, self.linear_term, want)

    def home(self) -> torch.Tensor:
        """Owned row that each extended row shows, -1 for other ranks' rows, (n_extended,) int64."""
        local = torch.arange(self.n_local, device=self.device)
        home = torch.cat((local, self.image_rows))
        return torch.where(home < self.n_owned, home, -1)
