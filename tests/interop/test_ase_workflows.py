"""What ASE does with a calculator, run unchanged: each against the same with ASE's own Lennard-Jones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase
import ase.build
import ase.io
import numpy as np
import pytest
from ase import units
from ase.calculators.calculator import Calculator
from ase.calculators.mixing import SumCalculator
from ase.constraints import FixAtoms
from ase.eos import EquationOfState
from ase.filters import ExpCellFilter, FrechetCellFilter
from ase.io.trajectory import Trajectory
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.phonons import Phonons
from ase.vibrations import Vibrations

from nvdd_core.interop.ase import DomainCalculator
from tests.interop.conftest import close, crystal, judge, new_calculator

Work = Callable[[ase.Atoms], Any]


def both(work: Work, atoms: ase.Atoms, calc: Calculator) -> Any:
    """Do the same work with both calculators, compare what it returns and give it."""
    results = []
    for calculator in (calc, judge()):
        mine = atoms.copy()
        mine.calc = calculator
        results.append(work(mine))
    for ours, theirs in zip(*results, strict=True):
        assert close(ours, theirs)
    return results[0]


@pytest.mark.parametrize("optimizer", [BFGS, FIRE])
@pytest.mark.parametrize("kind", [None, ExpCellFilter, FrechetCellFilter])
@pytest.mark.filterwarnings("ignore:Use FrechetCellFilter:DeprecationWarning")
def test_relaxation(optimizer: Any, kind: Any, calculator: DomainCalculator) -> None:
    atoms = crystal(2, 2, 1)
    atoms.set_cell(atoms.cell.array * 1.02, scale_atoms=True)
    if kind is None:
        atoms.set_constraint(FixAtoms([0, 1]))

    def relax(atoms: ase.Atoms) -> tuple[Any, ...]:
        run = optimizer(atoms if kind is None else kind(atoms), logfile=None)
        run.run(fmax=1e-4, steps=12)
        return atoms.positions, atoms.cell.array, atoms.get_potential_energy(), run.nsteps

    count = calculator.n_evaluations
    *_, steps = both(relax, atoms, calculator)
    assert steps > 3
    assert calculator.n_evaluations - count <= steps + 2  # one a step, also where the cell relaxes


@pytest.mark.parametrize("thermostat", [False, True])
def test_dynamics(thermostat: bool, calculator: DomainCalculator) -> None:
    atoms = crystal(2, 2, 1)
    MaxwellBoltzmannDistribution(atoms, temperature_K=60.0, rng=np.random.RandomState(3))

    def run(atoms: ase.Atoms) -> tuple[Any, ...]:
        noise = {
            "temperature_K": 60.0,
            "friction": 0.01 / units.fs,
            "fixcm": False,
            "rng": np.random.RandomState(5),
        }
        kind = Langevin if thermostat else VelocityVerlet
        kind(atoms, timestep=4.0 * units.fs, **(noise if thermostat else {})).run(40)
        return atoms.positions, atoms.get_momenta(), atoms.get_total_energy()

    count, rebuilds = calculator.n_evaluations, calculator.n_rebuilds
    both(run, atoms, calculator)
    assert calculator.n_evaluations - count == 41
    assert calculator.n_rebuilds - rebuilds < 8


def hop() -> list[ase.Atoms]:
    """An atom next to a vacancy, before and after it takes the free place, and between."""
    first = ase.build.bulk("Ar", "fcc", a=5.26, cubic=True) * (2, 2, 1)
    free = first.positions[0].copy()
    del first[0]
    last = first.copy()
    last.positions[int(np.argmin(((first.positions - free) ** 2).sum(1)))] = free
    return [first, first.copy(), first.copy(), first.copy(), last]


@pytest.mark.parametrize("shared", [True, False])
def test_elastic_band(shared: bool, calculator: DomainCalculator) -> None:
    def band(calculators: list[Calculator]) -> tuple[Any, ...]:
        images = hop()
        path = NEB(images, climb=True, k=0.2, method="improvedtangent", allow_shared_calculator=shared)
        path.interpolate(mic=True)
        for image, calc in zip(images, calculators, strict=True):
            image.calc = calc
        FIRE(path, logfile=None).run(fmax=1e-4, steps=8)
        return np.array([image.positions for image in images]), [
            image.get_potential_energy() for image in images
        ]

    own = [] if shared else [new_calculator(1) for _ in range(3)]
    found = band([calculator] * 5 if shared else [judge(), *own, judge()])
    expected = band([judge()] * 5 if shared else [judge() for _ in range(5)])
    for calc in own:
        calc.close()
    assert close(found[0], expected[0])
    assert close(found[1], expected[1])
    assert max(found[1]) > found[1][0] + 0.01  # a barrier was climbed


def test_phonons(calculator: DomainCalculator, tmp_path: Path) -> None:
    def bands(atoms: ase.Atoms) -> tuple[Any, ...]:
        name = str(tmp_path / type(atoms.calc).__name__)
        phonons = Phonons(atoms, atoms.calc, supercell=(3, 3, 3), delta=0.02, name=name)
        phonons.run()
        phonons.read(acoustic=True)
        path = atoms.cell.bandpath("GXL", npoints=7)
        return (phonons.get_band_structure(path, verbose=False).energies,)

    (energies,) = both(bands, ase.build.bulk("Ar", "fcc", a=5.26), calculator)
    assert 1e-3 < energies.max() < 1e-1  # eV


def test_vibrations(calculator: DomainCalculator, tmp_path: Path) -> None:
    r = 2 ** (1 / 6) * 3.4
    atoms = ase.Atoms("Ar3", positions=[[0, 0, 0], [r, 0, 0], [r / 2, r * 0.75**0.5, 0]])

    def modes(atoms: ase.Atoms) -> tuple[Any, ...]:
        run = Vibrations(atoms, name=str(tmp_path / type(atoms.calc).__name__))
        run.run()
        return (run.get_energies().real[6:],)

    (energies,) = both(modes, atoms, calculator)
    assert energies.min() > 1e-3


def test_equation_of_state(calculator: DomainCalculator) -> None:
    def fit(atoms: ase.Atoms) -> tuple[Any, ...]:
        cell, volumes, energies = atoms.cell.array.copy(), [], []
        for scale in np.linspace(0.97, 1.03, 7):
            atoms.set_cell(cell * scale, scale_atoms=True)
            volumes.append(atoms.get_volume())
            energies.append(atoms.get_potential_energy())
        v0, e0, modulus = EquationOfState(volumes, energies, eos="birchmurnaghan").fit()
        return v0 * 1e-4, e0, modulus, energies  # a fit magnifies the last digits of a volume

    both(fit, ase.build.bulk("Ar", "fcc", a=5.3, cubic=True), calculator)


def test_a_sum_with_another_calculator(calculator: DomainCalculator) -> None:
    atoms = crystal(2, 1, 1)
    atoms.calc = judge()
    expected = [2 * atoms.get_potential_energy(), 2 * atoms.get_forces(), 2 * atoms.get_stress()]
    atoms.calc = SumCalculator([calculator, judge()])
    found = [atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()]
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def test_trajectories_hold_the_results(calculator: DomainCalculator, tmp_path: Path) -> None:
    atoms = crystal(2, 1, 1)
    atoms.calc = calculator
    energies = []
    with Trajectory(tmp_path / "run.traj", "w", atoms) as trajectory:
        for seed in range(3):
            atoms.rattle(0.1, seed=seed)
            energies.append(atoms.get_potential_energy())
            trajectory.write()
    ase.io.write(tmp_path / "run.extxyz", atoms)
    read = ase.io.read(tmp_path / "run.traj", ":")
    assert [frame.get_potential_energy() for frame in read] == energies
    assert close(read[-1].get_stress(), atoms.get_stress())
    assert close(ase.io.read(tmp_path / "run.extxyz").get_forces(), atoms.get_forces())
    molecule = ase.Atoms("Ar2", positions=[[0, 0, 0], [3.8, 0, 0]], calculator=calculator)
    molecule.get_forces()
    molecule.write(tmp_path / "molecule.traj")  # which asks for a stress that there isn't
    assert close(ase.io.read(tmp_path / "molecule.traj").get_forces(), molecule.get_forces())
