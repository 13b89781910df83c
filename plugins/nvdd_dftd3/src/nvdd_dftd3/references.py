"""Reference systems of DFT-D3: what an element's atoms look like at several coordination numbers.

Key objects: `References` (for the elements of some rows), `load_references`. Invariant: eV and Angstrom, float64.
Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files

import numpy as np
import torch
from ase.units import Bohr, Hartree

from nvdd_dftd3.parameters import Parameters

LARGEST_NUMBER = 103
"""Lawrencium; heavier elements have no references."""


@dataclass(frozen=True, eq=False)
class Tables:
    """All elements; row Z belongs to atomic number Z, row 0 to none. Atomic units.

    Attributes
    ----------
    cn : Tensor, shape (104, 7)
        Coordination number of each reference; -1 where an element has no further one.
    c6 : Tensor, shape (104, 104, 7, 7)
    covalent_radii : Tensor, shape (104,)
        Already scaled by 4/3.
    sqrt_r4_r2 : Tensor, shape (104,)
        Half the product of two, times 6, is C8 / C6.
    """

    cn: torch.Tensor
    c6: torch.Tensor
    covalent_radii: torch.Tensor
    sqrt_r4_r2: torch.Tensor


@cache
def load_tables() -> Tables:
    """Read the file that the package ships, once a process."""
    with as_file(files(__package__).joinpath("references.npz")) as path, np.load(path) as data:
        counts, flat_cn, upper = data["counts"], data["cn"], data["c6_upper"]
        radii, r4_r2 = data["covalent_radii"], data["sqrt_r4_r2"]
    n, width = len(counts), int(counts.max())
    there = np.arange(width) < counts[:, None]
    cn = np.full((n, width), -1.0)
    cn[there] = flat_cn
    square = np.zeros((len(flat_cn), len(flat_cn)))
    square[np.triu_indices(len(flat_cn))] = upper
    square = np.maximum(square, square.T)
    place = np.nonzero(there.reshape(-1))[0]
    c6 = np.zeros((n * width, n * width))
    c6[np.ix_(place, place)] = square
    by_element = c6.reshape(n, width, n, width).transpose(0, 2, 1, 3).copy()
    return Tables(*(torch.from_numpy(t) for t in (cn, by_element, radii, r4_r2)))


@dataclass(frozen=True, eq=False)
class References:
    """What the kernels need of a few elements, numbered from 0.

    Attributes
    ----------
    cn : Tensor, shape (U, M)
        Coordination number of each reference, -1 where there is none.
    c6 : Tensor, shape (U, U, M, M)
        eV Angstrom**6.
    radii : Tensor, shape (U,)
        Covalent radii, Angstrom.
    pairs : Tensor, shape (U, U, 4)
        ``s6, s8 C8/C6, R0**6, R0**8``: the energy of a pair is
        ``-C6 (s6 / (r**6 + R0**6) + s8 C8/C6 / (r**8 + R0**8))``.
    """

    cn: torch.Tensor
    c6: torch.Tensor
    radii: torch.Tensor
    pairs: torch.Tensor

    @classmethod
    def of(cls, numbers: list[int], parameters: Parameters, device: torch.device) -> References:
        """Pick the elements of these atomic numbers.

        Parameters
        ----------
        numbers : list of int
            From 1 to `LARGEST_NUMBER`, each once.
        parameters : Parameters
        device : torch.device
        """
        tables = load_tables()
        chosen = torch.tensor(numbers, dtype=torch.int64)
        cn = tables.cn[chosen]
        width = max(int((cn >= 0).sum(1).max()), 1) if numbers else 1
        c6 = tables.c6[chosen][:, chosen][..., :width, :width] * (Hartree * Bohr**6)
        q = tables.sqrt_r4_r2[chosen]
        ratio = 3.0 * q[:, None] * q[None, :]
        radius = Bohr * (parameters.a1 * ratio.sqrt() + parameters.a2)
        eight = parameters.s8 * Bohr**2 * ratio
        six = torch.full_like(eight, parameters.s6)
        pairs = torch.stack([six, eight, radius**6, radius**8], dim=-1)
        radii = tables.covalent_radii[chosen] * Bohr
        made = (cn[:, :width], c6, radii, pairs)
        return cls(*(t.contiguous().to(device) for t in made))

    def weights(self, cn: torch.Tensor, species: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weigh the references of rows by how near their coordination numbers are.

        Parameters
        ----------
        cn : Tensor, shape (n,)
        species : Tensor, shape (n,), int64

        Returns
        -------
        weights, slopes : Tensor, shape (n, M)
            Each row's sum to one; their derivatives with respect to `cn`.
        """
        # a softmax is the normalised Gaussian of the method, and right where every Gaussian is zero in float64
        there = self.cn[species] >= 0.0
        away = torch.where(there, cn[:, None] - self.cn[species], 0.0)
        weights = torch.softmax((-4.0 * away * away).masked_fill(~there, -torch.inf), dim=1)
        towards = -8.0 * away
        return weights, weights * (towards - (weights * towards).sum(1, keepdim=True))

    def c6_rows(self, weights: torch.Tensor, species: torch.Tensor) -> torch.Tensor:
        """Sum the references of rows: ``out[i, v, b] = sum_a weights[i, a] c6[species_i, v, a, b]``, (n, U, M)."""
        out = weights.new_zeros((weights.shape[0], *self.c6.shape[1:2], self.c6.shape[3]))
        for a, column in enumerate(weights.unbind(1)):  # one reference at a time, so that memory stays small
            out.addcmul_(column[:, None, None], self.c6[:, :, a][species])
        return out
