"""What the results of a calculator depend on, as it was at one moment.

Invariant: comparing is exact, to the last bit of the last coordinate, and neither looks at nor keeps what results
don't depend on: momenta, masses, constraints.
Layer: interop.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import ase
import numpy as np

# Dynamics changes them all the time, and no energy depends on them.
_NOT_SEEN = frozenset({"momenta", "masses"})


@dataclass(frozen=True)
class Snapshot:
    """A copy of what the results for an ``ase.Atoms`` depend on.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Per-atom arrays by ASE's names: positions, numbers, tags, initial_charges and so on.
    cell : ndarray, shape (3, 3); pbc : ndarray, shape (3,)
    info : bytes
        Changes when ``atoms.info`` does.
    """

    arrays: dict[str, np.ndarray]
    cell: np.ndarray
    pbc: np.ndarray
    info: bytes

    @classmethod
    def of(cls, atoms: ase.Atoms) -> Snapshot:
        """Copy what counts of `atoms`."""
        arrays = {name: array.copy() for name, array in atoms.arrays.items() if name not in _NOT_SEEN}
        return cls(arrays, np.array(atoms.cell, dtype=np.float64), np.array(atoms.pbc), _bytes(atoms.info))

    def changes(self, atoms: ase.Atoms) -> list[str]:
        """Return what is different in `atoms`: names of arrays, ``cell``, ``pbc``, ``info``."""
        names = [name for name in {**self.arrays, **atoms.arrays} if name not in _NOT_SEEN]
        found = [name for name in names if not _same(self.arrays.get(name), atoms.arrays.get(name))]
        if not _same(self.cell, np.array(atoms.cell, dtype=np.float64)):
            found.append("cell")
        if not _same(self.pbc, np.array(atoms.pbc)):
            found.append("pbc")
        return found if self.info == _bytes(atoms.info) else [*found, "info"]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype:
        return False
    # what is not a number equals itself here; looking for that first would double the cost
    has_nan = a.dtype.kind in "fc" and np.isnan(a).any()
    return np.array_equal(a, b, equal_nan=bool(has_nan))


def _bytes(info: dict[str, Any]) -> bytes:
    """Return what differs when `info` does, whatever is in it; an empty one is the usual case."""
    if not info:
        return b""
    try:
        return pickle.dumps(info)
    except Exception:  # an object of the user's may refuse in any way
        return repr(info).encode()
