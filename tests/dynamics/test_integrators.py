"""Integrators: order, reversibility, ASE's trajectory, and independence of the distribution of rows."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import ase.build
import ase.calculators.lj
import ase.units
import numpy as np
import pytest
import torch
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet as AseVerlet

from nvdd_core.dynamics import Integrator, Langevin, MDState, VelocityVerlet, normal
from nvdd_core.dynamics.units import ACCELERATION, ASE_TIME_PER_FS, K_B
from nvdd_core.errors import InputError
from tests.dynamics._support import rows_of_rank

Force = Callable[[torch.Tensor], torch.Tensor]
STIFFNESS = 1.3  # eV/A^2


def _run(integrator: Integrator, state: MDState, force: Force, steps: int) -> None:
    state.forces.copy_(force(state.positions))
    integrator.init(state)
    for _ in range(steps):
        integrator.first_half(state)
        state.forces.copy_(force(state.positions))
        integrator.second_half(state)


def _harmonic(positions: torch.Tensor) -> torch.Tensor:
    return -STIFFNESS * positions


def _state(n: int = 5) -> MDState:
    ids = torch.arange(n)
    masses = 10.0 + 3.0 * (ids % 7).to(torch.float64)
    return MDState(
        normal(1, 0, ids, 3), 0.01 * normal(2, 0, ids, 3), torch.zeros(n, 3, dtype=torch.float64), masses, ids
    )


def _exact(state: MDState, time: float) -> torch.Tensor:
    omega = (STIFFNESS * ACCELERATION / state.masses[:, None]).sqrt()
    return state.positions * (omega * time).cos() + state.velocities / omega * (omega * time).sin()


def test_second_order_against_the_exact_solution() -> None:
    errors = []
    for steps in (100, 200, 400):
        state = _state()
        end = _exact(state, 200.0)
        _run(VelocityVerlet(200.0 / steps), state, _harmonic, steps)
        errors.append(float((state.positions - end).abs().max()))
        assert state.step == steps
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.02)
    assert errors[1] / errors[2] == pytest.approx(4.0, rel=0.02)
    assert errors[2] < 1e-3


def test_energy_is_bounded_and_of_second_order() -> None:
    worst = []
    for dt in (2.0, 1.0):
        state = _state(1)
        integrator = VelocityVerlet(dt)
        energies = []
        for _ in range(int(2000 / dt)):
            _run(integrator, state, _harmonic, 1)
            kinetic = 0.5 / ACCELERATION * float((state.masses[:, None] * state.velocities**2).sum())
            energies.append(kinetic + 0.5 * STIFFNESS * float((state.positions**2).sum()))
        worst.append(max(energies) - min(energies))
    assert worst[0] / worst[1] == pytest.approx(4.0, rel=0.05)
    assert worst[1] < 1e-2


def test_reversible() -> None:
    state = _state()
    start = state.positions.clone(), state.velocities.clone()
    _run(VelocityVerlet(2.0), state, _harmonic, 500)
    assert float((state.positions - start[0]).abs().max()) > 0.1
    state.velocities.neg_()
    _run(VelocityVerlet(2.0), state, _harmonic, 500)
    torch.testing.assert_close(state.positions, start[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(state.velocities, -start[1], rtol=0, atol=1e-12)


def _argon() -> ase.Atoms:
    atoms = ase.build.bulk("Ar", "fcc", a=5.3, cubic=True) * (2, 2, 2)
    atoms.calc = ase.calculators.lj.LennardJones(sigma=3.4, epsilon=0.0104, rc=5.0, smooth=True)
    return atoms


def _alloy() -> ase.Atoms:
    atoms = ase.build.bulk("Cu", "fcc", a=3.7, cubic=True) * (2, 2, 1)
    atoms.numbers[::3] = 79
    atoms.calc = EMT()
    return atoms


@pytest.mark.parametrize("make", [_argon, _alloy])
def test_same_trajectory_as_ase(make: Callable[[], ase.Atoms]) -> None:
    atoms = make()
    rng = np.random.default_rng(1)
    atoms.rattle(0.05, seed=3)
    atoms.set_velocities(0.03 * rng.standard_normal((len(atoms), 3)))
    calculator: Calculator = atoms.calc

    def force(positions: torch.Tensor) -> torch.Tensor:
        twin = atoms.copy()
        twin.positions[:] = positions.numpy()
        return torch.from_numpy(calculator.get_forces(twin))

    state = MDState.at_rest(torch.tensor(atoms.positions), torch.tensor(atoms.get_masses()))
    state.velocities.copy_(torch.tensor(atoms.get_velocities()) * ASE_TIME_PER_FS)
    _run(VelocityVerlet(2.5), state, force, 50)

    before = atoms.positions.copy()
    AseVerlet(atoms, timestep=2.5 * ase.units.fs).run(50)
    assert np.abs(atoms.positions - before).max() > 0.1
    np.testing.assert_allclose(state.positions.numpy(), atoms.positions, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        state.velocities.numpy() / ASE_TIME_PER_FS, atoms.get_velocities(), rtol=0, atol=1e-10
    )


def test_langevin_step_is_baoab() -> None:
    """One step, written out in numpy."""
    dt, temperature, friction = 3.0, 250.0, 0.02
    state = _state()
    state.step = 12
    force = _harmonic(state.positions).numpy()
    masses = state.masses.numpy()[:, None]
    x, v = state.positions.numpy().copy(), state.velocities.numpy().copy()
    v += 0.5 * dt * force * ACCELERATION / masses
    x += 0.5 * dt * v
    decay = math.exp(-friction * dt)
    spread = np.sqrt((1 - decay**2) * K_B * temperature * ACCELERATION / masses)
    v = decay * v + spread * normal(77, 12, state.ids, 3).numpy()
    x += 0.5 * dt * v
    v += 0.5 * dt * -STIFFNESS * x * ACCELERATION / masses
    _run(Langevin(dt, temperature, friction, seed=77), state, _harmonic, 1)
    np.testing.assert_allclose(state.positions.numpy(), x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(state.velocities.numpy(), v, rtol=0, atol=1e-15)
    assert state.step == 13


def test_langevin_without_friction_is_verlet() -> None:
    one, two = _state(), _state()
    _run(Langevin(2.0, 300.0, 0.0, seed=1), one, _harmonic, 50)
    _run(VelocityVerlet(2.0), two, _harmonic, 50)
    torch.testing.assert_close(one.positions, two.positions, rtol=0, atol=1e-13)


def test_langevin_at_zero_temperature_comes_to_rest() -> None:
    state = _state()
    _run(Langevin(2.0, 0.0, 0.05, seed=1), state, _harmonic, 1000)  # the slowest mode falls by e in 20 steps
    assert float(state.velocities.abs().max()) < 1e-12


@pytest.mark.parametrize(
    "integrator", [VelocityVerlet(2.0), Langevin(2.0, 300.0, 0.01, seed=9)], ids=lambda i: i.name
)
@pytest.mark.parametrize("size", [2, 3])
def test_any_distribution_of_rows_gives_the_same_bits(integrator: Integrator, size: int) -> None:
    whole = _state(1003)
    parts = [rows_of_rank(whole, torch.arange(rank, 1003, size)) for rank in range(size)]
    for state in (whole, *parts):
        _run(integrator, state, _harmonic, 20)
    for rank, part in enumerate(parts):
        assert torch.equal(part.positions, whole.positions[rank::size])
        assert torch.equal(part.velocities, whole.velocities[rank::size])


def _reorder_in_new_tensors(state: MDState, order: torch.Tensor) -> MDState:
    return rows_of_rank(state, order)


def _reorder_in_place(state: MDState, order: torch.Tensor) -> MDState:
    moved = rows_of_rank(state, order)
    for name in ("positions", "velocities", "forces", "masses", "ids"):
        getattr(state, name).copy_(getattr(moved, name))
    return state


@pytest.mark.parametrize("reorder", [_reorder_in_new_tensors, _reorder_in_place])
@pytest.mark.parametrize("kind", [VelocityVerlet, lambda dt: Langevin(dt, 300.0, 0.01, seed=9)])
def test_rows_may_migrate_between_steps(
    kind: Callable[[float], Integrator], reorder: Callable[[MDState, torch.Tensor], MDState]
) -> None:
    """A factor kept from the masses of other rows would show."""
    integrator, reference, state = kind(2.0), _state(40), _state(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    _run(integrator, reference, _harmonic, 6)
    _run(integrator, state, _harmonic, 3)
    state = reorder(state, order)
    _run(integrator, state, _harmonic, 3)
    assert torch.equal(state.positions, reference.positions[order])
    fewer = rows_of_rank(state, torch.arange(25))
    _run(integrator, fewer, _harmonic, 1)
    _run(integrator, reference, _harmonic, 1)
    assert torch.equal(fewer.positions, reference.positions[order[:25]])


def test_no_rows() -> None:
    for integrator in (VelocityVerlet(1.0), Langevin(1.0, 300.0, 0.1, seed=1)):
        state = _state(0)
        _run(integrator, state, _harmonic, 2)
        assert state.step == 2
        assert state.positions.shape == (0, 3)


def test_works_in_place() -> None:
    state = _state()
    places = state.positions.data_ptr(), state.velocities.data_ptr()
    _run(Langevin(2.0, 300.0, 0.01, seed=9), state, _harmonic, 3)
    assert places == (state.positions.data_ptr(), state.velocities.data_ptr())


def test_works_in_inference_mode() -> None:
    with torch.inference_mode():
        _run(VelocityVerlet(1.0), _state(), _harmonic, 2)


@pytest.mark.parametrize("dt", [0.0, -1.0, math.nan, math.inf])
def test_bad_time_step(dt: float) -> None:
    with pytest.raises(InputError, match=r"dt is .* fs; it must be finite and positive"):
        VelocityVerlet(dt)
    with pytest.raises(InputError, match="dt is"):
        Langevin(dt, 300.0, 0.01, seed=1)


def test_bad_thermostat() -> None:
    with pytest.raises(InputError, match="temperature is -1"):
        Langevin(1.0, -1.0, 0.01, seed=1)
    with pytest.raises(InputError, match="friction is nan 1/fs"):
        Langevin(1.0, 300.0, math.nan, seed=1)


def test_a_pickled_integrator_goes_on_the_same() -> None:
    integrator, one = Langevin(2.0, 300.0, 0.01, seed=5), _state()
    _run(integrator, one, _harmonic, 3)
    two = rows_of_rank(one, torch.arange(5))
    for twin, state in ((integrator, one), (pickle.loads(pickle.dumps(integrator)), two)):
        _run(twin, state, _harmonic, 3)
    assert torch.equal(one.positions, two.positions)


def test_parameters_name_everything() -> None:
    assert VelocityVerlet(2.0).parameters() == {"name": "nve", "dt": 2.0}
    assert Langevin(1.0, 300.0, 0.01, seed=5).parameters() == {
        "name": "nvt-langevin",
        "dt": 1.0,
        "temperature": 300.0,
        "friction": 0.01,
        "seed": 5,
    }


def test_what_conserves_momentum() -> None:
    assert VelocityVerlet(1.0).conserves_momentum
    assert not Langevin(1.0, 300.0, 0.01, seed=1).conserves_momentum
    assert Langevin(1.0, 300.0, 0.0, seed=1).conserves_momentum
