"""What counts as a change, what a copy carries, and what stays untouched."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import ase
import numpy as np
import pytest
import torch

from nvdd_core.interop.ase import DomainCalculator
from tests.interop.conftest import close, crystal, judge, new_calculator


def nudge(values: np.ndarray, place: tuple[int, ...]) -> None:
    """The next number up, and no further."""
    values[place] = np.nextafter(values[place], np.inf)


CHANGES: dict[str, Callable[[ase.Atoms], object]] = {
    "one bit of a coordinate": lambda atoms: nudge(atoms.positions, (7, 1)),
    "one bit of a large coordinate": lambda atoms: nudge(atoms.positions, (31, 2)),
    "one bit of the cell": lambda atoms: nudge(atoms.cell.array, (0, 0)),
    "pbc": lambda atoms: atoms.pbc.__setitem__(2, False),
    "numbers": lambda atoms: atoms.numbers.__setitem__(0, 18 - int(atoms.numbers[0] == 18)),
    "charge": lambda atoms: atoms.info.__setitem__("charge", 1),
    "deep in info": lambda atoms: atoms.info["deep"]["inside"].__setitem__(1, 2.5),
    "tags": lambda atoms: atoms.arrays["tags"].__setitem__(3, 4),
    "a new array": lambda atoms: atoms.set_array("spin", np.zeros(len(atoms))),
    "charges": lambda atoms: atoms.set_initial_charges(np.full(len(atoms), 0.5)),
    "number of atoms": lambda atoms: atoms.pop(-1),
    "order": lambda atoms: atoms.positions.__setitem__(slice(2), atoms.positions[1::-1].copy()),
}
HARMLESS: dict[str, Callable[[ase.Atoms], object]] = {
    "nothing": lambda atoms: None,
    "momenta": lambda atoms: atoms.set_momenta(np.ones((len(atoms), 3))),
    "masses": lambda atoms: atoms.set_masses(np.full(len(atoms), 3.0)),
    "constraint": lambda atoms: atoms.set_constraint(ase.constraints.FixAtoms([0])),
    "its own value": lambda atoms: atoms.positions.__imul__(1.0),
}


@pytest.fixture(scope="module")
def any_element() -> DomainCalculator:  # type: ignore[misc]
    """Two ranks that know every element."""
    options = {"sigma": 3.4, "epsilon": 0.0104, "cutoff": 6.5}
    with DomainCalculator("lj", ranks=2, device="cpu", options=options) as calc:
        yield calc


def structure() -> ase.Atoms:
    atoms = crystal(2, 2, 2)
    atoms.set_tags(range(len(atoms)))
    atoms.info["deep"] = {"inside": np.array([1.0, np.nan])}
    return atoms


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_once(name: str, any_element: DomainCalculator) -> None:
    atoms = structure()
    atoms.calc = any_element
    atoms.get_forces()
    count = any_element.n_evaluations
    CHANGES[name](atoms)
    assert any_element.calculation_required(atoms, ["energy"])
    atoms.get_potential_energy()
    assert any_element.n_evaluations == count + 1
    atoms.get_forces()
    atoms.get_stress()
    assert any_element.n_evaluations == count + 1
    assert not any_element.calculation_required(atoms, ["energy", "forces", "stress"])


@pytest.mark.parametrize("name", HARMLESS)
def test_no_change_is_no_evaluation(name: str, any_element: DomainCalculator) -> None:
    atoms = structure()
    atoms.calc = any_element
    energy = atoms.get_potential_energy()
    count = any_element.n_evaluations
    HARMLESS[name](atoms)
    assert atoms.get_potential_energy() == energy
    atoms.get_forces(apply_constraint=False)
    assert any_element.n_evaluations == count
    again = atoms.copy()  # another object, the same structure
    again.calc = any_element
    assert again.get_potential_energy() == energy
    assert any_element.n_evaluations == count


def test_a_result_is_the_callers_own(calculator: DomainCalculator) -> None:
    atoms = crystal()
    atoms.calc = calculator
    forces = atoms.get_forces()
    kept = forces.copy()
    forces[:] = 0.0
    assert np.array_equal(atoms.get_forces(), kept)


def _bytes(atoms: ase.Atoms) -> bytes:
    arrays = {name: array.tobytes() for name, array in sorted(atoms.arrays.items())}
    return pickle.dumps((arrays, atoms.cell.tobytes(), atoms.pbc.tobytes(), repr(atoms.info)))


def test_inputs_are_never_changed(calculator: DomainCalculator) -> None:
    atoms = structure()
    atoms.set_momenta(np.ones((len(atoms), 3)))
    atoms.positions -= 40.0  # outside the cell, where folding would show
    before = _bytes(atoms)
    atoms.calc = calculator
    first = atoms.get_forces()
    atoms.get_stress()
    assert _bytes(atoms) == before
    for array in (*atoms.arrays.values(), atoms.cell.array):
        array.flags.writeable = False
    calculator.reset()
    assert close(atoms.get_forces(), first)


def test_settings_of_torch_and_numpy_stay(calculator: DomainCalculator) -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            np.get_printoptions(),
            np.geterr(),
        )

    before = settings()
    found = {}
    with new_calculator(1, dtype="float32") as single:
        for calc, turn in [(single, 1), (calculator, 1), (single, 2), (calculator, 2)]:
            calc.reset()
            atoms = crystal()
            atoms.calc = calc
            found[calc.parameters["dtype"], turn] = atoms.get_potential_energy()
            assert settings() == before
    assert abs(found["float32", 1] - found["float32", 2]) < 1e-5
    assert close(found["float64", 1], found["float64", 2])
    assert found["float32", 1] != found["float64", 1]


def _energy(calc: DomainCalculator) -> tuple[float, int]:
    atoms = crystal(3, 1, 1)
    atoms.calc = calc
    with calc:
        return float(atoms.get_potential_energy()), calc.n_evaluations


def test_copies_start_ranks_of_their_own(no_orphans: Callable[[], list[int]]) -> None:
    atoms = crystal(3, 1, 1)
    original = new_calculator(1)
    unused = pickle.loads(pickle.dumps(original))  # before a first evaluation
    atoms.calc = original
    energy = atoms.get_potential_energy()
    mine = set(no_orphans())
    assert len(mine) == 1
    deep, travelled = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    for other in (deep, travelled):
        other.results["forces"][0] = 7.0
        assert set(no_orphans()) == mine  # a copy has results, but no process yet
        assert other.n_evaluations == 1
    assert np.abs(atoms.get_forces()).max() < 7.0
    whole = copy.deepcopy(atoms)  # with its calculator
    atoms.rattle(0.1, seed=4)
    assert close(whole.get_potential_energy(), energy)
    deep.reset()
    assert close(_energy(deep)[0], energy)
    assert close(_energy(unused)[0], energy)
    assert set(no_orphans()) == mine
    atoms.get_forces()
    atoms.calc = original = None  # type: ignore[assignment]
    assert not no_orphans()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_processes(method: str) -> None:
    calc = new_calculator(1)
    before = _energy_kept(calc)
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as executor:
        again, count = executor.submit(_energy, calc).result(timeout=240)
    assert close(again, before)
    assert count == 1  # the result travelled
    calc.reset()
    assert close(_energy_kept(calc), before)
    calc.close()


FORKED: list[DomainCalculator] = []


def _in_fork(shift: float) -> float:
    """Use the calculator that a forked child finds in its memory."""
    atoms = crystal(3, 1, 1)
    atoms.positions[0, 0] += shift
    atoms.calc = FORKED[0]
    energy = float(atoms.get_potential_energy())
    FORKED[0].close()
    return energy


def test_a_forked_child_leaves_its_parents_ranks_alone(no_orphans: Callable[[], list[int]]) -> None:
    calc = new_calculator(2)
    FORKED[:] = [calc]
    before = _energy_kept(calc)
    ranks = set(no_orphans())
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        moved = executor.submit(_in_fork, 0.1).result(timeout=240)
    gc.collect()
    calc.reset()
    assert close(_energy_kept(calc), before)
    assert abs(moved - before) > 1e-4
    assert ranks <= set(no_orphans())
    calc.close()
    FORKED.clear()


def _energy_kept(calc: DomainCalculator) -> float:
    atoms = crystal(3, 1, 1)
    atoms.calc = calc
    return float(atoms.get_potential_energy())


def test_threads_take_turns(calculator: DomainCalculator) -> None:
    def work(seed: int) -> tuple[int, float]:
        atoms = crystal(3, 1, 1)
        atoms.rattle(0.1, seed=seed)
        atoms.calc = calculator
        return seed, float(atoms.get_potential_energy())

    with ThreadPoolExecutor(4) as executor:
        for seed, energy in executor.map(work, range(12)):
            atoms = crystal(3, 1, 1)
            atoms.rattle(0.1, seed=seed)
            atoms.calc = judge()
            assert close(energy, atoms.get_potential_energy())
