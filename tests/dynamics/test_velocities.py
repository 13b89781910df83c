"""Start velocities: distribution, momentum, exact temperature, and independence of the ranks."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import (
    MDState,
    degrees_of_freedom,
    initial_velocities,
    kinetic_energy,
    kinetic_tensor,
    maxwell_boltzmann,
    momentum,
    pressure,
    remove_momentum,
    temperature,
)
from nvdd_core.dynamics.units import ACCELERATION, ENERGY_PER_AMU_A2_FS2, K_B
from nvdd_core.errors import InputError

IDS = torch.arange(30_000)
MASSES = torch.where(IDS % 2 == 0, 40.0, 1.0).to(torch.float64)


def _alone(t: torch.Tensor) -> torch.Tensor:
    return t


def _state(velocities: torch.Tensor, masses: torch.Tensor) -> MDState:
    state = MDState.at_rest(torch.zeros_like(velocities), masses)
    state.velocities = velocities
    return state


def test_maxwell_boltzmann() -> None:
    v = maxwell_boltzmann(MASSES, IDS, 300.0, seed=1)
    for first, mass in ((0, 40.0), (1, 1.0)):
        scaled = v[first::2] / math.sqrt(K_B * 300.0 * ACCELERATION / mass)
        assert stats.kstest(scaled.flatten().numpy(), "norm").pvalue > 1e-3
    assert not torch.equal(v, maxwell_boltzmann(MASSES, IDS, 300.0, seed=2))


def test_momentum_and_exact_temperature() -> None:
    v = initial_velocities(MASSES, IDS, 300.0, 1, _alone, exact_temperature=True)
    state = _state(v, MASSES)
    assert float(momentum(state).abs().max()) < 1e-9
    n_degrees = degrees_of_freedom(len(IDS), momentum_conserved=True)
    assert n_degrees == 3 * len(IDS) - 3
    assert temperature(float(kinetic_energy(state)), n_degrees) == pytest.approx(300.0, rel=1e-12)


def test_without_rescaling_the_temperature_fluctuates() -> None:
    state = _state(initial_velocities(MASSES, IDS, 300.0, 1, _alone), MASSES)
    found = temperature(float(kinetic_energy(state)), 3 * len(IDS) - 3)
    assert found == pytest.approx(300.0, rel=5 * math.sqrt(2 / (3 * len(IDS))))
    assert abs(found - 300.0) > 1e-6


def test_single_row_keeps_its_momentum() -> None:
    v = initial_velocities(MASSES[:1], IDS[:1], 300.0, 1, _alone)
    assert torch.equal(v, maxwell_boltzmann(MASSES[:1], IDS[:1], 300.0, seed=1))
    assert degrees_of_freedom(1, momentum_conserved=True) == 3
    exact = initial_velocities(MASSES[:1], IDS[:1], 300.0, 1, _alone, exact_temperature=True)
    assert temperature(float(kinetic_energy(_state(exact, MASSES[:1]))), 3) == pytest.approx(300.0)


def test_zero_temperature_is_rest() -> None:
    v = initial_velocities(MASSES, IDS, 0.0, 1, _alone, exact_temperature=True)
    assert float(v.abs().max()) == 0.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_temperature(value: float) -> None:
    with pytest.raises(InputError, match="temperature is"):
        maxwell_boltzmann(MASSES, IDS, value, seed=1)


def test_exact_temperature_needs_zero_momentum() -> None:
    with pytest.raises(InputError, match="zero_momentum"):
        initial_velocities(MASSES, IDS, 300.0, 1, _alone, zero_momentum=False, exact_temperature=True)


def _on_rank(n: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows in contiguous, unequal shares; the last rank may have none."""
    mesh = Mesh.from_process_group()
    ids = torch.arange(n)[mesh.rank * chunk : (mesh.rank + 1) * chunk]
    before = mesh.counter.snapshot()
    v = initial_velocities(MASSES[ids], ids, 95.0, 7, mesh.all_reduce_sum_, exact_temperature=True)
    return ids, v, mesh.counter.since(before).total_calls


def test_ranks_agree_with_one_process(rank_pool) -> None:
    alone = initial_velocities(MASSES[:501], IDS[:501], 95.0, 7, _alone, exact_temperature=True)
    parts = rank_pool(3).run(_on_rank, 501, 251, timeout=60)
    assert len(parts[2][0]) == 0
    found = torch.cat([v for _, v, _ in parts])
    torch.testing.assert_close(found, alone, rtol=1e-13, atol=1e-17)
    assert all(calls == 2 for _, _, calls in parts)


def test_observables_against_plain_sums() -> None:
    v = maxwell_boltzmann(MASSES[:7], IDS[:7], 300.0, seed=3)
    state = _state(v, MASSES[:7])
    tensor = sum(m * torch.outer(x, x) for m, x in zip(MASSES[:7], v, strict=True)) * ENERGY_PER_AMU_A2_FS2
    torch.testing.assert_close(kinetic_tensor(state), tensor, rtol=1e-13, atol=0)
    assert float(kinetic_energy(state)) == pytest.approx(0.5 * float(tensor.trace()), rel=1e-13)
    torch.testing.assert_close(momentum(state), (MASSES[:7, None] * v).sum(0), rtol=1e-12, atol=1e-15)
    empty = _state(v[:0], MASSES[:0])
    assert float(kinetic_energy(empty)) == 0.0
    assert momentum(empty).tolist() == [0.0, 0.0, 0.0]


def test_pressure_of_an_ideal_gas() -> None:
    """p V = N k T, and a stretched (tensile) system pulls: negative pressure."""
    kinetic = 1.5 * 100 * K_B * 300.0
    assert pressure(kinetic, 0.0, 1000.0) == pytest.approx(100 * K_B * 300.0 / 1000.0)
    assert pressure(0.0, 0.3, 1000.0) == pytest.approx(-0.1)


def test_remove_momentum_is_in_place() -> None:
    v = maxwell_boltzmann(MASSES, IDS, 300.0, seed=1)
    assert remove_momentum(v, MASSES, _alone) is v


def test_temperature_without_degrees_of_freedom() -> None:
    assert temperature(0.0, 0) == 0.0
