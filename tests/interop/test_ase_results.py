"""Energies, forces and stress of all kinds of structures against ASE's Lennard-Jones."""

from __future__ import annotations

from collections.abc import Callable

import ase
import ase.build
import numpy as np
import pytest
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.lj import LennardJones

from nvdd_core.errors import InputError
from nvdd_core.interop.ase import DomainCalculator
from nvdd_core.runtime import DomainConfig
from tests.interop.conftest import EPSILON, OPTIONS, SIGMA, close, crystal, judge, new_calculator


def slab() -> ase.Atoms:
    atoms = ase.build.fcc111("Ar", (3, 3, 3), a=5.26, vacuum=8.0)
    atoms.rattle(0.05, seed=2)
    return atoms


def flat_slab() -> ase.Atoms:
    """A slab whose cell has no third vector."""
    atoms = ase.build.fcc111("Ar", (3, 3, 2), a=5.26)
    atoms.rattle(0.05, seed=2)
    return atoms


def cluster() -> ase.Atoms:
    positions = crystal(2, 2, 1).positions
    return ase.Atoms(f"Ar{len(positions)}", positions=positions)


def primitive() -> ase.Atoms:
    atoms = ase.build.bulk("Ar", "fcc", a=5.26)  # shorter than the cutoff by far
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.02 * np.arange(9).reshape(3, 3)), scale_atoms=True)
    return atoms


def left_handed() -> ase.Atoms:
    atoms = crystal(2, 1, 1)
    atoms.set_cell(atoms.cell.array[[1, 0, 2]])
    return atoms


def far_outside() -> ase.Atoms:
    atoms = crystal(2, 1, 1)
    atoms.positions += (np.arange(len(atoms))[:, None] % 3 - 1) * (atoms.cell.sum(0) * 3)
    return atoms


def wire() -> ase.Atoms:
    atoms = ase.Atoms("Ar3", positions=[[0, 0, 0], [3.7, 0.1, 0], [7.5, 0, 0.2]], cell=[11.3, 0, 0])
    atoms.pbc = [True, False, False]
    return atoms


def lone() -> ase.Atoms:
    return ase.Atoms("Ar", positions=[[1.0, 2.0, 3.0]])


STRUCTURES: list[Callable[[], ase.Atoms]] = [
    crystal,
    slab,
    flat_slab,
    cluster,
    primitive,
    left_handed,
    far_outside,
    wire,
    lone,
]


def compare(atoms: ase.Atoms, calc: DomainCalculator) -> None:
    """Compare everything with ASE's calculator."""
    expected = atoms.copy()
    expected.calc, atoms.calc = judge(), calc
    assert close(atoms.get_potential_energy(), expected.get_potential_energy())
    assert close(atoms.get_potential_energy(force_consistent=True), expected.get_potential_energy())
    assert close(atoms.get_forces(), expected.get_forces())
    assert close(atoms.get_potential_energies(), expected.get_potential_energies())
    if atoms.cell.rank == 3:
        assert close(atoms.get_stress(), expected.get_stress())
        assert close(atoms.get_stress(voigt=False), expected.get_stress(voigt=False))
    else:
        with pytest.raises(PropertyNotImplementedError, match="three cell vectors"):
            atoms.get_stress()


@pytest.mark.parametrize("make", STRUCTURES, ids=lambda make: make.__name__)
def test_structures(make: Callable[[], ase.Atoms], calculator: DomainCalculator) -> None:
    atoms = make()
    before = calculator.n_evaluations
    compare(atoms, calculator)
    assert calculator.n_evaluations == before + 1  # which gave all of it
    rebuilds = calculator.n_rebuilds
    atoms.rattle(0.02, seed=5)
    compare(atoms, calculator)
    assert calculator.n_rebuilds == rebuilds  # well within the skin
    atoms.positions[0] += [0.5, -0.4, 0.3]
    compare(atoms, calculator)
    assert calculator.n_rebuilds == rebuilds + 1
    if atoms.cell.rank == 3:
        atoms.set_cell(atoms.cell @ (np.eye(3) + 0.01), scale_atoms=True)
        compare(atoms, calculator)
        assert calculator.n_rebuilds == rebuilds + 2
    rebuilds = calculator.n_rebuilds
    atoms.rattle(0.02, seed=7)
    compare(atoms, calculator)
    assert calculator.n_rebuilds == rebuilds  # what counts is where atoms were at the last one


def test_no_atoms(calculator: DomainCalculator) -> None:
    with pytest.raises(InputError, match="no atoms"):
        ase.Atoms(calculator=calculator).get_potential_energy()
    compare(crystal(), calculator)


def test_one_rank_wide_halo_and_float32() -> None:
    atoms = crystal(2, 2, 2)
    energies = []
    for others in ({"dtype": "float32"}, {"strategy": "wide-halo", "skin": 0.0}):
        with new_calculator(1, **others) as calc:
            atoms.calc = calc
            energies.append(atoms.get_potential_energy())
            assert atoms.get_forces().dtype == np.float64
    expected = atoms.copy()
    expected.calc = judge()
    assert close(energies[1], expected.get_potential_energy())
    assert 0 < abs(energies[0] - expected.get_potential_energy()) < 1e-5


def test_a_system_too_wide_for_float32_is_told() -> None:
    atoms = crystal(2, 2, 2)
    atoms.pbc, atoms.cell = True, [1e4] * 3
    with new_calculator(1, dtype="float32") as atoms.calc, pytest.warns(UserWarning, match="0.0006 A apart"):
        atoms.get_potential_energy()


def test_three_ranks_on_a_grid() -> None:
    config = DomainConfig(grid_dims=(3, 1, 1), skin=9.0)  # whose skin gives way
    with new_calculator(3, config=config, strategy="halo") as calc:
        compare(crystal(3, 1, 1), calc)
        compare(lone(), calc)
        assert calc.parameters["skin"] == 1.0


def test_a_model_of_our_own_and_its_fields() -> None:
    atoms = crystal(3, 1, 1)
    atoms.positions *= 0.4
    atoms.set_cell(atoms.cell * 0.4)
    with DomainCalculator("tests.interop.models:Charged", ranks=2, device="cpu") as calc:
        atoms.calc = calc
        plain = atoms.get_potential_energy()
        charges = np.arange(len(atoms)) / 7.0
        atoms.set_initial_charges(charges)
        assert close(atoms.get_potential_energy(), plain + (charges**2).sum())
        atoms.arrays["initial_charges"][1] = 3.0
        charges[1] = 3.0
        assert close(atoms.get_potential_energy(), plain + (charges**2).sum())
        assert calc.n_evaluations == 3
        with pytest.raises(PropertyNotImplementedError, match="gives no stress"):
            atoms.get_stress()
        with pytest.raises(PropertyNotImplementedError):
            atoms.get_dipole_moment()
        assert calc.n_evaluations == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 1.5}, "ranks"),
        ({"strategy": "magic"}, "strategy"),
        ({"skin": -1.0}, "skin"),
        ({"model": lambda **_: None}, "by name"),
    ],
)
def test_arguments(arguments: dict[str, object], said: str) -> None:
    given = {"model": "lj", "device": "cpu", **arguments}
    with pytest.raises(InputError, match=said):
        DomainCalculator(given.pop("model"), **given)  # type: ignore[arg-type]


def test_settings_cannot_change() -> None:
    calc = new_calculator()
    with pytest.raises(InputError, match="make another"):
        calc.set(skin=2.0)
    assert calc.name == "nvdd"
    assert calc.todict()["ranks"] == 2


def test_a_composition_gives_the_weighted_sum() -> None:
    atoms = crystal()
    options = {f"lj.{name}": value for name, value in OPTIONS.items()}
    options |= {f"lj2.{name}": value for name, value in OPTIONS.items()} | {"lj2.cutoff": 5.0}
    near = LennardJones(sigma=SIGMA, epsilon=EPSILON, rc=5.0)
    with DomainCalculator("lj+0.5*lj", ranks=2, device="cpu", options=options, timeout_s=240.0) as calculator:
        for _ in range(2):
            found, first, second = (atoms.copy() for _ in range(3))
            found.calc, first.calc, second.calc = calculator, judge(), near
            for name in ("energy", "forces", "stress", "energies"):
                right = first.calc.get_property(name, first) + 0.5 * second.calc.get_property(name, second)
                assert close(found.calc.get_property(name, found), right)
            atoms.rattle(0.01, seed=5)
