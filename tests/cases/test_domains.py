"""Domains over time: migration, stale lists, ghost depth, one rank's failure (open.md, part B)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd_core.comm import group_scope
from nvdd_core.errors import InputError, NumericalError
from nvdd_core.runtime import DistributedModel, DomainConfig
from nvdd_core.spec import StrategyKind
from tests.cases import oracle
from tests.cases.models import Raising, StandIn, TorchLJ, Toy2
from tests.cases.ranks import System, collect, evaluate, mesh, share

ALL = (True, True, True)


def _cross_face() -> list[tuple[float, float, float, int]]:
    """O-17: move a row over the face between two domains without a rebuild."""
    group = mesh()
    sharded = share([System(np.array([[4.9, 5, 5], [6.2, 5, 5.0]]), 10 * np.eye(3), ALL)], group)
    model = DistributedModel(TorchLJ(), DomainConfig(skin=0.6, grid_dims=(group.size, 1, 1)), group)
    out = []
    first = model(sharded)
    out.append((float(first.energy), 0.0, 0.0, int(group.all_reduce_sum_(torch.tensor(sharded.n_owned)))))
    sharded.positions[sharded.ids == 0] = torch.tensor([5.1, 5, 5], dtype=torch.float64)
    for _ in range(5):
        result = model(sharded)
        forces = collect(result.forces, sharded.ids, 2, group)
        owned = int(group.all_reduce_sum_(torch.tensor(sharded.n_owned)))
        out.append((float(result.energy), forces[0, 0], forces[1, 0], owned))
    assert model.n_rebuilds == 1
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_row_crosses_a_face_before_it_migrates(rank_pool, world: int) -> None:
    for out in rank_pool(world).run(_cross_face):
        assert abs(out[0][0] + 0.6570169145) <= 1e-9
        for energy, fx, gx, owned in out[1:]:
            assert abs(energy + 0.9833724494) <= 1e-9
            assert abs(fx + 1.5880953898) <= 1e-9
            assert abs(fx + gx) <= 1e-12
            assert owned == 2


def _changed_cell() -> tuple[float, float]:
    """O-18: positions and cell change between evaluations of one session."""
    group = mesh()
    pos, cell = oracle.fcc(3, 3, 3)
    turn = torch.tensor([[1.01, 0.02, 0], [0.02, 0.99, 0.01], [0, 0.01, 1]], dtype=torch.float64)
    out = []
    for make in (TorchLJ, Toy2):
        sharded = share([System(pos, cell, ALL)], group)
        model = DistributedModel(make(), DomainConfig(skin=0.3), group)
        model(sharded)
        sharded.rows["positions"] = sharded.positions @ turn
        sharded.cell = sharded.cell @ turn
        out.append(float(model(sharded).energy))
    return out[0], out[1]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_changed_cell(rank_pool, world: int) -> None:
    for lj, toy in rank_pool(world).run(_changed_cell):
        assert abs(lj + 787.5121225464) <= 1e-9
        assert abs(toy - 154.6846425356) <= 1e-9


def _drift(skin: float, steps: int, fold: bool) -> tuple[list[float], list[float], int]:
    """O-10: rows drift through the cell and are folded; the kept list must equal a fresh one."""
    group = mesh()
    pos, cell = oracle.fcc(3, 3, 3)
    sharded = share([System(pos, cell, ALL)], group)
    model = DistributedModel(TorchLJ(), DomainConfig(skin=skin), group)
    kept, fresh = [], []
    for step in range(steps):
        kept.append(float(model(sharded).energy))
        check = DistributedModel(TorchLJ(), DomainConfig(), group)
        fresh.append(float(check(share_again(sharded)).energy))
        ids = sharded.ids.double()[:, None]
        kick = torch.tensor([1.0, 0.7, 0.4], dtype=torch.float64) + 0.3 * torch.sin(ids * (step + 1.0))
        moved = sharded.positions + 0.04 * kick
        sharded.rows["positions"] = torch.remainder(moved, 4.8) if fold else moved
    return kept, fresh, model.n_rebuilds


def share_again(sharded):
    """The same rows in an object of their own."""
    from nvdd_core.runtime import ShardedBatch

    return ShardedBatch.scatter(sharded.gather(), sharded.mesh)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("fold", [True, False])
def test_kept_list_equals_a_fresh_one(rank_pool, world: int, fold: bool) -> None:
    kept, fresh, rebuilds = rank_pool(world).run(_drift, 0.3, 40, fold, timeout=120)[0]
    assert np.abs(np.subtract(kept, fresh)).max() <= 1e-10 * 108
    assert 2 <= rebuilds < 40


def _ghost_width(factor: float) -> float | str:
    group = mesh()
    try:
        config = DomainConfig(ghost_width=factor * 2.5, strategy=StrategyKind.WIDE_HALO)
        return float(evaluate(Toy2, [System(*oracle.fcc(6, 6, 6), ALL)], config, False).energy[0])
    except InputError as exc:
        return str(exc) if group.size else ""


def test_ghost_depth(rank_pool) -> None:
    """O-23: too small a width is refused on all ranks, the right one is exact."""
    for factor in (1.0, 1.5):
        answers = rank_pool(8).run(_ghost_width, factor)
        assert all(isinstance(a, str) and "too small" in a for a in answers)
    for energy in rank_pool(8).run(_ghost_width, 2.0):
        assert abs(energy - 1235.7690790120) <= 1e-8
    halo = rank_pool(8).run(evaluate, Toy2, [System(*oracle.fcc(6, 6, 6), ALL)])[0]
    single = evaluate(Toy2, [System(*oracle.fcc(6, 6, 6), ALL)])
    assert np.abs(halo.forces - single.forces).max() <= 1e-9
    assert abs(halo.energy[0] - 1235.7690790120) <= 1e-8


def _raise(place: str, rank: int) -> None:
    group = mesh()

    def migrate(*args: object) -> None:
        raise ValueError("deliberate failure in migration")

    with group_scope(group), pytest.MonkeyPatch.context() as patch:
        if place == "migration" and group.rank == rank:
            patch.setattr("nvdd_core.runtime.domain.reshard_by_destination", migrate)
        evaluate(lambda: Raising(place, rank), [System(*oracle.fcc(3, 3, 3), ALL)], group=group)


@pytest.mark.parametrize("place", ["setup", "forward", "backward", "migration"])
def test_one_rank_raises(run_ranks, place: str) -> None:
    """O-21: every rank ends with the same type of error, which names rank and cause."""
    from tests._spawn import RankFailure

    with pytest.raises(RankFailure) as caught:
        run_ranks(_raise, 4, place, 2, timeout=30)
    for rank in range(4):
        assert caught.value[rank].type_name == "ValueError", str(caught.value)
        assert f"deliberate failure in {place}" in caught.value[rank].message
        if rank != 2:
            assert "rank 2" in caught.value[rank].message


def _bad(kind: str) -> tuple[str, str]:
    group = mesh()
    pos, cell = oracle.fcc(3, 3, 3)
    if kind == "cell":
        cell[1, 1] = np.nan
    elif kind == "singular":
        cell[1] = 2 * cell[0]
    elif kind != "late":
        pos[57, 1] = float(kind)
    try:
        if kind == "late":
            sharded = share([System(pos, cell, ALL)], group)
            model = DistributedModel(TorchLJ(), DomainConfig(skin=0.3), group)
            model(sharded)
            sharded.positions[sharded.ids == 57] = float("nan")
            model(sharded)
        else:
            evaluate(TorchLJ, [System(pos, cell, ALL)])
    except (InputError, NumericalError) as exc:
        return type(exc).__name__, str(exc)
    return "", "no error"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("nan", "InputError", ["position", "atom 57", "not finite"]),
        ("inf", "InputError", ["position", "atom 57", "not finite"]),
        ("cell", "InputError", ["cell", "not finite"]),
        ("singular", "InputError", ["singular"]),
        ("late", "NumericalError", ["position", "atom 57", "not finite"]),
    ],
)
def test_not_finite(rank_pool, kind: str, name: str, words: list[str]) -> None:
    """O-06: one error on all ranks that names the row and the quantity."""
    for found, text in rank_pool(4).run(_bad, kind):
        assert found == name
        assert all(word in text for word in words), text


def _dense_sparse_dense() -> list[float]:
    """O-09: one model object, structures of very different density."""
    pos, cell = oracle.fcc(3, 3, 3)
    pair = System(np.array([[0.0, 0, 0], [1.1, 0, 0]]), 50 * np.eye(3), ALL)
    group = mesh()
    model = DistributedModel(TorchLJ(), DomainConfig(), group)
    dense, squeezed = System(pos, cell, ALL), System(0.9 * pos, 0.9 * cell, ALL)
    return [float(model(share([s], group)).energy) for s in (dense, pair, dense, squeezed)]


@pytest.mark.parametrize("world", [1, 2])
def test_no_buffer_is_left_too_small(rank_pool, world: int) -> None:
    first, pair, again, squeezed = rank_pool(world).run(_dense_sparse_dense)[0]
    pos, cell = oracle.fcc(3, 3, 3)
    assert first == again
    assert abs(squeezed - oracle.lj(0.9 * pos, 0.9 * cell, ALL)[0]) <= 1e-8
    assert abs(pair - 4 * (1.1**-12 - 1.1**-6)) <= 1e-12


class CoincidentModel(StandIn):
    """Gives a force that is not finite for atom 5."""

    def node_energy(self, batch):
        scale = torch.where(batch.ids == 5, float("inf"), 1.0)
        return (batch.positions * scale[:, None]).sum(1)


def _blow_up() -> str:
    try:
        evaluate(CoincidentModel, [System(*oracle.fcc(3, 3, 3), ALL)], stress=False)
    except NumericalError as exc:
        return str(exc)
    return ""


def test_result_not_finite(rank_pool) -> None:
    for text in rank_pool(3).run(_blow_up):
        assert "atom 5" in text
        assert "not finite" in text


def _steady_calls() -> dict[str, int]:
    group = mesh()
    sharded = share([System(*oracle.fcc(3, 3, 3), ALL)], group)
    model = DistributedModel(Toy2(), DomainConfig(skin=0.3), group)
    model(sharded)
    before = group.counter.snapshot()
    model(sharded)
    return dict(group.counter.since(before).calls)


def test_collectives_of_a_steady_evaluation(rank_pool) -> None:
    """Two layers: two exchanges each way (positions, one feature), one all-reduce, no vote."""
    for calls in rank_pool(4).run(_steady_calls):
        assert calls == {"exchange": 2, "reverse": 2, "all_reduce": 1}
