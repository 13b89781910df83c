"""Unit factors of the dynamics: Angstrom, fs, amu, eV, K at the surface.

The numbers are CODATA 2014 (Mohr, Newell, Taylor, arXiv:1507.07956), because ASE's default units are: a
trajectory then equals ASE's to rounding. They are written out here instead of read from ``ase.units`` so
that a later change of ASE's default doesn't change trajectories; a test compares the two.

Invariant: velocities are A/fs everywhere; only this module knows what eV, amu and fs have to do with one
another.
Layer: dynamics.
"""

from __future__ import annotations

import math
from typing import Final

_ELEMENTARY_CHARGE: Final = 1.602_176_6208e-19  # C; also J per eV
_ATOMIC_MASS: Final = 1.660_539_040e-27  # kg
_BOLTZMANN: Final = 1.380_648_52e-23  # J/K

K_B: Final = _BOLTZMANN / _ELEMENTARY_CHARGE
"""Boltzmann's constant in eV/K."""

ACCELERATION: Final = _ELEMENTARY_CHARGE / _ATOMIC_MASS * 1e-10
"""Acceleration in A/fs^2 that 1 eV/A gives 1 amu."""

ENERGY_PER_AMU_A2_FS2: Final = 1.0 / ACCELERATION
"""Energy in eV of 1 amu A^2/fs^2."""

ASE_TIME_PER_FS: Final = math.sqrt(ACCELERATION)
"""One fs in ASE's time unit A sqrt(amu/eV); v[A/fs] / ASE_TIME_PER_FS is a velocity in ASE's unit."""

GPA_PER_EV_A3: Final = _ELEMENTARY_CHARGE * 1e21
"""Pressure in GPa of 1 eV/A^3."""

FS_PER_NS: Final = 1.0e6
SECONDS_PER_DAY: Final = 86_400.0
