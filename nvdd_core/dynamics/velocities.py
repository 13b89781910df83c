"""Start velocities: Maxwell-Boltzmann from (seed, global id), without drift, at an exact temperature.

`initial_velocities` is the usual entry; its steps are public for those who need one of them. Sums over
ranks come through a callable, such as ``mesh.all_reduce_sum_``, so nothing here knows about processes.

Invariant: the drawn velocities of a row depend on (seed, id, mass, temperature) only; removal of the drift
and rescaling depend on sums over all ranks, which every rank sees alike.
Layer: dynamics.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nvdd_core.dynamics.noise import STREAM_VELOCITIES, normal
from nvdd_core.dynamics.observables import degrees_of_freedom
from nvdd_core.dynamics.units import ACCELERATION, ENERGY_PER_AMU_A2_FS2, K_B
from nvdd_core.errors import InputError

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def maxwell_boltzmann(masses: torch.Tensor, ids: torch.Tensor, temperature: float, seed: int) -> torch.Tensor:
    """Draw velocities of independent rows.

    Parameters
    ----------
    masses : Tensor, shape (n,), float64
        amu.
    ids : Tensor, shape (n,), int64
        Global row ids.
    temperature : float
        K.
    seed : int
        Key of the draw.

    Returns
    -------
    Tensor, shape (n, 3), float64
        A/fs.

    Raises
    ------
    InputError
        If the temperature is negative or not finite.
    """
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise InputError(f"temperature is {temperature} K; it must be finite and not negative")
    spread = (K_B * temperature * ACCELERATION / masses).sqrt()
    return normal(seed, 0, ids, 3, stream=STREAM_VELOCITIES).mul_(spread[:, None])


def remove_momentum(
    velocities: torch.Tensor, masses: torch.Tensor, sum_over_ranks: SumOverRanks
) -> torch.Tensor:
    """Subtract the velocity of the centre of mass in place and return `velocities` (one sum over ranks).

    A system of a single row is left as it is: its momentum is its whole motion.
    """
    mine = torch.cat([masses @ velocities, masses.sum()[None], masses.new_tensor([float(masses.shape[0])])])
    total = sum_over_ranks(mine)
    drift = torch.where(total[4] > 1.0, total[:3] / total[3], torch.zeros_like(total[:3]))
    return velocities.sub_(drift)


def rescale_to_temperature(
    velocities: torch.Tensor, masses: torch.Tensor, temperature: float, sum_over_ranks: SumOverRanks
) -> torch.Tensor:
    """Scale drift-free velocities in place to exactly `temperature` over 3 N - 3 degrees of freedom.

    Needs one sum over ranks, and a single row has its three degrees. Rows at rest stay at rest.
    """
    kinetic = (masses @ velocities.square()).sum() * (0.5 * ENERGY_PER_AMU_A2_FS2)
    total = sum_over_ranks(torch.stack([kinetic, kinetic.new_tensor(float(masses.shape[0]))]))
    n_degrees = degrees_of_freedom(int(total[1]), momentum_conserved=True)
    if not float(total[0]) > 0.0:
        return velocities
    return velocities.mul_((0.5 * n_degrees * K_B * temperature / total[0]).sqrt())


def initial_velocities(
    masses: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    seed: int,
    sum_over_ranks: SumOverRanks,
    *,
    zero_momentum: bool = True,
    exact_temperature: bool = False,
) -> torch.Tensor:
    """Return start velocities of the owned rows (collective: one or two sums over ranks).

    Parameters
    ----------
    masses : Tensor, shape (n,), float64
        amu.
    ids : Tensor, shape (n,), int64
        Global row ids.
    temperature : float
        K.
    seed : int
        Key of the draw.
    sum_over_ranks : callable
        Sums a float64 tensor over ranks, in place or not, and returns the sum.
    zero_momentum : bool
        Remove the drift of the whole system.
    exact_temperature : bool
        Rescale so that the temperature over 3 N - 3 degrees of freedom is exactly the one asked for; needs
        `zero_momentum`.

    Returns
    -------
    Tensor, shape (n, 3), float64
        A/fs.

    Raises
    ------
    InputError
        If the temperature is out of range, or `exact_temperature` is asked for without `zero_momentum`.
    """
    if exact_temperature and not zero_momentum:
        raise InputError(
            "exact_temperature counts 3 N - 3 degrees of freedom and needs zero_momentum as well"
        )
    velocities = maxwell_boltzmann(masses, ids, temperature, seed)
    if zero_momentum:
        remove_momentum(velocities, masses, sum_over_ranks)
    if exact_temperature:
        rescale_to_temperature(velocities, masses, temperature, sum_over_ranks)
    return velocities
