"""A calculator on two ranks for a file's tests, and the same potential by ASE's own code."""

from __future__ import annotations

from collections.abc import Iterator

import ase
import ase.build
import numpy as np
import pytest
from ase.calculators.lj import LennardJones

from nvdd_core.interop.ase import DomainCalculator

SIGMA, EPSILON, CUTOFF = 3.4, 0.0104, 6.5
OPTIONS = {"sigma": {"Ar": SIGMA}, "epsilon": {"Ar": EPSILON}, "cutoff": CUTOFF, "shift": "energy"}
TOLERANCE = 1e-8


def new_calculator(ranks: int = 2, **others: object) -> DomainCalculator:
    """The plugin's Lennard-Jones."""
    return DomainCalculator("lj", ranks=ranks, device="cpu", options=OPTIONS, timeout_s=240.0, **others)  # type: ignore[arg-type]


def judge() -> LennardJones:
    """ASE's."""
    return LennardJones(sigma=SIGMA, epsilon=EPSILON, rc=CUTOFF)


def crystal(*repeats: int) -> ase.Atoms:
    """Argon a little off its sites."""
    atoms = ase.build.bulk("Ar", "fcc", a=5.26, cubic=True) * (repeats or (2, 2, 2))
    atoms.rattle(0.05, seed=1)
    return atoms


def close(a: object, b: object) -> bool:
    """Whether numbers agree to what the issue asks for."""
    return bool(np.abs(np.asarray(a) - np.asarray(b)).max() < TOLERANCE)


@pytest.fixture(scope="module")
def calculator() -> Iterator[DomainCalculator]:
    """Two ranks, kept for a file."""
    with new_calculator() as calc:
        yield calc
