"""Small structures on which models are checked, scaled to a model's cutoff.

Key objects: `default_structures`, `chain`. Invariant: no random numbers, so every run and every rank sees the
same atoms; no pair lies near the cutoff in the crystals, so a step there can't spoil a difference quotient.
Layer: testing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import ase
import numpy as np

from nvdd_core.testing.tolerances import Array

# Between the fifth and the sixth shell of fcc, sqrt(5) and sqrt(6) nearest distances.
SPACINGS_IN_CUTOFF: Final = 2.34
_RIPPLE: Final = 0.03


def default_structures(
    cutoff: float, symbols: str | Sequence[str] = "Ar", spacing: float | None = None
) -> dict[str, ase.Atoms]:
    """Return structures by name.

    Parameters
    ----------
    cutoff : float
        The model's, Angstrom.
    symbols : str or sequence of str
        Chemical symbol; several take turns.
    spacing : float, optional
        Nearest distance, Angstrom; by default so that five shells lie within the cutoff.

    Returns
    -------
    dict of str to Atoms
        ``crystal`` (32 atoms, periodic), ``triclinic`` (8 atoms in a skewed cell smaller than two cutoffs),
        ``slab`` (open along z), ``cluster`` (13 atoms, open, no cell), ``atom`` (one, open) and ``rod`` (128
        atoms, periodic, several cutoffs long, so that not every atom is a ghost on every rank).
    """
    d = cutoff / SPACINGS_IN_CUTOFF if spacing is None else spacing
    crystal, cell = _fcc((2, 2, 2), d)
    rod, rod_cell = _fcc((2, 2, 8), d)
    skewed = 2.1 * d * np.array([[1.0, 0.0, 0.0], [0.3, 1.0, 0.0], [-0.25, 0.3, 1.0]])
    sites = np.array(list(itertools.product((0.0, 0.5), repeat=3))) @ skewed
    slab_cell = cell + np.diag([0.0, 0.0, 3.0 * cutoff])
    near = np.argsort(np.linalg.norm(crystal - crystal[13], axis=1), kind="stable")[:13]
    return {
        "crystal": _atoms(crystal, symbols, cell, True),
        "triclinic": _atoms(sites + _ripple(8, d), symbols, skewed, True),
        "slab": _atoms(crystal + np.array([0.0, 0.0, cutoff]), symbols, slab_cell, [True, True, False]),
        "cluster": _atoms(crystal[near], symbols, None, False),
        "atom": _atoms(np.zeros((1, 3)), symbols, None, False),
        "rod": _atoms(rod, symbols, rod_cell, True),
    }


def chain(length: float, spacing: float, symbols: str | Sequence[str] = "Ar") -> ase.Atoms:
    """Return an open chain along x, at least `length` long (Angstrom), a little off the axis."""
    n = int(np.ceil(length / spacing)) + 1
    line = np.zeros((n, 3))
    line[:, 0] = spacing * np.arange(n)
    return _atoms(line + _ripple(n, spacing), symbols, None, False)


def _fcc(cells: tuple[int, int, int], d: float) -> tuple[Array, Array]:
    a = d * np.sqrt(2.0)
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    corners = np.array(list(itertools.product(*map(range, cells))), dtype=float)
    sites = (a * (corners[:, None] + basis)).reshape(-1, 3)
    return sites + _ripple(len(sites), d), np.diag(a * np.array(cells, dtype=float))


def _ripple(n: int, d: float) -> Array:
    k = np.arange(n)
    return _RIPPLE * d * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], axis=1)


def _atoms(
    positions: Array, symbols: str | Sequence[str], cell: Array | None, pbc: bool | list[bool]
) -> ase.Atoms:
    turns = itertools.cycle([symbols] if isinstance(symbols, str) else symbols)
    names = list(itertools.islice(turns, len(positions)))
    return ase.Atoms(names, positions=positions, cell=cell, pbc=pbc)
