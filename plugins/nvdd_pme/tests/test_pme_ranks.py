"""Rule W: on 1, 2, 3 and 4 ranks, under every strategy, the results of one process."""

from __future__ import annotations

import mesh_ranks
import numpy as np
import pme_kit as kit
import pytest

from nvdd_core.runtime import DomainConfig
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import assert_gradient_parity, close_pools, evaluate
from nvdd_core.testing.distributed_checks import pool
from nvdd_core.testing.ranks import Job, evaluate_jobs, joined

ALL = frozenset({"energy", "forces", "stress", "node_energy", "charge_gradient"})
FAST = frozenset({"energy", "forces", "stress"})
STRATEGIES = (StrategyKind.HALO, StrategyKind.GRAPH_PARTITION, StrategyKind.WIDE_HALO)


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    close_pools()


def replicas():
    """O-30: the cells of O-28, 2 x 2 x 2 times, and their energies."""
    return {name: (atoms.repeat(2), 8 * energy * kit.UNIT) for name, (atoms, energy) in kit.O28.items()}


def sorted_salt():
    """Along c a quarter with no charge, a quarter with cations only, and two with ions, with a net charge."""
    atoms = kit.rock_salt().repeat((1, 1, 8))
    k = np.arange(len(atoms))
    atoms.positions += 0.05 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1)
    atoms.wrap()
    place = np.floor(4 * atoms.get_scaled_positions()[:, 2])
    charges = atoms.arrays["charges"]
    charges[place == 0] = 0.0
    charges[place == 1] = np.abs(charges[place == 1])
    return atoms


def check(model, options, jobs, n_ranks, expected):
    source = ModelSource(model, options)
    shares = pool(n_ranks).run(evaluate_jobs, source, jobs)
    for j, job in enumerate(jobs):
        found = joined([mine[j][0] for mine in shares], len(job.atoms), job.name)
        right = expected[job.name, job.outputs]
        n = len(job.atoms)
        assert abs(found.energy[0] - right.energy[0]) <= 1e-11 * n, job
        assert np.abs(found.totals["stress"] - right.totals["stress"]).max() <= 1e-11
        for name, rows in right.rows.items():
            assert np.abs(found.rows[name] - rows).max() <= 1e-9, (job, name)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("model", ["nvdd_pme.model:load_ewald", "nvdd_pme.model:load_pme"])
def test_rule_w(model, n_ranks):
    options = {"accuracy": 1e-6, "cutoff": 9.0 if "ewald" in model else 6.0}
    one = ModelSource(model, options).load()
    structures = {name: atoms for name, (atoms, _) in replicas().items()}
    structures["sorted"] = sorted_salt()
    jobs = [
        Job(name, atoms, DomainConfig(strategy=kind), outputs=outputs)
        for name, atoms in structures.items()
        for kind in STRATEGIES
        for outputs in (FAST, ALL)
        if outputs is FAST or name in ("sorted", "skewed, charged")
    ]
    slices = DomainConfig(grid_dims=(1, 1, n_ranks))
    jobs += [Job("sorted", structures["sorted"], slices, outputs=outputs) for outputs in (FAST, ALL)]
    wanted = {(job.name, job.outputs) for job in jobs}
    expected = {key: evaluate(one, structures[key[0]], key[1]) for key in wanted}
    for (name, _), found in expected.items():
        if name != "sorted":
            assert found.energy[0] == pytest.approx(replicas()[name][1], rel=2e-6)
    check(model, options, jobs, n_ranks, expected)


def test_a_rank_without_charges_and_one_with_cations():
    """What `sorted_salt` promises of four slices."""
    source = ModelSource("nvdd_pme.model:load_pme", {"cutoff": 6.0})
    atoms = sorted_salt()
    job = Job("sorted", atoms, DomainConfig(grid_dims=(1, 1, 4)), outputs=FAST)
    shares = pool(4).run(evaluate_jobs, source, [job])
    kinds = [set(np.sign(atoms.arrays["charges"][mine[0][0].ids])) for mine in shares]
    assert sorted(map(sorted, kinds)) == [[-1.0, 1.0], [-1.0, 1.0], [0.0], [1.0]]


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_pair_is_evaluated_once(n_ranks):
    """Also one between rows of two ranks, and both have their part of those."""
    atoms = sorted_salt()
    atoms.positions += np.random.default_rng(0).uniform(-0.1, 0.1, (len(atoms), 3))
    run = ModelSource("nvdd_pme.model:load_pme", {"cutoff": 6.0}), atoms
    (alone,) = pool(1).run(mesh_ranks.pairs_of_energy, *run)
    shares = pool(n_ranks).run(mesh_ranks.pairs_of_energy, *run)
    assert sum(shares) == alone
    assert max(shares) < 1.1 * alone / n_ranks


@pytest.mark.parametrize(
    "model", [("load_ewald", {}), ("load_pme", {"engine": "replicated"}), ("load_pme", {"engine": "sharded"})]
)
def test_gradients_of_a_loss_by_charges(model):
    """Ghosts' charges are their owners': one rank's are differences, and any number gives one rank's."""
    source = ModelSource(f"nvdd_pme.model:{model[0]}", {"cutoff": 6.0, "accuracy": 1e-9, **model[1]})
    atoms = sorted_salt()
    atoms.positions += np.random.default_rng(0).uniform(-0.1, 0.1, (len(atoms), 3))
    (alone,) = pool(1).run(mesh_ranks.gradients_by_charge, source, atoms, False)
    weights = np.sin(np.arange(3.0 * len(atoms))).reshape(-1, 3)
    for i in (0, len(atoms) - 1):
        slope = []
        for step in (-1e-3, 1e-3):
            moved = atoms.copy()
            moved.arrays["charges"][i] += step
            out = evaluate(source.load(), moved, FAST)
            loss = (out.forces * weights).sum() + out.energy[0] + 50.0 * (out.stress[0] * weights[:3]).sum()
            slope.append(loss / 2e-3)
        assert alone[i] == pytest.approx(slope[1] - slope[0], rel=1e-6)
    for moves in (False, True):
        shares = pool(3).run(mesh_ranks.gradients_by_charge, source, atoms, moves)
        found = {i: value for share in shares for i, value in share.items()}
        assert found == pytest.approx(alone, abs=1e-9)


def test_fields_that_require_gradients_on_one_rank_only():
    source = ModelSource("nvdd_pme.model:load_ewald", {"cutoff": 6.0})
    for said in pool(2).run(mesh_ranks.gradients_on_one_rank, source, sorted_salt()):
        assert "field 'charges' requires gradients on rank 0, not on rank 1" in said


def test_a_mesh_summed_beside_the_pairs():
    run = ModelSource("nvdd_pme.model:load_pme", {"cutoff": 6.0, "engine": "replicated"}), sorted_salt()
    for worst in pool(2).run(mesh_ranks.worst_beside, *run):
        assert worst < 1e-12


@pytest.mark.parametrize("model", ["ewald", "pme"])
def test_charges_of_another_model_on_ranks(model):
    """O-31 on ranks: neighbours of a ghost decide about its charge."""
    options = {"name": model, "accuracy": 1e-8, "cutoff": 6.0}
    atoms = kit.rippled_salt().repeat((1, 1, 4))
    expected = {("moving", FAST): evaluate(kit.MovingCharges(**options), atoms, FAST)}
    for n_ranks in (2, 4):
        jobs = [Job("moving", atoms, DomainConfig(strategy=s), outputs=FAST) for s in STRATEGIES[:2]]
        check("pme_kit:load_moving", options, jobs, n_ranks, expected)


@pytest.mark.parametrize("model", ["nvdd_pme.model:load_ewald", "nvdd_pme.model:load_pme"])
def test_second_derivatives_on_ranks(model):
    source = ModelSource(model, {"accuracy": 1e-4, "cutoff": 5.0})
    assert_gradient_parity(source, sorted_salt()[:32], ranks=(3,))
