"""The exchange and its adjoint, collectives with empty parts, and how failures spread (O-21, O-41)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.comm import Fault, HaloPlan, Mesh, agreed, all_reduce_sum_symmetric, group_scope
from nvdd_core.errors import InputError, PeerError, RankLostError
from tests._spawn import RankFailure
from tests.cases.ranks import mesh

F64 = torch.float64


def _plan(group: Mesh) -> HaloPlan:
    """Rank 1 sends nothing, rank 2 receives nothing, rank 3 does neither; one row goes to two ranks."""
    wanted = {0: {1: [0, 2], 2: []}, 1: {}, 2: {0: [1], 1: [1, 1 + 1]}, 3: {}}
    sends = wanted.get(group.rank, {})
    index = torch.tensor([k for r in range(group.size) for k in sends.get(r, [])], dtype=torch.int64)
    splits = tuple(len(sends.get(r, [])) for r in range(group.size))
    recv = tuple(len(wanted.get(r, {}).get(group.rank, [])) for r in range(group.size))
    return HaloPlan(group, 3, index, splits, recv)


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).view(3, 2) + 10 * rank).to(dtype)


def _forward(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    plan = _plan(mesh())
    local = plan.forward(_values(plan.mesh.rank, dtype))
    return local, plan.reverse(local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_values_with_empty_parts(rank_pool, dtype: torch.dtype) -> None:
    answers = rank_pool(4).run(_forward, dtype, timeout=20)
    v = [_values(r, dtype) for r in range(4)]
    ghosts = [v[2][[1]], torch.cat([v[0][[0, 2]], v[2][[1, 2]]]), v[0][:0], v[0][:0]]
    for rank, (local, _) in enumerate(answers):
        assert local.dtype == dtype
        assert torch.equal(local, torch.cat([v[rank], ghosts[rank]]))
    copies = torch.tensor([[2, 1, 2], [1, 1, 1], [1, 3, 2], [1, 1, 1]])[..., None]
    for rank, (_, owned) in enumerate(answers):
        assert torch.equal(owned, v[rank] * copies[rank].to(dtype))


def _adjoint() -> tuple[float, float, float, float]:
    plan = _plan(mesh())
    torch.manual_seed(plan.mesh.rank)
    x = torch.randn(3, 2, dtype=F64, requires_grad=True)
    y = torch.randn(plan.n_local, 2, dtype=F64)
    pair = torch.stack([(plan.forward(x) * y).sum(), (x * plan.reverse(y)).sum()]).detach()
    plan.mesh.all_reduce_sum_(pair)

    def second(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of a function with forward, reverse and correct, and its gradient."""
        local = plan.forward(torch.tanh(values))
        share = (plan.correct(local**2)[: plan.n_owned] * values).sum() + (plan.refresh(local) ** 3).sum()
        (grad,) = torch.autograd.grad(share, values, create_graph=True)
        return share, grad

    grad = second(x)[1]
    weights = torch.randn(3, 2, dtype=F64)
    (curve,) = torch.autograd.grad((grad * weights).sum(), x)
    # both derivatives by central differences along one direction, over all ranks
    step, way = 1e-5, torch.randn(3, 2, dtype=F64)
    numbers = []
    for sign in (1, -1):
        moved = (x.detach() + sign * step * way).requires_grad_()
        up, slope = second(moved)
        numbers.append(torch.stack([up.detach(), (slope.detach() * weights).sum()]))
    numerical = plan.mesh.all_reduce_sum_((numbers[0] - numbers[1]) / (2 * step))
    exact = plan.mesh.all_reduce_sum_(torch.stack([(grad.detach() * way).sum(), (curve * way).sum()]))
    return (*pair.tolist(), *(numerical - exact).tolist())


def test_adjoint_and_second_derivatives(rank_pool) -> None:
    for left, right, first, second in rank_pool(4).run(_adjoint):
        assert abs(left - right) < 1e-12
        assert abs(first) < 1e-7
        assert abs(second) < 1e-6


def _opcheck() -> None:
    plan = _plan(mesh())
    args = (plan.send_index, list(plan.send_splits), list(plan.recv_splits), plan.mesh.id)
    x = torch.randn(3, 2, dtype=F64, requires_grad=True)
    y = torch.randn(plan.n_local, 2, dtype=F64, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.nvdd.halo_forward.default, (x, *args), test_utils=tests)
    torch.library.opcheck(torch.ops.nvdd.halo_reverse.default, (y, *args), test_utils=tests)


def test_opcheck(rank_pool) -> None:
    rank_pool(4).run(_opcheck)


def _compiled() -> float:
    plan = _plan(mesh())
    x = torch.randn(3, 2, dtype=F64, requires_grad=True)

    def energy(values: torch.Tensor) -> torch.Tensor:
        return (plan.forward(values.sin()) ** 2).sum()

    eager = torch.autograd.grad(energy(x), x)[0]
    compiled = torch.compile(energy, backend="aot_eager", fullgraph=True)
    return float((torch.autograd.grad(compiled(x), x)[0] - eager).abs().max())


def test_under_compile(rank_pool) -> None:
    assert max(rank_pool(4).run(_compiled, timeout=120)) < 1e-14


def _symmetric() -> tuple[float, float]:
    group = mesh()
    x = torch.tensor(float(group.rank + 1), dtype=F64, requires_grad=True)
    total = all_reduce_sum_symmetric(x, group)
    share = total**2 / group.size  # each rank keeps its own share of what follows
    return float(total), float(torch.autograd.grad(share, x)[0])


def test_symmetric_all_reduce(rank_pool) -> None:
    for total, grad in rank_pool(3).run(_symmetric):
        assert (total, grad) == (6.0, pytest.approx(12.0))


def _counted() -> tuple[dict[str, int], dict[str, int]]:
    group = mesh()
    plan = _plan(group)
    before = group.counter.snapshot()
    plan.reverse(plan.forward(torch.zeros(3, 2, dtype=F64)))
    group.all_reduce_sum_(torch.zeros(4, dtype=F64))
    tally = group.counter.since(before)
    return dict(tally.calls), dict(tally.bytes)


def test_counter(rank_pool) -> None:
    answers = rank_pool(4).run(_counted)
    assert all(calls == {"exchange": 1, "reverse": 1, "all_reduce": 1} for calls, _ in answers)
    assert answers[0][1] == {"exchange": 32, "reverse": 16, "all_reduce": 32}
    assert answers[3][1].get("exchange", 0) == 0


def test_one_rank_needs_no_group() -> None:
    group = Mesh.single()
    x = torch.randn(3, 2)
    plan = HaloPlan.trivial(group, 3)
    assert plan.forward(x) is x
    assert plan.n_local == 3
    assert group.all_gather_ints([1, 2]) == [[1, 2]]
    assert torch.equal(group.all_to_all_rows(x, [3], [3]), x)
    assert group.counter.snapshot().total_calls == 0


def test_wrong_number_of_rows() -> None:
    with pytest.raises(ValueError, match="3 owned rows"):
        HaloPlan.trivial(Mesh.single(), 3).forward(torch.zeros(4))


def _agreed(error: bool) -> str:
    group = mesh()
    try:
        with agreed(group):
            if error and group.rank == 1:
                raise InputError("no such file")
    except InputError as exc:
        return str(exc)
    return ""


def test_agreed(rank_pool) -> None:
    assert rank_pool(3).run(_agreed, False) == ["", "", ""]
    assert rank_pool(3).run(_agreed, True) == ["rank 1: no such file", "no such file", "rank 1: no such file"]


class _Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def _spread(kind: str) -> None:
    import os
    import signal

    group = mesh()
    with group_scope(group):
        group.barrier()
        if group.rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise _Odd(1, 2) if kind == "odd" else KeyError("lost key")
        for _ in range(1000):
            group.all_reduce_sum_(torch.zeros(1))
            group.all_to_all_rows(torch.zeros(3, 1), [1, 1, 1], [1, 1, 1])


@pytest.mark.parametrize(
    ("kind", "right"), [("known", KeyError), ("odd", PeerError), ("killed", RankLostError)]
)
def test_failure_spreads(run_ranks, kind: str, right: type[Exception]) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_spread, 3, kind, timeout=30)
    for rank in (0, 2):
        assert caught.value[rank].type_name == right.__name__
        if kind != "killed":
            assert "rank 1" in caught.value[rank].message


def test_random_plans_are_adjoint(rank_pool) -> None:
    assert max(rank_pool(4).run(_random_plans, 12)) < 1e-10


def _random_plans(count: int) -> float:
    group = mesh()
    worst = 0.0
    for case in range(count):
        rng = np.random.default_rng(case)
        owned = rng.integers(0, 5, group.size)
        table = [
            [
                rng.integers(0, owned[a], rng.integers(0, 4)) if owned[a] and a != b else []
                for b in range(group.size)
            ]
            for a in range(group.size)
        ]
        index = torch.as_tensor(np.concatenate([np.asarray(t, int) for t in table[group.rank]]))
        plan = HaloPlan(
            group,
            int(owned[group.rank]),
            index,
            tuple(len(t) for t in table[group.rank]),
            tuple(len(table[a][group.rank]) for a in range(group.size)),
        )
        x = torch.as_tensor(rng.normal(size=(group.size, 8, 3)))[group.rank][: plan.n_owned]
        y = torch.randn(plan.n_local, 3, dtype=F64)
        pair = torch.stack([(plan.forward(x) * y).sum(), (x * plan.reverse(y)).sum()])
        group.all_reduce_sum_(pair)
        worst = max(worst, abs(float(pair[0] - pair[1])))
    return worst


def _expanded(shared: bool) -> list[float]:
    """The gradient of a sum is one number seen many times: its rows have no memory of their own."""
    os.environ["NVDD_SHARED_MEMORY"] = "1" if shared else "0"
    mesh = Mesh.from_process_group()
    other = 1 - mesh.rank
    splits = tuple(2 if rank == other else 0 for rank in range(2))
    plan = HaloPlan(mesh, 3, torch.tensor([0, 2]), splits, splits)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    plan.forward(x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_without_memory_of_their_own(shared: bool, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_expanded, 2, shared) == [[2.0, 1.0, 2.0]] * 2


def test_an_error_is_told_with_one_rank() -> None:
    """A rank that repeats what another one said doesn't put its own number before it."""
    told = [
        str(Fault(0, "InputError", message, 2).error()) for message in ("bad", "rank 0: bad", "rank 3: bad")
    ]
    assert told == ["rank 0: bad", "rank 0: bad", "rank 3: bad"]
