"""Langevin dynamics samples the canonical distribution: harmonic wells, where theory is exact.

For BAOAB in a well with omega dt = h the discrete dynamics has <x^2> = k T / k_spring without any error, and
<v^2> = (k T / m) (1 - h^2 / 4) at whole steps; every other order of the five moves gives another pair.
"""

from __future__ import annotations

import math

import pytest
import torch

from nvdd_core.dynamics import Langevin, MDState
from nvdd_core.dynamics.units import ACCELERATION, K_B

ROWS, SAMPLES, STIFFNESS = 1500, 25, 1.0


def _sample(
    temperature: float, dt: float, friction: float, gap: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row <x^2> and <v^2> m / ACCELERATION over samples `gap` steps apart, which are independent enough."""
    masses = torch.where(torch.arange(ROWS) % 2 == 0, 40.0, 20.0).to(torch.float64)
    state = MDState.at_rest(torch.zeros(ROWS, 3, dtype=torch.float64), masses)
    integrator = Langevin(dt, temperature, friction, seed)
    integrator.init(state)
    squares = torch.zeros(2, ROWS, dtype=torch.float64)
    for sample in range(-2, SAMPLES):
        for _ in range(gap):
            integrator.first_half(state)
            torch.mul(state.positions, -STIFFNESS, out=state.forces)
            integrator.second_half(state)
        if sample >= 0:
            squares[0] += state.positions.square().mean(1) / SAMPLES
            squares[1] += state.velocities.square().mean(1) * masses / ACCELERATION / SAMPLES
    return squares[0], squares[1]


@pytest.mark.parametrize(
    ("temperature", "omega_dt", "friction_dt"), [(50.0, 0.1, 0.1), (600.0, 0.1, 0.1), (300.0, 1.0, 0.5)]
)
def test_positions_and_velocities(temperature: float, omega_dt: float, friction_dt: float) -> None:
    dt = omega_dt / math.sqrt(STIFFNESS * ACCELERATION / 40.0)
    gap = math.ceil(4.0 * max(1.0 / friction_dt, friction_dt / omega_dt**2))
    x2, v2 = _sample(temperature, dt, friction_dt / dt, gap, seed=int(temperature))
    for heavy in (True, False):
        rows = slice(0, None, 2) if heavy else slice(1, None, 2)
        h2 = omega_dt**2 * (1.0 if heavy else 2.0)
        for values, expected in (
            (x2[rows], K_B * temperature / STIFFNESS),
            (v2[rows], K_B * temperature * (1 - h2 / 4)),
        ):
            error = float(values.std()) / math.sqrt(
                values.numel()
            )  # rows are independent: their spread tells
            assert error < 0.01 * expected
            assert float(values.mean()) == pytest.approx(expected, abs=4.0 * error)
