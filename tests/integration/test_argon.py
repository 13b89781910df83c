"""Argon dynamics end to end: energy conservation, independence of the rank count, migration, failures."""

from __future__ import annotations

from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch

from nvdd_core.comm import Mesh, group_scope
from nvdd_core.dynamics import (
    Checkpoint,
    CheckpointWriter,
    DomainParallel,
    HookContext,
    HookScope,
    Langevin,
    VelocityVerlet,
    initial_velocities,
)
from nvdd_core.errors import InputError, NumericalError
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_lj.model import load
from tests._spawn import RankFailure
from tests.cases import oracle
from tests.cases.ranks import Array, System, collect, mesh

ARGON = Path(__file__).parents[2] / "examples" / "argon" / "argon.xyz"
OPTIONS = {"epsilon": 0.0103, "sigma": 3.4, "cutoff": 8.5, "shift": "force"}


class Recorder:
    """Keeps what every step measured."""

    scope = HookScope.LOCAL

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[tuple[float, float, float]] = []

    def __call__(self, ctx: HookContext) -> None:
        self.rows.append((ctx.info.time_fs, ctx.info.energy, ctx.info.total))


def start(group: Mesh, atoms=None, temperature: float = 94.4, skin: float = 1.0, **options):
    """Argon on the ranks of `group`, with its model."""
    if group.rank == 0:
        atoms = ase.io.read(ARGON) if atoms is None else atoms
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if group.rank == 0 else None, group)
    sharded.rows["velocities"] = initial_velocities(
        sharded.masses, sharded.ids, temperature, 7, group.all_reduce_sum_
    )
    lj = load(dtype=torch.float64, device=torch.device("cpu"), **{**OPTIONS, **options})
    return sharded, DistributedModel(lj, DomainConfig(skin=skin), group)


def run(kind: str, steps: int) -> tuple[Array, Array, Array, int, int]:
    """Positions, velocities in the file's order, log, rebuilds, and rows that changed their rank."""
    group = mesh()
    sharded, model = start(group)
    recorder = Recorder(20)
    integrator = VelocityVerlet(2.0) if kind == "nve" else Langevin(2.0, 94.4, 0.005, 1964)
    model.rebuild(sharded)
    before = set(sharded.ids.tolist())
    DomainParallel(integrator, model, [recorder]).run(sharded, steps)
    moved = len(before - set(sharded.ids.tolist()))
    n = sharded.n_global
    return (
        collect(sharded.positions, sharded.ids, n, group),
        collect(sharded.velocities, sharded.ids, n, group),
        np.array(recorder.rows),
        model.n_rebuilds,
        moved,
    )


@pytest.mark.parametrize(("kind", "tolerance"), [("nve", 1e-9), ("nvt-langevin", 1e-9)])
def test_trajectory_does_not_depend_on_ranks(rank_pool, kind: str, tolerance: float) -> None:
    """O-24: 200 steps on 1 and 4 ranks, with migration in between."""
    alone = run(kind, 200)
    spread = rank_pool(4).run(run, kind, 200, timeout=120)
    for positions, velocities, log, rebuilds, _ in spread:
        assert np.abs(positions - alone[0]).max() <= tolerance
        assert np.abs(velocities - alone[1]).max() <= tolerance
        assert np.abs(log - alone[2]).max() <= tolerance
        assert rebuilds >= 3
    assert sum(moved for *_, moved in spread) > 0


def _interrupted(folder: str, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """This rank's rows after twice `steps` steps in one run, and in two with a checkpoint in between."""
    group = mesh()
    sharded, model = start(group, temperature=300.0)
    integrator = Langevin(4.0, 300.0, 0.005, 1964)
    writer = CheckpointWriter(Path(folder) / "checkpoint", steps, integrator)
    saved = Path(folder) / "kept"

    class Keep:
        every = steps
        scope = HookScope.RANK_ZERO

        def __call__(self, ctx: HookContext) -> None:
            if ctx.step == steps:
                saved.write_bytes(writer.path.read_bytes())

    DomainParallel(integrator, model, [writer, Keep()]).run(sharded, 2 * steps)
    group.barrier()
    again = ShardedBatch.scatter(Checkpoint(saved).batch() if group.rank == 0 else None, group)
    model = DistributedModel(model.model, model.config, group)
    DomainParallel(integrator, model).run(again, steps, start_step=Checkpoint(saved).step)
    names = ("ids", "positions", "velocities")
    return [sharded.rows[n] for n in names], [again.rows[n] for n in names], model.n_rebuilds


@pytest.mark.parametrize("world", [1, 3])
def test_restart_repeats_every_bit(rank_pool, tmp_path: Path, world: int) -> None:
    """Rows, their order and their owners, over rebuilds and migrations after the restart."""
    for whole, parts, rebuilds in rank_pool(world).run(_interrupted, str(tmp_path), 40, timeout=120):
        assert rebuilds >= 3
        for a, b in zip(whole, parts, strict=True):
            assert torch.equal(a, b)


class Squeeze:
    """Shrinks the cell, and the positions with it, once in the middle of a run."""

    scope = HookScope.LOCAL

    def __init__(self, every: int, how: str) -> None:
        self.every, self.how = every, how

    def __call__(self, ctx: HookContext) -> None:
        if ctx.step == self.every:
            ctx.state.positions.mul_(0.98)
            if self.how == "in place":
                ctx.sharded.cell.mul_(0.98)
            elif self.how == "by numpy":
                ctx.sharded.cell.numpy()[:] *= 0.98
            else:
                ctx.sharded.cell = ctx.sharded.cell * 0.98


def _squeezed(how: str) -> tuple[Array, float, float]:
    """Positions, energy and pressure after a run whose cell changes at step 10, and after two runs instead."""
    group = mesh()
    found = []
    for parts in (1, 2):
        sharded, model = start(group, skin=2.0)
        squeeze = Squeeze(10, how)
        runner = DomainParallel(VelocityVerlet(2.0), model, [squeeze] if parts == 1 else [])
        if parts == 2:
            runner.run(sharded, 10)
            sharded.positions.mul_(0.98)
            sharded.cell = sharded.cell * 0.98
            runner = DomainParallel(VelocityVerlet(2.0), DistributedModel(model.model, model.config, group))
        info = runner.run(sharded, 20 if parts == 1 else 10)
        found.append((collect(sharded.positions, sharded.ids, sharded.n_global, group), info))
    (a, first), (b, second) = found
    return a - b, first.energy - second.energy, first.pressure_gpa - second.pressure_gpa


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["another", "in place", "by numpy"])
def test_a_hook_changes_the_cell(rank_pool, world: int, how: str) -> None:
    for positions, energy, pressure in rank_pool(world).run(_squeezed, how, timeout=60):
        assert np.abs(positions).max() < 1e-10
        assert abs(energy) < 1e-8
        assert abs(pressure) < 1e-10


def test_a_cell_changed_on_one_rank_only_is_refused() -> None:
    sharded, model = start(Mesh.single())
    squeeze = Squeeze(2, "in place")
    squeeze.scope = HookScope.RANK_ZERO
    with pytest.raises(InputError, match="RANK_ZERO changed the cell"):
        DomainParallel(VelocityVerlet(2.0), model, [squeeze]).run(sharded, 4)


def test_energy_is_conserved() -> None:
    """4,000 atoms, 2,000 steps of 2 fs: the total energy drifts by less than 1e-5 eV/atom/ns."""
    sharded, model = start(Mesh.single())
    DomainParallel(VelocityVerlet(2.0), model).run(sharded, 300)
    recorder = Recorder(10)
    DomainParallel(VelocityVerlet(2.0), model, [recorder]).run(sharded, 2000)
    log = np.array(recorder.rows)
    slope = np.polyfit(log[:, 0] * 1e-6, log[:, 2] / sharded.n_global, 1)[0]
    assert abs(slope) < 1e-5
    assert np.ptp(log[:, 2]) / sharded.n_global < 1e-6


def _folded_every_step(steps: int) -> tuple[Array, Array]:
    """O-10: rows drift and are folded into the cell behind the runner's back, every step."""
    group = mesh()
    pos, cell = oracle.fcc(3, 3, 3)
    lj = load(
        dtype=torch.float64, device=torch.device("cpu"), epsilon=1.0, sigma=1.0, cutoff=2.5, shift="force"
    )
    sharded = ShardedBatch.scatter(
        Batch.from_ase(System(pos, cell, (True, True, True)).atoms()) if group.rank == 0 else None, group
    )
    sharded.rows["masses"] = torch.ones_like(sharded.masses)
    ids = sharded.ids.double()[:, None]
    thermal = torch.cat([torch.sin(1.7 * ids), torch.sin(2.3 * ids + 1), torch.sin(0.9 * ids + 2)], 1)
    sharded.rows["velocities"] = 0.1 * (torch.tensor([1.0, 0.7, 0.4]).double() + 0.3 * thermal)
    model = DistributedModel(lj, DomainConfig(skin=0.3), group)

    class Fold:
        every = 1
        scope = HookScope.LOCAL

        def __call__(self, ctx: HookContext) -> None:
            ctx.state.positions.copy_(torch.remainder(ctx.state.positions, 4.8))

    recorder = Recorder(1)
    DomainParallel(VelocityVerlet(0.01), model, [Fold(), recorder]).run(sharded, steps)
    fresh = DistributedModel(lj, DomainConfig(), group)
    energy = float(fresh(sharded).energy)
    return np.array(recorder.rows)[:, 1:], np.array([energy])


@pytest.mark.parametrize("world", [1, 4])
def test_folding_behind_the_runner(rank_pool, world: int) -> None:
    log, fresh = rank_pool(world).run(_folded_every_step, 400, timeout=200)[0]
    assert abs(log[-1, 0] - fresh[0]) <= 1e-10 * 108
    assert np.ptp(log[:, 1]) / 108 < 1e-4


def _steady() -> dict[str, int]:
    """Collectives of 25 steps in which nothing is rebuilt, the last one measured."""
    group = mesh()
    sharded, model = start(group, temperature=1.0, skin=2.0)
    seen = []

    class Count:
        every = 25
        scope = HookScope.LOCAL

        def __call__(self, ctx: HookContext) -> None:
            seen.append(group.counter.snapshot())

    DomainParallel(VelocityVerlet(1.0), model, [Count()]).run(sharded, 50)
    return dict(group.counter.since(seen[-2]).calls)


def test_collectives_of_a_step(rank_pool) -> None:
    """O-21: one exchange and one all-reduce a step; agreeing on failures costs none."""
    for calls in rank_pool(3).run(_steady):
        assert calls == {"exchange": 25, "all_reduce": 25}


def _evaluations(every: int) -> tuple[int, int]:
    """Evaluations of the model and rebuilds in 300 steps at 300 K, measuring each `every` steps."""
    group = mesh()
    sharded, model = start(group, temperature=300.0)
    counted, forward = [], model.model.forward
    model.model.forward = lambda batch: counted.append(1) or forward(batch)
    DomainParallel(VelocityVerlet(2.0), model, [Recorder(every)]).run(sharded, 300)
    return len(counted), model.n_rebuilds


@pytest.mark.parametrize("every", [1000, 1])
def test_no_evaluation_is_thrown_away(rank_pool, every: int) -> None:
    """A rebuild is seen coming: the ranks ask before they evaluate, so a costly model runs once a step."""
    for evaluations, rebuilds in rank_pool(2).run(_evaluations, every, timeout=60):
        assert rebuilds > 5
        assert evaluations == 301


def _fail_while_migrating() -> None:
    """O-21 (d): rank 2 fails inside the migration of a rebuild in the middle of a run."""
    from nvdd_core.runtime import domain

    group = mesh()
    original = domain.reshard_by_destination
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3 and group.rank == 2:
            raise ValueError("deliberate failure in migration")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, group_scope(group):
        patch.setattr(domain, "reshard_by_destination", failing)
        sharded, model = start(group, temperature=300.0)
        DomainParallel(VelocityVerlet(2.0), model).run(sharded, 300)


def test_failure_while_migrating(run_ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_fail_while_migrating, 4, timeout=60)
    for rank in range(4):
        assert caught.value[rank].type_name == "ValueError", str(caught.value)
        assert "deliberate failure in migration" in caught.value[rank].message


def _blow_up() -> str:
    """Two atoms nearly on top of each other."""
    group = mesh()
    atoms = ase.io.read(ARGON)
    atoms.positions[11] = atoms.positions[10] + [0.02, 0, 0]
    sharded, model = start(group, atoms, shift="none")
    try:
        DomainParallel(VelocityVerlet(2.0), model).run(sharded, 50)
    except NumericalError as exc:
        return str(exc)
    return ""


def test_blown_up_run_names_the_atom(rank_pool) -> None:
    answers = rank_pool(2).run(_blow_up, timeout=60)
    assert len(set(answers)) == 1
    assert "not finite" in answers[0]
    assert "atom" in answers[0]
