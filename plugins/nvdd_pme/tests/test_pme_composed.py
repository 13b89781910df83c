"""Compositions: lj+pme is the sum of both on any ranks, and charges of another member carry their forces (O-31)."""

from __future__ import annotations

import numpy as np
import pme_kit as kit
import pytest

from nvdd_core.errors import InputError
from nvdd_core.runtime import DomainConfig
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import close_pools, evaluate
from nvdd_core.testing.distributed_checks import pool
from nvdd_core.testing.evaluation import Evaluated
from nvdd_core.testing.ranks import Job, evaluate_jobs, joined

FAST = frozenset({"energy", "forces", "stress"})
LJ = {"epsilon": 0.01, "sigma": 2.2, "cutoff": 5.0, "shift": "force"}
PME = {"accuracy": 1e-9, "cutoff": 6.0}
BOTH = ModelSource("lj+pme", {f"lj.{k}": v for k, v in LJ.items()} | {f"pme.{k}": v for k, v in PME.items()})


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    close_pools()


def structures():
    """A crystal off its sites, and a skewed cell with a net charge."""
    crystal = kit.rippled_salt()
    crystal.set_array("charges", np.array([1.0] * 4 + [-1.0] * 4))
    return {"crystal": crystal.repeat((1, 2, 3)), "skewed": kit.disordered(3, 9.0, 0.35, 1)}


def jobs():
    return [
        Job(name, atoms, DomainConfig(strategy=kind, skin=0.4), outputs=FAST)
        for name, atoms in structures().items()
        for kind in StrategyKind
    ]


def on_ranks(source, work, n_ranks):
    """Results of each job in the order of the atoms, on so many ranks."""
    shares = pool(n_ranks).run(evaluate_jobs, source, work)
    return [joined([mine[j][0] for mine in shares], len(job.atoms), job.name) for j, job in enumerate(work)]


def summed(results):
    one, other = results
    totals = {name: one.totals[name] + other.totals[name] for name in ("energy", "stress")}
    return Evaluated(totals, {"forces": one.forces + other.forces})


def assert_same(found, right, job):
    label = f"{job.name} {job.config.strategy.value}"
    assert abs(found.energy[0] - right.energy[0]) <= 1e-11 * len(job.atoms), label
    np.testing.assert_allclose(found.forces, right.forces, rtol=0, atol=1e-9, err_msg=label)
    np.testing.assert_allclose(found.stress, right.stress, rtol=0, atol=1e-11, err_msg=label)


# -- lj+pme --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def members():
    """Each member alone in one process."""
    models = [ModelSource("lj", LJ).load(), ModelSource("pme", PME).load()]
    return {name: [evaluate(m, atoms, FAST) for m in models] for name, atoms in structures().items()}


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_rule_w(members, n_ranks):
    work = jobs()
    for job, found in zip(work, on_ranks(BOTH, work, n_ranks), strict=True):
        assert_same(found, summed(members[job.name]), job)


@pytest.mark.parametrize("name", structures())
def test_the_coulomb_part_is_the_direct_sum(members, name):
    """What the composition has beyond lj, against the sum in numpy and differences of its energy."""
    atoms = structures()[name]
    found, lj = evaluate(BOTH.load(), atoms, FAST), members[name][0]
    energy, forces, _ = kit.direct_ewald(atoms)
    assert found.energy[0] - lj.energy[0] == pytest.approx(energy, rel=1e-8)
    np.testing.assert_allclose(found.forces - lj.forces, forces, rtol=0, atol=1e-8 * np.abs(forces).max())
    stress, h = found.stress[0] - lj.stress[0], 1e-4
    for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)):
        ends = []
        for sign in (1.0, -1.0):
            strain = np.eye(3)
            strain[i, j] += sign * h / 2
            strain[j, i] += sign * h / 2
            bent = atoms.copy()
            bent.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            ends.append(kit.direct_ewald(bent)[0])
        slope = (ends[0] - ends[1]) / (2 * h * atoms.cell.volume)
        assert stress[i, j] == pytest.approx(slope, abs=1e-8), (i, j)


# -- O-31: charges of another member -------------------------------------------------------------------------------


def charged(name, accuracy=1e-10, frozen=False):
    return ModelSource(
        f"tests.cases.composed:Charges+nvdd_pme.model:load_{name}",
        {"accuracy": accuracy, f"load_{name}.cutoff": 8.0, "frozen": frozen},
    )


@pytest.mark.parametrize("name", ["ewald", "pme"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_charges_of_another_member(name, n_ranks):
    """The stated numbers; forces and stress are slopes of the energy, of which charges have a part."""
    atoms, source = kit.rippled_salt(), charged(name)
    model = source.load()
    work = [Job("salt", atoms, DomainConfig(strategy=kind), outputs=FAST) for kind in StrategyKind]
    right = evaluate(model, atoms, FAST)
    for job, found in zip(work, on_ranks(source, work, n_ranks), strict=True):
        assert_same(found, right, job)
        assert found.energy[0] == pytest.approx(-38.9518833 * kit.UNIT, abs=2e-7)
        assert found.forces[0, 0] == pytest.approx(0.343338 * kit.UNIT, abs=1e-6)
        assert found.forces[5, 2] == pytest.approx(0.429536 * kit.UNIT, abs=1e-6)


def slope(model, atoms, change, h=1e-4):
    """Central difference of the energy."""
    ends = []
    for sign in (1.0, -1.0):
        moved = atoms.copy()
        change(moved, sign * h)
        ends.append(evaluate(model, moved, {"energy"}).energy[0])
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_forces_and_stress_go_through_the_charges(name):
    atoms, model = kit.rippled_salt(), charged(name).load()
    found = evaluate(model, atoms, FAST)
    for atom in range(len(atoms)):
        for axis in range(3):

            def move(moved, step, place=(atom, axis)):
                moved.positions[place] += step

            assert found.forces[atom, axis] == pytest.approx(-slope(model, atoms, move), abs=2e-7)
    for i, j in ((0, 0), (1, 2)):

        def bend(moved, step, i=i, j=j):
            strain = np.eye(3)
            strain[i, j] += step / 2
            strain[j, i] += step / 2
            moved.set_cell(moved.cell.array @ strain, scale_atoms=True)

        assert found.stress[0, i, j] == pytest.approx(slope(model, atoms, bend) / atoms.cell.volume, abs=2e-8)
    frozen = evaluate(charged(name, frozen=True).load(), atoms, FAST)
    assert frozen.energy[0] == pytest.approx(found.energy[0], abs=1e-10)
    assert frozen.forces[0, 0] == pytest.approx(0.331809 * kit.UNIT, abs=1e-6)
    assert frozen.forces[5, 2] == pytest.approx(0.439737 * kit.UNIT, abs=1e-6)


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_two_sources_of_charges_are_refused(name):
    """The option and another member: when the models are put together, and by the model itself."""
    source = charged(name)
    with pytest.raises(
        InputError, match=rf"member 'load_{name}' .* option .* member 'Charges' .* leave the option"
    ):
        ModelSource(source.target, {**source.options, f"load_{name}.charges": "Na=1,Cl=-1"}).load()
    with pytest.raises(
        InputError, match=f"{name}: another model computes the charges.* leave the option out"
    ):
        evaluate(kit.MovingCharges(name, charges="Na=1,Cl=-1"), kit.rippled_salt(), FAST)
