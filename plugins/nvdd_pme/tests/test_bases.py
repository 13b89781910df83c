"""The same lattice written with other vectors: the error asked for is reached, and short vectors stay as they are."""

from __future__ import annotations

import numpy as np
import pme_kit as kit
import pytest
import torch

from nvdd_core.runtime import DomainConfig
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing import close_pools, evaluate
from nvdd_core.testing.distributed_checks import pool
from nvdd_core.testing.ranks import Job, evaluate_jobs, joined
from nvdd_pme.bases import shorter_basis
from nvdd_pme.model import load_ewald, load_pme
from nvdd_pme.parameters import Options, choose_mesh

FAST = frozenset({"energy", "forces", "stress"})
ALL = FAST | {"node_energy", "charge_gradient"}
SHORT = {
    "cubic": np.eye(3),
    "longest first": np.diag([9.0, 2.0, 5.0]),
    "hexagonal, 120 degrees": [[1, 0, 0], [-0.5, 0.75**0.5, 0], [0, 0, 3]],
    "hexagonal, 60 degrees": [[1, 0, 0], [0.5, 0.75**0.5, 0], [0, 0, 3]],
    "face-centred": [[0, 1, 1], [1, 0, 1], [1, 1, 0]],
    "body-centred": [[-1, 1, 1], [1, -1, 1], [1, 1, -1]],
    "left-handed": [[0, 1, 0.1], [1, 0.1, 0], [0.2, 0, 1]],
    "triclinic": kit.SKEWED_CELL,
    "flat": np.diag([20.0, 20.0, 4.0]),
}


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    close_pools()


def shear(strength, seed):
    """Whole numbers of determinant 1 that make lattice vectors longer."""
    r, made = np.random.default_rng(seed), np.eye(3)
    for _ in range(3):
        i, j = r.permutation(3)[:2]
        step = np.eye(3)
        step[i, j] = strength * r.choice([-1, 1])
        made = step @ made
    return made


@pytest.mark.parametrize("name", SHORT)
def test_short_vectors_stay(name):
    """Also where rounding, or a cell that fluctuates, makes others the shorter ones by a hair."""
    r = np.random.default_rng(0)
    for size in (0.0, 1e-14, 1e-3):
        cell = 5.0 * np.array(SHORT[name], float) @ (np.eye(3) + size * r.uniform(-1, 1, (3, 3)))
        assert shorter_basis(torch.tensor(cell)) is None


@pytest.mark.parametrize("strength", [2, 17])
@pytest.mark.parametrize("name", SHORT)
def test_long_vectors_become_short(name, strength):
    """The lattice and its handedness stay, and the box becomes as small as that of short vectors."""
    short = 5.0 * np.array(SHORT[name], float)
    for seed in range(5):
        cell = shear(strength, seed) @ short
        basis = shorter_basis(torch.tensor(cell))
        assert basis is not None
        made = basis.numpy() @ cell
        assert torch.equal(basis, basis.round())
        assert np.linalg.det(basis.numpy()) == pytest.approx(1.0, abs=1e-6)
        lengths = np.linalg.norm(made, axis=1)
        assert list(lengths) == sorted(lengths, reverse=True)
        assert lengths.prod() <= (1 + 1e-9) * np.linalg.norm(short, axis=1).prod()
        assert shorter_basis(torch.tensor(made)) is None


def test_what_is_chosen_is_for_short_vectors():
    atoms, options = kit.disordered(3, 9.0), Options(accuracy=1e-4)
    short = choose_mesh(torch.tensor(atoms.cell.array), options)
    for times in (0, 20):
        model = load_pme(**kit.CPU, accuracy=1e-4)
        evaluate(model, kit.sheared(atoms, times), {"energy"})
        assert model.chosen == (short,)


@pytest.mark.parametrize("times", [3, 10, 20])
@pytest.mark.parametrize("accuracy", [1e-3, 1e-5, 1e-8])
def test_asked_accuracy_is_reached(accuracy, times):
    """On one rank and on two, by both engines, and with outputs of rows."""
    plain = kit.disordered(4, 13.0)
    exact = evaluate(load_ewald(**kit.CPU, accuracy=1e-13), plain, {"forces"}).forces
    atoms, unit = kit.sheared(plain, times), kit.force_unit(plain)
    for engine in ("replicated", "sharded"):
        source = ModelSource("nvdd_pme.model:load_pme", {"accuracy": accuracy, "engine": engine})
        jobs = [Job("sheared", atoms, DomainConfig(), outputs=outputs) for outputs in (FAST, ALL)]
        shares = pool(2).run(evaluate_jobs, source, jobs)
        for j, job in enumerate(jobs):
            alone = evaluate(source.load(), atoms, job.outputs)
            both = joined([mine[j][0] for mine in shares], len(atoms), "sheared")
            assert np.sqrt(((alone.forces - exact) ** 2).sum(1).mean()) / unit < accuracy
            assert abs(both.energy[0] - alone.energy[0]) <= 1e-11 * len(atoms)
            assert np.abs(both.totals["stress"] - alone.totals["stress"]).max() <= 1e-11
            for name, rows in alone.rows.items():
                assert np.abs(both.rows[name] - rows).max() <= 1e-9, name


@pytest.mark.parametrize("accuracy", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("name", ["body-centred", "face-centred", "flat", "rhombohedral", "oblong"])
def test_asked_accuracy_is_reached_in_lattices(name, accuracy):
    """Skewed cells and long cutoffs need finer meshes."""
    more = {"rhombohedral": 1.17 * np.eye(3) - 0.17, "oblong": np.diag([3, 1, 1.5])}
    cell = np.array({**SHORT, **more}[name], float)
    cell *= 14.0 / abs(np.linalg.det(cell)) ** (1 / 3)
    grid = kit.disordered(4, 1.0, seed=1)
    atoms = kit.ions(grid.positions @ cell, cell, grid.arrays["charges"])
    exact = evaluate(load_ewald(**kit.CPU, accuracy=1e-13), atoms, {"forces"}).forces
    for cutoff in (9.0, 12.0):
        found = evaluate(load_pme(**kit.CPU, accuracy=accuracy, cutoff=cutoff), atoms, {"forces"}).forces
        assert np.sqrt(((found - exact) ** 2).sum(1).mean()) / kit.force_unit(atoms) < accuracy


@pytest.mark.parametrize("load", [load_ewald, load_pme])
@pytest.mark.parametrize("name", ["left-handed", "flat", "longest first"])
def test_results_do_not_depend_on_the_vectors(name, load):
    cell = np.array(SHORT[name], float)
    cell *= 7.0 / abs(np.linalg.det(cell)) ** (1 / 3)
    grid = kit.disordered(2, 1.0, seed=1)
    plain = kit.ions(grid.positions @ cell, cell, grid.arrays["charges"])
    other = plain.copy()
    other.set_cell(shear(4, 2) @ cell)
    for outputs in (FAST, ALL):
        model = load(**kit.CPU, accuracy=1e-10, cutoff=5.0)
        found, right = evaluate(model, other, outputs), evaluate(model, plain, outputs)
        unit = kit.force_unit(plain)
        assert found.energy[0] == pytest.approx(right.energy[0], rel=1e-9)
        assert other.cell.volume * np.trace(found.stress[0]) == pytest.approx(-found.energy[0], rel=1e-7)
        np.testing.assert_allclose(found.stress, right.stress, rtol=0, atol=1e-9)
        for rows, values in right.rows.items():
            np.testing.assert_allclose(found.rows[rows], values, rtol=0, atol=1e-8 * unit)
