"""Energies, forces, stress and dE/dq against known constants, a direct sum in numpy, scaling laws and differences."""

from __future__ import annotations

import resource

import numpy as np
import pme_kit as kit
import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.testing import evaluate
from nvdd_pme.model import COULOMB, load_ewald, load_pme

ALL = {"energy", "forces", "stress", "node_energy", "charge_gradient"}
FAST = {"energy", "forces", "stress"}

# Energy per formula unit is -M q^2 / d, d the nearest distance
MADELUNG = {
    "NaCl": (1.7475645946331822, 1.0, [(0.5, 0.5, 0.5)], "fcc", 0.5),
    "CsCl": (1.7626747730709920, 1.0, [(0.5, 0.5, 0.5)], "sc", np.sqrt(3) / 2),
    "ZnS": (1.6380550533887984, 1.0, [(0.25, 0.25, 0.25)], "fcc", np.sqrt(3) / 4),
}
LATTICES = {"fcc": [(0, 0, 0), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0)], "sc": [(0, 0, 0)]}


def crystal(name, a=5.0):
    constant, _, (offset,), lattice, nearest = MADELUNG[name]
    cations = np.array(LATTICES[lattice], float)
    places = a * np.concatenate([cations, cations + np.array(offset)])
    charges = np.repeat([1.0, -1.0], len(cations))
    return kit.ions(places, [a] * 3, charges), -constant * COULOMB * len(cations) / (nearest * a)


@pytest.mark.parametrize("name", MADELUNG)
def test_madelung(name):
    atoms, expected = crystal(name)
    found = evaluate(load_ewald(**kit.CPU, accuracy=1e-11), atoms, FAST)
    assert abs(found.energy[0] / expected - 1) < 1e-9
    assert np.abs(found.forces).max() < 1e-9
    for accuracy in (1e-3, 1e-5, 1e-8):
        found = evaluate(load_pme(**kit.CPU, accuracy=accuracy), atoms, FAST)
        assert abs(found.energy[0] / expected - 1) < accuracy


@pytest.mark.parametrize("case", kit.O28)
@pytest.mark.parametrize("cutoff", [5.0, 8.0])
def test_charged_and_skewed_cells(case, cutoff):
    """O-28: energies, and V tr S = -E, whatever alpha and mesh follow from the cutoff."""
    atoms, energy = kit.O28[case]
    volume = atoms.cell.volume
    for model, relative in (
        (load_ewald(**kit.CPU, accuracy=1e-12, cutoff=cutoff), 1e-11),
        (load_pme(**kit.CPU, accuracy=1e-9, cutoff=cutoff), 1e-8),
    ):
        for outputs in (FAST, ALL):
            found = evaluate(model, atoms, outputs)
            assert found.energy[0] == pytest.approx(energy * kit.UNIT, abs=1e-7)
            assert volume * np.trace(found.stress[0]) == pytest.approx(-found.energy[0], rel=relative)
    if case == "one charge":
        np.testing.assert_allclose(np.diag(found.stress[0]), 6.80935e-4 * kit.UNIT, rtol=2e-6)
        assert np.abs(found.forces).max() < 1e-8


@pytest.mark.parametrize(("skew", "seed"), [(0.0, 0), (0.35, 1)])
def test_direct_sum(skew, seed):
    atoms = kit.disordered(3, 9.0, skew, seed)
    energy, forces, potential = kit.direct_ewald(atoms)
    other = kit.direct_ewald(atoms, alpha=0.7)
    assert other[0] == pytest.approx(energy, rel=1e-13)  # the oracle doesn't depend on how it splits
    for model, relative in (
        (load_ewald(**kit.CPU, accuracy=1e-13), 1e-11),
        (load_pme(**kit.CPU, accuracy=1e-9), 1e-8),
    ):
        found = evaluate(model, atoms, ALL)
        unit = np.abs(forces).max()
        assert found.energy[0] == pytest.approx(energy, rel=relative)
        np.testing.assert_allclose(found.forces, forces, rtol=0, atol=relative * unit)
        np.testing.assert_allclose(found.rows["charge_gradient"], potential, rtol=0, atol=10 * relative)
        np.testing.assert_allclose(
            found.node_energy, 0.5 * atoms.arrays["charges"] * potential, rtol=0, atol=10 * relative
        )
        fast = evaluate(model, atoms, FAST)
        assert fast.energy[0] == pytest.approx(found.energy[0], rel=1e-13)
        np.testing.assert_allclose(fast.forces, found.forces, rtol=0, atol=1e-12 * unit)
        np.testing.assert_allclose(fast.stress, found.stress, rtol=0, atol=1e-13)


@pytest.mark.parametrize("accuracy", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("cutoff", [5.0, 9.0, 12.0])
def test_asked_accuracy_is_reached(accuracy, cutoff):
    """Of forces, in the kit's unit."""
    for skew, seed in ((0.0, 0), (0.35, 1)):
        atoms = kit.disordered(4, 14.0, skew, seed)
        exact = evaluate(load_ewald(**kit.CPU, accuracy=1e-13), atoms, {"forces"}).forces
        unit = kit.force_unit(atoms)
        for load in (load_ewald, load_pme):
            found = evaluate(load(**kit.CPU, accuracy=accuracy, cutoff=cutoff), atoms, {"forces"}).forces
            error = np.sqrt(((found - exact) ** 2).sum(1).mean()) / unit
            assert error < accuracy


@pytest.mark.parametrize("times", [0, 7])
@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_stress_after_a_change_of_cell(name, times):
    """O-29: one object on two cells; autograd, differences of the energy, and the scaling law agree."""
    model = {"ewald": load_ewald, "pme": load_pme}[name](**kit.CPU, accuracy=1e-9, cutoff=7.0)
    first = kit.sheared(kit.skewed(), times)
    for strain in (np.zeros((3, 3)), 0.04 * np.array([[1.0, 0.3, 0.0], [0.3, -0.5, 0.2], [0.0, 0.2, 0.4]])):
        atoms = first.copy()
        atoms.set_cell(first.cell.array @ (np.eye(3) + strain), scale_atoms=True)
        found, volume, h = evaluate(model, atoms, FAST), atoms.cell.volume, 1e-5
        assert volume * np.trace(found.stress[0]) == pytest.approx(-found.energy[0], rel=1e-6)
        for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)):
            energies = []
            for sign in (1.0, -1.0):
                bent = atoms.copy()
                e = np.eye(3)
                e[i, j] += sign * h / 2
                e[j, i] += sign * h / 2
                bent.set_cell(atoms.cell.array @ e, scale_atoms=True)
                energies.append(evaluate(model, bent, {"energy"}).energy[0])
            slope = (energies[0] - energies[1]) / (2 * h * volume)
            assert found.stress[0][i, j] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_a_cell_that_changes_in_a_run(name, monkeypatch):
    """Parameters are chosen anew with the cell, in place or replaced, and in no other step."""
    options = {**kit.CPU, "accuracy": 1e-8, "cutoff": 5.0}
    load = {"ewald": load_ewald, "pme": load_pme}[name]
    model, looked, sizes = load(**options), [], []
    choose = model._long_range.choose
    monkeypatch.setattr(model._long_range, "choose", lambda *given: looked.append(1) or choose(*given))
    sharded = ShardedBatch.scatter(Batch.from_ase(kit.rock_salt()), Mesh.single("cpu"))
    distributed = DistributedModel(model, DomainConfig(skin=0.5))
    for factor in (1.0, 1.4, 0.6):
        sharded.positions.mul_(factor)
        if factor > 1.0:
            sharded.cell.mul_(factor)
        elif factor < 1.0:
            sharded.cell = factor * sharded.cell
        for step in range(3):
            sharded.positions.add_(0.01 * torch.cos(torch.arange(24.0).view(8, 3) + step))
            found = distributed(sharded, FAST)
            cell, charges = sharded.cell[0].numpy(), sharded.fields["charges"].numpy()
            fresh = evaluate(load(**options), kit.ions(sharded.positions.numpy(), cell, charges), FAST)
            assert float(found.energy) == pytest.approx(fresh.energy[0], rel=1e-12)
            np.testing.assert_allclose(found.forces, fresh.forces, rtol=0, atol=1e-11)
            np.testing.assert_allclose(found.stress, fresh.stress, rtol=0, atol=1e-12)
        sizes.append(model.chosen[0].size)
    assert sizes[0] < sizes[1] > sizes[2]
    assert len(looked) == 3


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_charge_gradient_is_a_slope(name):
    model = {"ewald": load_ewald, "pme": load_pme}[name](**kit.CPU, accuracy=1e-5, cutoff=6.0)
    atoms = kit.skewed(0.3)
    found = evaluate(model, atoms, ALL).rows["charge_gradient"]
    for i in range(4):
        energies = []
        for step in (1e-4, -1e-4):
            moved = atoms.copy()
            moved.arrays["charges"] = atoms.arrays["charges"].copy()
            moved.arrays["charges"][i] += step
            energies.append(evaluate(model, moved, {"energy"}).energy[0])
        assert found[i] == pytest.approx((energies[0] - energies[1]) / 2e-4, rel=1e-9)


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_replicas_of_charged_cells(name):
    """O-30, one process: 2 x 2 x 2 cells have 8 times the energy, of a net charge as well."""
    model = {"ewald": load_ewald, "pme": load_pme}[name](**kit.CPU, accuracy=1e-9)
    for case, (atoms, energy) in kit.O28.items():
        found = evaluate(model, atoms.repeat(2), FAST)
        assert found.energy[0] == pytest.approx(8 * energy * kit.UNIT, abs=1e-6), case


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_charges_that_move_with_the_atoms(name):
    """O-31: the chain rule through q(R)."""
    atoms = kit.rippled_salt()
    model = kit.MovingCharges(name, accuracy=1e-10, cutoff=8.0)
    found = evaluate(model, atoms, FAST)
    assert found.energy[0] == pytest.approx(-38.9518833 * kit.UNIT, abs=2e-7)
    assert found.forces[0, 0] == pytest.approx(0.343338 * kit.UNIT, abs=1e-6)
    assert found.forces[5, 2] == pytest.approx(0.429536 * kit.UNIT, abs=1e-6)
    rows = evaluate(model, atoms, ALL)
    np.testing.assert_allclose(rows.forces, found.forces, rtol=0, atol=1e-11)
    np.testing.assert_allclose(rows.stress, found.stress, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_nothing_piles_up(name):
    """O-32: many evaluations of moving ions keep neither graphs nor buffers."""
    model = {"ewald": load_ewald, "pme": load_pme}[name](**kit.CPU, accuracy=1e-5, cutoff=5.0)
    atoms = kit.rock_salt()
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single("cpu"))
    distributed = DistributedModel(model, DomainConfig(skin=0.5))
    first = kept = None
    for step in range(500):
        sharded.positions.add_(1e-4 * torch.cos(torch.arange(24.0).view(8, 3) + step))
        out = distributed(sharded, FAST)
        if step == 0:
            first, kept = out, out.energy.clone()
        if step == 60:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(first.energy, kept)
    assert first.energy.grad_fn is None
    assert out.energy.data_ptr() != first.energy.data_ptr()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 1.01 * early
