"""Unit factors against ASE's and against first principles."""

from __future__ import annotations

import math

import ase.units
import pytest

from nvdd_core.dynamics import units


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (units.K_B, ase.units.kB),
        (units.ACCELERATION, ase.units.fs**2),
        (units.ASE_TIME_PER_FS, ase.units.fs),
        (units.GPA_PER_EV_A3, 1.0 / ase.units.GPa),
    ],
)
def test_equal_to_ase(ours: float, theirs: float) -> None:
    """A difference here means that ASE has moved to another CODATA set: trajectories would differ in 1e-8."""
    assert ours == pytest.approx(theirs, rel=1e-14)


def test_orders_of_magnitude() -> None:
    """1 eV/A on 1 amu: 9.6e-3 A/fs^2; argon at 300 K moves at 4.3e-3 A/fs (root of 3 k T / m)."""
    assert math.isclose(units.ACCELERATION, 9.6485e-3, rel_tol=1e-4)
    speed = (3 * units.K_B * 300 * units.ACCELERATION / 39.948) ** 0.5
    assert speed * 1e5 == pytest.approx(432.8, rel=1e-3)  # m/s
    assert math.isclose(units.ENERGY_PER_AMU_A2_FS2, 1.0 / units.ACCELERATION)
