"""Rows from each rank to each other: values, adjoint, second derivatives; over gloo too, and with empty parts."""

from __future__ import annotations

import pytest
import torch

from nvdd_core.comm import Mesh, all_to_all_rows, received_splits
from tests.cases.ranks import mesh

F64 = torch.float64


def _splits(group: Mesh) -> list[int]:
    """Rank 1 sends nothing, the last rank receives nothing, some rows stay."""
    return [
        0 if group.rank == 1 or r == group.size - 1 else 1 + (group.rank + 2 * r) % 3
        for r in range(group.size)
    ]


def _values(group: Mesh, dtype: torch.dtype) -> torch.Tensor:
    n = sum(_splits(group))
    return (100 * group.rank + torch.arange(2 * n).view(n, 2)).to(dtype)


def _exchange(dtype: torch.dtype) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    group = mesh()
    send, rows = _splits(group), _values(group, dtype)
    return send, rows, all_to_all_rows(rows, send, received_splits(send, group), group)


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_values(rank_pool, monkeypatch, dtype: torch.dtype, shared: str) -> None:
    monkeypatch.setenv("NVDD_SHARED_MEMORY", shared)
    answers = rank_pool(4).run(_exchange, dtype, timeout=30)
    blocks = [rows.split(send) for send, rows, _ in answers]
    for rank, (_, _, received) in enumerate(answers):
        assert received.dtype == dtype
        assert torch.equal(received, torch.cat([block[rank] for block in blocks]))


def _derivatives() -> list[float]:
    group = mesh()
    send = _splits(group)
    receive = received_splits(send, group)
    torch.manual_seed(group.rank)
    x, way = (torch.randn(sum(send), 2, dtype=F64) for _ in range(2))
    y = torch.randn(sum(receive), 2, dtype=F64)
    moved = all_to_all_rows(x, send, receive, group)
    back = all_to_all_rows(y, receive, send, group)
    pair = group.all_reduce_sum_(torch.stack([(moved * y).sum(), (x * back).sum()]))

    def slope(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = (all_to_all_rows(values.sin(), send, receive, group) ** 3 * y).sum()
        (grad,) = torch.autograd.grad(share, values, create_graph=True)
        return share, grad

    leaf = x.clone().requires_grad_()
    grad = slope(leaf)[1]
    (curve,) = torch.autograd.grad((grad * way).sum(), leaf)
    step, numbers = 1e-5, []
    for sign in (1, -1):
        up, change = slope((x + sign * step * way).requires_grad_())
        numbers.append(torch.stack([up.detach(), (change.detach() * way).sum()]))
    numerical = group.all_reduce_sum_((numbers[0] - numbers[1]) / (2 * step))
    exact = group.all_reduce_sum_(torch.stack([(grad.detach() * way).sum(), (curve * way).sum()]))
    return [float(pair[0] - pair[1]), *(numerical - exact).tolist()]


def test_adjoint_and_second_derivatives(rank_pool) -> None:
    for adjoint, first, second in rank_pool(4).run(_derivatives):
        assert abs(adjoint) < 1e-12
        assert abs(first) < 1e-7
        assert abs(second) < 1e-7


def _opcheck() -> float:
    group = mesh()
    send = _splits(group)
    receive = received_splits(send, group)
    x = torch.randn(sum(send), 2, dtype=F64, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.nvdd.all_to_all_rows.default, (x, send, receive, group.id), test_utils=tests
    )

    def energy(values: torch.Tensor) -> torch.Tensor:
        return (all_to_all_rows(values.sin(), send, receive, group) ** 2).sum()

    eager = torch.autograd.grad(energy(x), x)[0]
    compiled = torch.compile(energy, backend="aot_eager", fullgraph=True)
    difference = (torch.autograd.grad(compiled(x), x)[0] - eager).abs()
    return float(difference.max()) if difference.numel() else 0.0


def test_op_and_compile(rank_pool) -> None:
    assert max(rank_pool(2).run(_opcheck, timeout=120)) < 1e-14


def _counted() -> tuple[int, int]:
    group = mesh()
    send, before = _splits(group), group.counter.snapshot()
    all_to_all_rows(_values(group, F64), send, received_splits(send, group), group)
    tally = group.counter.since(before)
    return tally.calls["all_to_all"], tally.bytes.get("all_to_all", 0)


def test_counter(rank_pool) -> None:
    answers = rank_pool(3).run(_counted)
    assert [calls for calls, _ in answers] == [1, 1, 1]
    assert [size for _, size in answers] == [16 * n for n in (4, 0, 5)]


def test_one_rank_and_wrong_splits() -> None:
    single, rows = Mesh.single(), torch.ones(3, 2)
    assert all_to_all_rows(rows, [3], received_splits([3], single), single) is rows
    with pytest.raises(ValueError, match=r"send_splits name 2 rows, found a tensor of shape \(3, 2\)"):
        all_to_all_rows(rows, [2], [2], single)
