"""What is measured of a state: kinetic energy, momentum, temperature, pressure.

Functions of a state return this rank's share, to be summed over ranks by the caller in one collective;
functions of numbers work on the sums.

Invariant: no communication and no host synchronisation in functions of a state.
Layer: dynamics.
"""

from __future__ import annotations

import torch

from nvdd_core.dynamics.state import MDState
from nvdd_core.dynamics.units import ENERGY_PER_AMU_A2_FS2, K_B


def kinetic_energy(state: MDState) -> torch.Tensor:
    """Return the kinetic energy of the owned rows in eV, a float64 scalar tensor."""
    # masses @ v^2 is one matrix-vector product; a sum over rows of three first would take ten times as long
    return (state.masses @ state.velocities.square()).sum() * (0.5 * ENERGY_PER_AMU_A2_FS2)


def kinetic_tensor(state: MDState) -> torch.Tensor:
    """Return sum over owned rows of m v v^T in eV, shape (3, 3); its trace is twice the kinetic energy."""
    momenta = state.velocities * state.masses[:, None]
    return (momenta.T @ state.velocities) * ENERGY_PER_AMU_A2_FS2


def momentum(state: MDState) -> torch.Tensor:
    """Return the momentum of the owned rows in amu A/fs, shape (3,)."""
    return state.masses @ state.velocities


def degrees_of_freedom(n_rows: int, *, momentum_conserved: bool) -> int:
    """Return the number of degrees of freedom that carry kinetic energy.

    Where the total momentum is conserved (constant-energy dynamics) and has been removed, three of the 3 N
    don't take part. A Langevin thermostat acts on each row by itself, so all 3 N do. A single row keeps its
    three: its momentum is all that it has, and is never removed.

    Parameters
    ----------
    n_rows : int
        Rows of the whole system, over all ranks.
    momentum_conserved : bool
        `Integrator.conserves_momentum`.
    """
    return 3 * n_rows - 3 if momentum_conserved and n_rows > 1 else 3 * n_rows


def temperature(kinetic: float, n_degrees: int) -> float:
    """Return the temperature in K of `n_degrees` degrees of freedom with kinetic energy `kinetic` (eV)."""
    return 2.0 * kinetic / (n_degrees * K_B) if n_degrees > 0 else 0.0


def pressure(kinetic: float, stress_trace: float, volume: float) -> float:
    """Return the instantaneous pressure in eV/A^3.

    Parameters
    ----------
    kinetic : float
        Kinetic energy of the whole system in eV.
    stress_trace : float
        Trace of the potential stress, tensile positive, in eV/A^3.
    volume : float
        Volume of the cell in A^3.
    """
    return 2.0 * kinetic / (3.0 * volume) - stress_trace / 3.0
