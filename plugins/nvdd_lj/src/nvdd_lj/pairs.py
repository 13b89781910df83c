"""Evaluating the pairs of a neighbour list, results as torch tensors.

Key objects: `PairWork` (evaluates the same pairs again and again), `PairResults`. Invariant: results are new
tensors on each call; scratch is reused from call to call, so a `PairWork` serves one stream at a time, and a
steady step reads nothing back from the device. Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvdd_core.errors import InputError
from nvdd_lj.engines import Engine, SimdEngine, ThreadEngine
from nvdd_lj.rows import PairRows
from nvdd_lj.variants import Virial, Want


@dataclass(frozen=True, eq=False)
class PairResults:
    """What was asked for; the rest is None.

    Attributes
    ----------
    energy : (n_owned,)
        Half the energy of each row's pairs, eV.
    forces : (n_owned, 3)
        Complete forces, eV/Angstrom.
    virial : (n_systems, 3, 3) float64
        This rank's part of d energy / d strain, eV.
    row_virial : (n_owned, 3, 3)
        Its split over rows, half of a pair at each end.
    """

    energy: torch.Tensor | None = None
    forces: torch.Tensor | None = None
    virial: torch.Tensor | None = None
    row_virial: torch.Tensor | None = None


class PairWork:
    """Evaluates the pairs of one neighbour list.

    Parameters
    ----------
    rows : PairRows
        The pairs.
    extend : bool, optional
        True if `evaluate` is given local rows and has to make the images itself, False if it is given
        extended rows.
    simd : bool, optional
        Use the CPU kernel; default on the CPU. The other one runs on any device and takes full lists only.
    """

    def __init__(self, rows: PairRows, *, extend: bool = True, simd: bool | None = None) -> None:
        self.rows = rows
        self.extend = extend
        use_simd = rows.device.type == "cpu" if simd is None else simd
        if rows.half and not use_simd:
            raise InputError("lj: a half neighbour list can be evaluated on the CPU only; ask for a full one")
        self._engine: Engine = SimdEngine(rows, extend) if use_simd else ThreadEngine(rows, extend)

    def evaluate(self, positions: torch.Tensor, cell: torch.Tensor, want: Want) -> PairResults:
        """Compute what is wanted.

        Parameters
        ----------
        positions : (n_local, 3) or (n_extended, 3)
            See `extend`. Angstrom.
        cell : (S, 3, 3)
            Read only where images are made.
        want : Want
            The results.
        """
        rows = self.rows
        real = rows.coefficients
        positions = positions.detach().to(real).contiguous()
        cell = cell.detach().to(real).contiguous()
        n = rows.n_owned
        energy = real.new_empty(n) if want.energy else None
        forces = real.new_empty((n, 3)) if want.forces else None
        per_row = real.new_empty((n, 6)) if self._engine.needs_row_virial(want) else None
        virial = self._zero_virial() if want.virial is Virial.TOTAL else None
        if n:
            self._engine.run(positions, cell, want, (energy, forces, virial, per_row))
        if per_row is not None:
            virial = self._sum_rows(per_row)
        return PairResults(
            energy,
            forces,
            None if virial is None else _full_tensor(virial),
            _full_tensor(per_row) if per_row is not None and want.virial is Virial.ROWS else None,
        )

    def _zero_virial(self) -> torch.Tensor:
        return torch.zeros((self.rows.n_systems, 6), dtype=torch.float64, device=self.rows.device)

    def _sum_rows(self, per_row: torch.Tensor) -> torch.Tensor:
        if self.rows.n_systems == 1:
            return per_row.sum(dim=0, keepdim=True, dtype=torch.float64)
        system = self.rows.system[: self.rows.n_owned]
        return self._zero_virial().index_add_(0, system, per_row.double())


def _full_tensor(six: torch.Tensor) -> torch.Tensor:
    """Spread xx xy xz yy yz zz over a symmetric 3 x 3."""
    xx, xy, xz, yy, yz, zz = six.unbind(-1)
    return torch.stack((xx, xy, xz, xy, yy, yz, xz, yz, zz), dim=-1).view(*six.shape[:-1], 3, 3)
