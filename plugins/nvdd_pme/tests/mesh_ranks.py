"""What the tests of the sharded mesh run on each rank, and references from the definitions in numpy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import comb, factorial
from unittest import mock

import ase
import numpy as np
import pme_kit as kit
import pytest
import torch

import nvdd_pme.model
from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, DomainContext, ShardedBatch
from nvdd_core.runtime.context import enter_context, keep_graphs
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing import check_capturable
from nvdd_pme.model import load_pme
from nvdd_pme.reciprocal import ReplicatedMesh
from nvdd_pme.sharded import ShardedMesh
from tests.cases.ranks import mesh as ranks_of_test

F64 = torch.float64
CELL = np.array([[6.2, 0.0, 0.0], [1.1, 5.3, 0.0], [0.6, -0.8, 5.7]])
ALPHA = 0.6


def charges(n: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the cell and in images of it, and charges that don't sum to zero."""
    rng = np.random.default_rng(7)
    return (3.0 * rng.random((n, 3)) - 1.0) @ CELL, rng.standard_normal(n)


# -- references ------------------------------------------------------------------------------------------------


def spline(x: np.ndarray, p: int) -> np.ndarray:
    """The cardinal B-spline by its truncated powers."""
    powers = sum((-1) ** k * comb(p, k) * np.maximum(x - k, 0.0) ** (p - 1) for k in range(p + 1))
    return np.where((x > 0) & (x < p), powers / factorial(p - 1), 0.0)


def whole_mesh_energy(pos, q, cell, alpha, mesh, order):
    """Smooth particle-mesh Ewald with the whole mesh and numpy's complex transform."""
    u = pos @ np.linalg.inv(cell) * mesh
    grid = np.zeros(mesh)
    steps = range(order)
    for point, charge in zip(u, q, strict=True):
        base = np.floor(point).astype(int)
        along = [spline(point[a] - base[a] + np.arange(order), order) for a in range(3)]
        for i, j, k in itertools.product(steps, steps, steps):
            place = tuple((base - (i, j, k)) % mesh)
            grid[place] += charge * along[0][i] * along[1][j] * along[2][k]
    m = [np.round(np.fft.fftfreq(n) * n) for n in mesh]
    factors = []
    for frequency, n in zip(m, mesh, strict=True):
        images = np.arange(-300, 301) * n
        amplitude = np.sinc(frequency / n) ** (2 * order)
        folded = (np.sinc((frequency[:, None] + images) / n) ** (2 * order)).sum(1)
        factors.append(np.where(2 * abs(frequency) == n, 0.0, amplitude / folded**2))
    vectors = np.stack(np.meshgrid(*m, indexing="ij"), -1) @ np.linalg.inv(cell).T
    green = green_function((vectors**2).sum(-1), cell, alpha)
    damping = np.einsum("a,b,c->abc", *factors)
    return (green * damping * abs(np.fft.fftn(grid)) ** 2).sum()


def green_function(m2, cell, alpha):
    volume = abs(np.linalg.det(cell))
    safe = np.where(m2 == 0.0, 1.0, m2)
    wave = np.exp(-(np.pi**2) * safe / alpha**2) / safe / (2 * np.pi * volume)
    return np.where(m2 == 0.0, -np.pi / (2 * alpha**2 * volume), wave)


def ewald(pos, q, cell, alpha, reach=9):
    """The reciprocal sum itself: energy, forces, its derivative for the charges and for a strain."""
    span = range(-reach, reach + 1)
    integers = np.array(list(itertools.product(span, span, span)))
    m = integers @ np.linalg.inv(cell).T
    m2 = (m**2).sum(1)
    g = green_function(m2, cell, alpha)
    phase = np.exp(2j * np.pi * pos @ m.T)
    s = q @ phase
    by_charge = 2 * (g * np.conj(s) * phase).real.sum(1)
    forces = -q[:, None] * ((2 * g * np.conj(s) * 2j * np.pi * phase).real @ m)
    weight = g * abs(s) ** 2
    rate = np.where(m2 > 0, 2 * (np.pi**2 / alpha**2 + 1 / np.where(m2 > 0, m2, 1.0)), 0.0)
    strain = (m * (weight * rate)[:, None]).T @ m - weight.sum() * np.eye(3)
    return weight.sum(), forces, by_charge, strain


# -- on a rank -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A mesh, an order, and which rank has which charge."""

    mesh: tuple[int, int, int]
    order: int = 4
    owners: str = "in turns"

    def owned(self, n: int, group: Mesh) -> torch.Tensor:
        turns = torch.arange(n) % group.size
        if self.owners == "last has none" and group.size > 1:
            turns = torch.arange(n) % (group.size - 1)
        if self.owners == "last has all":
            turns = torch.full((n,), group.size - 1)
        return turns == group.rank


def derivatives(
    case: Case, engine, group: Mesh, potential: bool = False, steps: np.ndarray | float = 0.0
) -> list[torch.Tensor]:
    """Energy (or potentials), its gradients for positions, charges and cell, and a second derivative for each."""
    pos, q = (torch.tensor(v) for v in charges())
    pos = pos + torch.as_tensor(steps)
    cell = torch.tensor(CELL)
    mine = case.owned(len(q), group)
    leaves = [t.clone().requires_grad_() for t in (pos[mine], q[mine], cell)]
    value = engine(*leaves, alpha=ALPHA, mesh=case.mesh, order=case.order, potential=potential)

    def whole(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(like)
        out[mine] = rows.detach()
        return group.all_reduce_sum_(out)

    results = [whole(value, q) if potential else group.all_reduce_sum_(value.detach().clone())]
    ways = [torch.sin(1.0 + torch.arange(t.numel(), dtype=F64)).view_as(t) for t in (pos, q, cell)]
    share = (value * ways[1][mine]).sum() if potential else value
    first = torch.autograd.grad(share, leaves, create_graph=True)
    # each rank's gradient for the cell is a share as well
    along = (ways[0][mine], ways[1][mine], ways[2])
    second = torch.autograd.grad(sum((g * w).sum() for g, w in zip(first, along, strict=True)), leaves)
    for grads in (first, second):
        results += [
            whole(grads[0], pos),
            whole(grads[1], q),
            group.all_reduce_sum_(grads[2].detach().clone()),
        ]
    return results


def worst_differences(cases: list[Case]) -> list[tuple[Case, bool, str, float]]:
    """Both engines on the ranks of the test against the replicated one in one process, relative.

    Derivatives are taken after the evaluation, as those of a loss are.
    """
    group, found = ranks_of_test(), []
    keep_graphs()

    def replicated(*args, **options) -> torch.Tensor:
        with enter_context(DomainContext(is_distributed=True, mesh=group)):
            return ReplicatedMesh()(*args, **options)

    for case, potential in itertools.product(cases, (False, True)):
        want = derivatives(Case(case.mesh, case.order), ReplicatedMesh(), Mesh.single(), potential)
        for name, engine in (("sharded", ShardedMesh(group)), ("replicated", replicated)):
            got = derivatives(case, engine, group, potential)
            scaled = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]
            found.append((case, potential, name, max(scaled)))
    return found


def worst_beside(mesh: Mesh, source: ModelSource, atoms: ase.Atoms) -> float:
    """The largest difference in forces and stress where the mesh is summed while pairs are computed, as on GPUs."""
    found = []
    for devices in ({"cuda"}, {"cpu"}):
        begin = mock.Mock(wraps=ReplicatedMesh.begin)
        with (
            mock.patch.object(nvdd_pme.model, "BESIDE", devices),
            mock.patch.object(ReplicatedMesh, "begin", begin),
        ):
            sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
            run = DistributedModel(source.load(), DomainConfig(), mesh)
            out = run(sharded, {"energy", "forces", "stress"})
            found.append(torch.cat([out.energy, out.forces.flatten(), out.stress.flatten()]))
        assert begin.called == ("cpu" in devices)
    return float((found[0] - found[1]).abs().max())


def gradients_by_charge(mesh: Mesh, source: ModelSource, atoms: ase.Atoms, moves: bool) -> dict[int, float]:
    """Of a loss of energy, forces and stress, by atom; rows that require them before or after they have moved."""
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    run = DistributedModel(source.load(), DomainConfig(), mesh)
    if moves:
        sharded.rows["charges"].requires_grad_()
    run(sharded, {"energy"})
    charges = sharded.fields["charges"]
    charges = charges if moves else charges.requires_grad_()
    out = run.differentiable(sharded, {"energy", "forces", "stress"})
    weights = torch.sin(torch.arange(3.0 * len(atoms), dtype=torch.float64)).view(-1, 3)
    loss = (out.forces * weights[sharded.ids]).sum()
    loss = loss + (out.energy.sum() + 50.0 * (out.stress[0] * weights[:3]).sum()) * float(mesh.rank == 0)
    (found,) = torch.autograd.grad(loss, charges)
    return dict(zip(sharded.ids.tolist(), found.tolist(), strict=True))


def gradients_on_one_rank(mesh: Mesh, source: ModelSource, atoms: ase.Atoms) -> str:
    """What is said of it."""
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    run = DistributedModel(source.load(), DomainConfig(), mesh)
    run(sharded, {"energy"})
    sharded.fields["charges"].requires_grad_(mesh.rank == 0)
    with pytest.raises(InputError) as caught:
        run.differentiable(sharded, {"energy"})
    return str(caught.value)


def worst_after_steps(case: Case, furthest: float) -> list[tuple[bool, float, int, bool]]:
    """Sharded, where charges have moved up to `furthest` since the first call, against the replicated engine.

    For energies and potentials: the worst difference, how often ranks told each other how many rows they send after
    the first call, and whether it shows that one charge moves further than was said.
    """
    group, found = ranks_of_test(), []
    normal = np.linalg.inv(CELL)[:, 0] / np.linalg.norm(np.linalg.inv(CELL)[:, 0])
    n = len(charges()[1])
    for potential in (False, True):
        engine, worst = ShardedMesh(group), 0.0
        with enter_context(DomainContext(may_move=furthest)):
            derivatives(case, engine, group, potential)
        before = group.counter.snapshot()
        for way in (1.0, -1.0, 0.3):
            steps = furthest * np.outer(way * (-1.0) ** np.arange(n), normal)
            got = derivatives(case, engine, group, potential, steps)
            want = derivatives(Case(case.mesh), ReplicatedMesh(), Mesh.single(), potential, steps)
            worst = max(
                [worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))]
            )
        told = group.counter.since(before).calls.get("all_gather", 0)
        steps = np.outer(np.arange(n) == 5, 1.1 * furthest * normal)
        seen = bool(derivatives(case, engine, group, potential, steps)[0].isnan().all())
        found.append((potential, worst, told, seen))
    return found


def capturable(engine: str, outputs: frozenset[str]) -> bool:
    """Whether the check of the kit passes on every rank."""
    atoms = [kit.disordered(4, skew=0.2, seed=3), kit.sheared(kit.disordered(3, 9.0), 5)]
    check_capturable(load_pme(**kit.CPU, cutoff=6.0, engine=engine), atoms, outputs, ranks_of_test())
    return True


def evaluate(case: Case) -> list[np.ndarray]:
    """Energy, forces, derivative for the charges and for a strain, on the ranks of the test."""
    group = ranks_of_test()
    energy, slope, by_charge, by_cell = derivatives(case, ShardedMesh(group), group)[:4]
    pos, _ = charges()
    strain = pos.T @ slope.numpy() + CELL.T @ by_cell.numpy()
    return [energy.numpy(), -slope.numpy(), by_charge.numpy(), strain]


def _own(case: Case, group: Mesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pos, q = (torch.tensor(v) for v in charges())
    mine = case.owned(len(q), group)
    return pos[mine].requires_grad_(), q[mine], torch.tensor(CELL).requires_grad_()


def tally(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of one energy with forces and stress."""
    group = ranks_of_test()
    x, q, cell = _own(case, group)
    before = group.counter.snapshot()
    share = ShardedMesh(group)(x, q, cell, alpha=ALPHA, mesh=case.mesh, order=case.order)
    torch.autograd.grad(share, (x, cell))
    found = group.counter.since(before)
    return dict(found.calls), dict(found.bytes)


def memory(case: Case) -> tuple[int, int]:
    """Largest single block and most bytes alive that torch allocates in one energy with forces and stress."""
    from torch.profiler import ProfilerActivity, profile

    group = ranks_of_test()
    derivatives(Case((6, 5, 4), case.order), ShardedMesh(group), group)  # what is kept for later is made now
    x, q, cell = _own(case, group)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        share = ShardedMesh(group)(x, q, cell, alpha=ALPHA, mesh=case.mesh, order=case.order)
        torch.autograd.grad(share, (x, cell))
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(sizes), int(np.cumsum(sizes).max())


def lost_position() -> tuple[bool, bool]:
    """Whether energy and forces say so when one position is not a number, wherever it is sent."""
    group = ranks_of_test()
    x, q, cell = _own(Case((8, 6, 4)), group)
    if group.rank == 0:
        x = x.detach().index_fill(0, torch.tensor([1]), float("nan")).requires_grad_()
    share = ShardedMesh(group)(x, q, cell, alpha=ALPHA, mesh=(8, 6, 4), order=4)
    (slope,) = torch.autograd.grad(share, x)
    return bool(share.isnan()), bool(slope.isnan().any())


def pairs_of_energy(mesh: Mesh, source: ModelSource, atoms: ase.Atoms) -> int:
    """Pairs within the cutoff that this rank counts for the energy."""
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    model = source.load()
    run = DistributedModel(model, DomainConfig(skin=0.0), mesh)
    run(sharded, {"energy"})
    return len(run.domain.neighbors.kept[model].energy.senders)


def late_gradients(case: Case) -> list[float]:
    """How far gradients of one energy, taken after another one was computed, are from those taken at once."""
    group = ranks_of_test()
    x, q, cell = _own(case, group)
    options = {"alpha": ALPHA, "mesh": case.mesh, "order": case.order}
    with enter_context(DomainContext(is_distributed=True, mesh=group)):
        at_once = torch.autograd.grad(ReplicatedMesh()(x, q, cell, **options), (x, cell))
        energy = ReplicatedMesh()(x, q, cell, **options)
        ReplicatedMesh()(x.detach() + 0.3, 2.0 * q, cell.detach(), **options)
        late = torch.autograd.grad(energy, (x, cell))
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(at_once, late, strict=True)]
