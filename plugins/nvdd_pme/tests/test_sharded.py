"""The sharded mesh: against numpy, against the replicated engine on 1 to 4 ranks, and what it costs."""

from __future__ import annotations

from types import SimpleNamespace

import mesh_ranks as on_rank
import numpy as np
import pme_kit as kit
import pytest
import torch
from mesh_ranks import ALPHA, CELL, Case

from nvdd_core.comm import Mesh
from nvdd_core.runtime import DomainConfig
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import assert_gradient_parity, close_pools, evaluate
from nvdd_core.testing.distributed_checks import pool
from nvdd_core.testing.ranks import Job, evaluate_jobs, joined
from nvdd_pme import slabs
from nvdd_pme.model import load_pme
from nvdd_pme.modes import Modes
from nvdd_pme.reciprocal import ReplicatedMesh
from nvdd_pme.sharded import ShardedMesh

F64 = torch.float64
CASES = [
    Case((12, 10, 8), 4),
    Case((11, 13, 9), 5),  # no axis can be shared evenly
    Case((12, 12, 12), 5, "last has none"),
    Case(
        (3, 2, 5), 4, "last has all"
    ),  # ranks without planes, without columns; fewer planes than a charge touches
    Case((1, 4, 3), 4),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_equals_the_replicated_mesh(rank_pool, monkeypatch, world: int, shared: str) -> None:
    if world == 1 and shared == "0":
        pytest.skip("one rank sends nothing")
    monkeypatch.setenv("NVDD_SHARED_MEMORY", shared)
    cases = CASES if shared == "1" else CASES[1:4:2]
    for answer in rank_pool(world).run(on_rank.worst_differences, cases, timeout=120):
        for case, potential, engine, difference in answer:
            assert difference < 1e-12, (case, potential, engine)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "case", [Case((12, 10, 8)), Case((11, 13, 9), owners="last has none"), Case((3, 2, 5))], ids=str
)
def test_charges_that_moved(rank_pool, world: int, case: Case) -> None:
    """Where they go was found before; while they move less than was said it is right, and further is seen."""
    for answer in rank_pool(world).run(on_rank.worst_after_steps, case, 0.7):
        for potential, worst, told, seen in answer:
            assert worst < 1e-12, potential
            assert (told, seen) == (0, True), potential


@pytest.mark.parametrize("case", [Case((9, 8, 7), 4), Case((8, 6, 10), 5)], ids=str)
def test_energy_against_the_whole_mesh_in_numpy(rank_pool, case: Case) -> None:
    pos, q = on_rank.charges()
    want = on_rank.whole_mesh_energy(pos, q, CELL, ALPHA, case.mesh, case.order)
    for energy, forces, by_charge, _ in rank_pool(3).run(on_rank.evaluate, case):
        assert energy == pytest.approx(want, rel=1e-12)
        for i in (0, 5):
            for axis in range(3):
                slope = _slope(lambda x, i=i, axis=axis: _moved(pos, q, case, i, axis, x))
                assert forces[i, axis] == pytest.approx(-slope, abs=1e-7)
            assert by_charge[i] == pytest.approx(
                _slope(lambda x, i=i: _moved(pos, q, case, i, None, x)), abs=1e-7
            )


def _slope(function, step: float = 1e-4) -> float:
    a, b, c, d = (function(k * step) for k in (-2, -1, 1, 2))
    return (a - 8 * b + 8 * c - d) / (12 * step)


def _moved(pos, q, case: Case, i: int, axis: int | None, by: float) -> float:
    pos, q = pos.copy(), q.copy()
    if axis is None:
        q[i] += by
    else:
        pos[i, axis] += by
    return on_rank.whole_mesh_energy(pos, q, CELL, ALPHA, case.mesh, case.order)


def test_converges_to_the_direct_sum(rank_pool) -> None:
    pos, q = on_rank.charges()
    want = on_rank.ewald(pos, q, CELL, ALPHA)
    worst = []
    for case in (Case((20, 20, 20), 5), Case((40, 40, 40), 5)):
        answers = rank_pool(2).run(on_rank.evaluate, case)
        worst.append(max(abs(a - b).max() / abs(b).max() for a, b in zip(answers[0], want, strict=True)))
    assert worst[0] < 1e-3
    assert worst[1] < worst[0] / 16  # of fifth order, and forces are a derivative


def test_derivatives_by_differences() -> None:
    pos, q = (torch.tensor(v) for v in on_rank.charges(3))
    leaves = tuple(t.requires_grad_() for t in (pos, q, torch.tensor(CELL)))
    engine, rest = ShardedMesh(Mesh.single()), {"alpha": ALPHA, "mesh": (6, 5, 4), "order": 5}
    assert torch.autograd.gradcheck(lambda *x: engine(*x, **rest), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: engine(*x, **rest), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: engine(*x, potential=True, **rest), leaves)


@pytest.mark.parametrize("shape", [(3, 2, 6), (2, 3, 5), (1, 1, 1), (2, 3, 2)])
def test_spectrum_and_its_adjoint(shape) -> None:
    alone = Mesh.single()
    slab = torch.randn(shape, dtype=F64, requires_grad=True)
    columns = slabs.spectrum(slab, shape, alone)
    assert torch.allclose(columns, torch.fft.rfftn(slab), rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: slabs.spectrum(x, shape, alone), slab)
    waves = columns.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: slabs.spectrum_adjoint(x, shape, alone), waves)
    assert torch.autograd.gradgradcheck(lambda x: slabs.spectrum_adjoint(x, shape, alone).square(), waves)


def test_third_derivatives_of_the_mode_sum() -> None:
    columns = torch.randn(3, 2, 3, dtype=torch.complex128, requires_grad=True)
    cell, modes = torch.tensor(CELL, requires_grad=True), Modes((3, 2, 4), 4, ALPHA, 0)

    def curvature(s: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        first = torch.autograd.grad(modes.energy(s, h), (s, h), create_graph=True)
        share = first[0].abs().square().sum() + first[1].square().sum()
        second = torch.autograd.grad(share, (s, h), create_graph=True)
        return second[0].abs().square().sum() + second[1].square().sum()

    assert torch.autograd.gradcheck(curvature, (columns, cell))


def test_ops() -> None:
    alone, shape = Mesh.single(), [3, 4, 5]
    slab = torch.randn(shape, dtype=F64, requires_grad=True)
    columns = torch.fft.rfftn(slab).detach().requires_grad_()
    metric, along = (torch.randn(*s, 3, 3, dtype=F64, requires_grad=True) for s in ((), (1,)))
    metric = (metric @ metric.T).detach().requires_grad_()
    block = (0.3, shape, 4, 0)
    ops, tests = torch.ops.nvdd_pme, ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, arguments in (
        (ops.spectrum, (slab, shape, alone.id)),
        (ops.spectrum_adjoint, (columns, shape, alone.id)),
        (ops.mode_energy, (columns, metric, *block)),
        (ops.mode_field, (columns, metric, along, 1, *block)),
        (ops.mode_moment, (columns, columns, metric, along, 1, *block)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)


def test_calls_and_bytes(rank_pool) -> None:
    case = Case((8, 6, 4))
    calls, sent = zip(*rank_pool(2).run(on_rank.tally, case), strict=True)
    # there and back: of how many rows, of the rows, of the mesh
    assert calls == ({"all_gather": 1, "all_to_all": 2, "transpose": 2},) * 2
    transposed = 4 * 6 * 3 * 16  # a rank's half of the half-complex mesh
    assert [b["transpose"] for b in sent] == [2 * transposed] * 2
    rows = sum(b["all_to_all"] for b in sent) / (2 * 4 * 8)  # four numbers a row, there and back
    assert 24 <= rows <= 2 * 24


def test_not_a_number_is_seen(rank_pool) -> None:
    assert rank_pool(3).run(on_rank.lost_position) == [(True, True)] * 3


def test_no_rank_holds_the_mesh(rank_pool) -> None:
    case = Case((128, 40, 40))
    whole = 8 * np.prod(case.mesh)
    (alone,) = rank_pool(1).run(on_rank.memory, case)
    largest, peak = (max(values) for values in zip(*rank_pool(4).run(on_rank.memory, case), strict=True))
    assert alone[0] >= whole
    padded = (32 + 2 * 3) / 128
    assert largest <= 1.06 * padded * whole  # the half-complex mesh is a little larger than the real one
    assert peak <= 0.36 * alone[1]


# -- in the model ----------------------------------------------------------------------------------------------

OPTIONS = {"accuracy": 1e-5, "cutoff": 6.0}
TOTALS = frozenset({"energy", "forces", "stress"})
ROWS = TOTALS | {"node_energy", "charge_gradient"}


@pytest.fixture(scope="module")
def of_the_kit():
    yield pool
    close_pools()


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_model_on_ranks(of_the_kit, n_ranks: int) -> None:
    """Rule W for the model: sharded on ranks, replicated in one process; one rank has charges of zero only."""
    source = ModelSource("nvdd_pme.model:load_pme", {**OPTIONS, "engine": "sharded"})
    one = load_pme(**kit.CPU, **OPTIONS, engine="replicated")
    atoms = kit.disordered(4, skew=0.2, seed=3).repeat((1, 1, 2))
    atoms.arrays["charges"][atoms.get_scaled_positions()[:, 2] < 0.25] = 0.0
    slices = {"grid_dims": (1, 1, n_ranks)}
    jobs = [Job("sliced", atoms, DomainConfig(**slices), outputs=outputs) for outputs in (TOTALS, ROWS)]
    jobs += [Job(kind.value, atoms, DomainConfig(strategy=kind), outputs=TOTALS) for kind in StrategyKind]
    shares = of_the_kit(n_ranks).run(evaluate_jobs, source, jobs)
    right = {outputs: evaluate(one, atoms, outputs) for outputs in (TOTALS, ROWS)}
    for j, job in enumerate(jobs):
        found, want = joined([mine[j][0] for mine in shares], len(atoms), job.name), right[job.outputs]
        assert abs(found.energy[0] - want.energy[0]) <= 1e-11 * len(atoms), job
        assert np.abs(found.totals["stress"] - want.totals["stress"]).max() <= 1e-11
        for name, rows in want.rows.items():
            assert np.abs(found.rows[name] - rows).max() <= 1e-9, (job, name)


@pytest.mark.parametrize("times", [0, 4])
def test_second_derivatives_of_the_model_on_ranks(of_the_kit, times: int) -> None:
    source = ModelSource("nvdd_pme.model:load_pme", {"accuracy": 1e-4, "cutoff": 5.0, "engine": "sharded"})
    assert_gradient_parity(source, kit.sheared(kit.disordered(3, side=9.0, seed=1), times), ranks=(3,))


@pytest.mark.parametrize(
    ("option", "device", "n_ranks", "shares_memory", "points", "sharded"),
    [
        ("auto", "cpu", 4, True, 191, False),
        ("auto", "cpu", 4, True, 192, True),
        ("auto", "cpu", 4, False, 95, False),
        ("auto", "cpu", 4, False, 96, True),
        ("auto", "cuda", 2, False, 511, False),
        ("auto", "cuda", 2, False, 512, True),
        ("auto", "cpu", 1, False, 512, False),
        ("sharded", "cpu", 1, False, 8, True),
        ("replicated", "cpu", 4, False, 512, False),
    ],
)
def test_engine_by_size(
    monkeypatch, option: str, device: str, n_ranks: int, shares_memory: bool, points: int, sharded: bool
) -> None:
    from nvdd_pme import model

    ranks = SimpleNamespace(size=n_ranks, device=torch.device(device), shares_memory=shares_memory)
    monkeypatch.setattr(model, "current_dd_context", lambda: SimpleNamespace(mesh=ranks))
    chosen = model.Splitting(alpha=0.4, size=(points,) * 3, order=5)
    engine = type(model._Mesh(option).engine(chosen).func)
    assert engine is (ShardedMesh if sharded else ReplicatedMesh)
