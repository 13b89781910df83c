"""The energy and the field of charges on a mesh, on CPUs, whose ranks share the transforms where they share memory.

Key object: `MeshWork`. Every rank has spread its charges onto a mesh of its own. Then each sums and transforms its
planes (of the first axis), convolves its columns (of the second), and transforms its planes back, in place in memory
that all see. In between ranks wait for each other; nothing is sent.

Invariant: what a rank writes no other one reads or writes before they have met.
Layer: plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvdd_core.comm import Mesh
from nvdd_pme.fourier_kernels import convolve_columns, invert_rows
from nvdd_pme.slabs import half_weights, length, shares


@dataclass(frozen=True)
class MeshWork:
    """The memory for one mesh, and this rank's part of the work on it.

    Attributes
    ----------
    charges : list of Tensor, shape (K0, K1, K2)
        Each rank's.
    wave : Tensor, shape (K0, K1, K2 // 2 + 1), complex128
        Of all charges.
    field : Tensor, shape (K0, K1, K2)
        Half of the potential of all charges; good until this rank solves again.
    rank : int
        This one's place in `charges`.
    meet : callable
        Waits for all ranks.
    """

    charges: list[torch.Tensor]
    wave: torch.Tensor
    field: torch.Tensor
    rank: int
    meet: Callable[[], None]

    @classmethod
    def shared(cls, mesh: tuple[int, int, int], ranks: Mesh) -> MeshWork:
        """Share the work with ranks that share memory (collective)."""
        half = (mesh[0], mesh[1], mesh[2] // 2 + 1)
        real, complex_ = 8 * math.prod(mesh), 16 * math.prod(half)
        charges = [one.view(torch.float64).view(mesh) for one in ranks.shared_pieces("pme charges", real)]
        wave = ranks.shared_pieces("pme waves", complex_)[0].view(torch.complex128).view(half)
        field = ranks.shared_pieces("pme field", real)[0].view(torch.float64).view(mesh)
        return cls(charges, wave, field, ranks.rank, ranks.barrier)

    @classmethod
    def alone(cls, charge: torch.Tensor) -> MeshWork:
        """Do all of it; the field takes the place of the charges."""
        k0, k1, k2 = charge.shape
        wave = charge.new_empty((k0, k1, k2 // 2 + 1), dtype=torch.complex128)
        return cls([charge], wave, charge, 0, lambda: None)

    @property
    def mine(self) -> torch.Tensor:
        """The charges of this rank."""
        return self.charges[self.rank]

    def solve(
        self, influence: torch.Tensor, squares: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fill in the field (collective).

        Ranks meet four times: when charges are spread, which are read up to the second time; when the wave of all
        planes is there; when all columns are convolved; and when the field is there, which a rank may read until it
        comes to the first of the next four.

        Parameters
        ----------
        influence : Tensor, shape (K0, K1, K2 // 2 + 1), float64
        squares : bool
            Whether the second result is wanted.

        Returns
        -------
        energy : Tensor, shape ()
            This rank's share.
        squared : Tensor, shape (K0, K1, K2 // 2 + 1), or None
            This rank's share of squared absolute values of the transform, places that stand for two counted twice.
        """
        size, (k0, k1, k2) = len(self.charges), self.field.shape
        planes, columns = shares(k0, size)[self.rank], shares(k1, size)[self.rank]
        self.meet()
        total = self._total(planes)
        if length(planes):
            self.wave[planes] = torch.fft.rfft2(total)
        self.meet()
        squared = torch.zeros_like(influence) if squares else None
        convolve_columns(self.wave, influence, columns, squared)
        if squared is not None:
            squared[:, columns] *= half_weights(k2)
        self.meet()
        energy = self.field.new_zeros(())
        if length(planes):
            invert_rows(self.wave, planes)
            field = torch.fft.irfft(self.wave[planes], n=k2, norm="forward")
            energy = torch.dot(total.view(-1), field.view(-1))  # before the field takes the charges' place
            self.field[planes] = field
        self.meet()
        return energy, squared

    def _total(self, part: slice) -> torch.Tensor:
        """Sum planes over ranks, in their order."""
        first, *others = (charge[part] for charge in self.charges)
        if not others:
            return first
        total = first + others[0]
        for other in others[1:]:
            total += other
        return total
