"""`OpAdapter` on several ranks against the same kernel in one process: values, gradients, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvdd_core.adapters import AdapterRegistry, OpAdapter, intercept_plain_calls
from nvdd_core.comm import Mesh, all_reduce_sum_replicated
from nvdd_core.errors import AdapterError
from nvdd_core.tensor import (
    DispatchRules,
    DispatchTrace,
    GatherMetadata,
    ParticleHaloConfig,
    RowKind,
    RowScope,
    ShardTensor,
    StorageKind,
    collect_exchanges,
)
from tests._spawn import RankPool
from tests.adapters.ops import both, edge_sum
from tests.tensor._rows import Rules, Spread, caught, random, rows, spread, total

Pool = Callable[..., RankPool]
T = torch.Tensor

N, F = 9, 2
X = random(N, F)
WEIGHT = random(N, F, seed=5)
W = random(F, F, seed=6)
SENDERS = torch.arange(N).repeat_interleave(3)
RECEIVERS = (SENDERS + torch.tensor([1, 2, 5]).repeat(N)) % N

GATHER = OpAdapter(edge_sum, neighbors_inputs=[0])
SCATTER = OpAdapter("toy::edge_sum.default", gather_inputs=[0], scatter_outputs=[0])


def layout(name: str, size: int) -> Spread:
    if name == "even":
        return spread([i % size for i in range(N)])
    return spread([i % max(size - 1, 1) for i in range(N)])  # the last rank owns nothing


def edges(s: Spread, by: T) -> tuple[T, T]:
    """Local senders and receivers of the edges whose end ``by`` this rank owns."""
    mine = (by[:, None] == s.owned_ids).any(1)
    return s.local_of(SENDERS[mine]), s.local_of(RECEIVERS[mine])


def network(x: T, senders: T, receivers: T, n: int, second: Callable[[T], T]) -> T:
    """Two layers by the opaque kernel; the linear map between them makes plain tensors of ShardTensors."""
    return edge_sum(second(edge_sum(x, senders, receivers, n)), senders, receivers, n)


def linear(h: T) -> T:
    return torch.nn.functional.linear(h, W)


def _spread_network(name: str, scattering: bool, plain: bool) -> Any:
    mesh = Mesh.from_process_group()
    s = layout(name, mesh.size)
    senders, receivers = edges(s, SENDERS if scattering else RECEIVERS)
    owned = X[s.owned_ids].requires_grad_()
    x = torch.cat([owned, X.new_full((s.meta.n_padded - s.n_owned, F), 1e3)])  # ghosts hold nothing of use
    tagged = x if plain else rows(x, s.meta)
    again = (
        linear if plain else lambda h: ShardTensor.promote(linear(h).as_subclass(torch.Tensor), like=tagged)
    )
    scope = RowScope(s.meta, ParticleHaloConfig(mesh, 1.0), Rules())
    with (
        AdapterRegistry([SCATTER if scattering else GATHER]),
        collect_exchanges() as exchanged,
        intercept_plain_calls(scope),
        DispatchTrace() as trace,
    ):
        out = network(tagged, senders, receivers, s.meta.n_padded, again)
    promoted = scattering and not plain  # declared to be local rows; the length says nothing
    kind = out.kind is RowKind.LOCAL if promoted else type(out) is torch.Tensor
    out = out.as_subclass(torch.Tensor)[: s.n_owned]
    share = (out**2 * WEIGHT[s.owned_ids]).sum() + sum(e.reshape(-1)[:0].sum() for e in exchanged)
    (grad,) = torch.autograd.grad(share, owned)
    steps = [(r.handler, sorted(r.moved)) for r in trace.records if "edge_sum" in r.op]
    return s.owned_ids, out.detach(), grad, steps, kind


def _whole() -> tuple[T, T]:
    x = X.clone().requires_grad_()
    out = network(x, SENDERS, RECEIVERS, N, linear)
    (grad,) = torch.autograd.grad((out**2 * WEIGHT).sum(), x)
    return out.detach(), grad


@pytest.mark.parametrize("plain", [False, True], ids=["shard", "plain"])
@pytest.mark.parametrize("scattering", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize(("name", "size"), [("even", 2), ("even", 3), ("empty rank", 3)])
def test_network(rank_pool: Pool, name: str, size: int, scattering: bool, plain: bool) -> None:
    out, grad = _whole()
    seen = 0
    for ids, mine, slope, steps, kind in rank_pool(size).run(
        _spread_network, name, scattering, plain, timeout=40
    ):
        torch.testing.assert_close(mine, out[ids], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slope, grad[ids], rtol=1e-12, atol=1e-12)
        handler = "adapter:toy::edge_sum" + (".default" if scattering else "")
        assert steps == [(handler, ["exchange", "reverse"] if scattering else ["exchange"])] * 2
        assert kind
        seen += len(ids)
    assert seen == N


# -- sums over ranks ---------------------------------------------------------------------------------------


def _summed(replicated: bool, step: float) -> tuple[T, T, T, T, T]:
    """Share of a function with a pooled value in it, its gradient, and the gradient's own."""
    s = layout("even", Mesh.from_process_group().size)
    mine = X[s.owned_ids] + step * random(N, F, seed=9)[s.owned_ids]
    owned = mine.clone().requires_grad_()
    x = rows(torch.cat([owned, owned.new_zeros(s.meta.n_padded - s.n_owned, F)]), s.meta)
    roles = {"all_reduce_replicated_outputs" if replicated else "all_reduce_outputs": [1]}
    adapter = OpAdapter(both, owned_slice_inputs=[0, 1], **roles)
    weight = torch.cat([WEIGHT[s.owned_ids], WEIGHT[s.owned_ids].new_zeros(len(x) - s.n_owned, F)])
    with AdapterRegistry([adapter]):
        square, pooled = both(x, weight)
    if replicated:  # every rank computes all of it, and it counts once
        share = (pooled[0] * pooled[1]).sin()
    else:  # each rank has its own part
        share = (square * pooled).sum()
    (grad,) = torch.autograd.grad(share, owned, create_graph=True)
    probe = (grad * random(N, F, seed=8)[s.owned_ids]).sum()  # differs from rank to rank
    (curve,) = torch.autograd.grad(probe, owned)
    value = share.detach() if replicated else total(share)
    return value, grad.detach(), curve, total(probe), torch.tensor(type(square) is T)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_by_finite_differences(rank_pool: Pool, size: int, replicated: bool) -> None:
    pool, h = rank_pool(size), 1e-5
    here = pool.run(_summed, replicated, 0.0, timeout=40)
    up, down = (pool.run(_summed, replicated, sign * h, timeout=40)[0] for sign in (1, -1))
    way = random(N, F, seed=9)
    ids = [[i for i in range(N) if i % size == r] for r in range(size)]
    slope = sum((here[r][1] * way[ids[r]]).sum() for r in range(size))
    curve = sum((here[r][2] * way[ids[r]]).sum() for r in range(size))
    torch.testing.assert_close(slope, (up[0] - down[0]) / (2 * h), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(curve, (up[3] - down[3]) / (2 * h), rtol=1e-6, atol=1e-7)
    assert all(bool(row[4]) for row in here)
    square, pooled = both(X, WEIGHT)
    whole = (pooled[0] * pooled[1]).sin() if replicated else (square * pooled).sum()
    torch.testing.assert_close(here[0][0], whole)


def _opcheck() -> None:
    mesh = Mesh.from_process_group()
    x = random(3, 2).requires_grad_()
    for op in (torch.ops.nvdd.sum_replicated, torch.ops.nvdd.copy_replicated, torch.ops.nvdd.all_reduce_sum):
        torch.library.opcheck(op, (x, mesh.id), test_utils=("test_schema", "test_faketensor"))
    assert all_reduce_sum_replicated(x, Mesh.single()) is x


def test_opcheck(rank_pool: Pool) -> None:
    rank_pool(2).run(_opcheck, timeout=60)


# -- faults and layouts ------------------------------------------------------------------------------------


class WideRules(Rules):
    @property
    def dispatch_rules(self) -> DispatchRules:
        return DispatchRules(exchanges=False)


def _nothing_exchanged() -> tuple[bool, str, dict[str, int]]:
    s = layout("even", Mesh.from_process_group().size)
    x = rows(X[s.ids], s.meta, WideRules())
    senders, receivers = edges(s, RECEIVERS)
    counter = s.mesh.counter
    before = counter.snapshot()
    with AdapterRegistry([SCATTER]):
        out = edge_sum(x, senders, receivers, s.meta.n_padded)
        message = caught(
            lambda: edge_sum(x.to_local()[: s.n_owned], senders, receivers, s.meta.n_padded, bias=x)
        )
    expected = edge_sum(X, SENDERS, RECEIVERS, N)[s.owned_ids]
    same = torch.allclose(out.to_local()[: s.n_owned], expected)
    return same, message, dict(counter.since(before).calls)


def test_wide_halo_exchanges_nothing(rank_pool: Pool) -> None:
    for same, message, calls in rank_pool(2).run(_nothing_exchanged):
        assert same
        assert "nothing is exchanged" in message
        assert calls == {}


def _wrong_rows() -> str:
    s = layout("even", Mesh.from_process_group().size)
    x = rows(X[s.ids], s.meta)
    with AdapterRegistry([GATHER]):
        return caught(lambda: edge_sum(x.to_local()[:3], SENDERS, RECEIVERS, n=N, bias=x))


def test_wrong_rows_name_rank_op_and_position(rank_pool: Pool) -> None:
    for rank, message in enumerate(rank_pool(2).run(_wrong_rows)):
        assert message.startswith(f"{AdapterError.__name__}: rank {rank}: toy::edge_sum, input 0 ('x')")
        assert "found a tensor of shape (3, 2)" in message


# -- sharded storage ---------------------------------------------------------------------------------------

SHARDED = OpAdapter(edge_sum, gather_inputs_full=[0], slice_outputs_owned=[0])


def _sharded(layers: int) -> Any:
    mesh = Mesh.from_process_group()
    ids = torch.tensor([i for i in reversed(range(N)) if i % mesh.size == mesh.rank])
    meta = GatherMetadata.build(mesh, ids)
    owned = X[ids].requires_grad_()
    wrap = lambda t: ShardTensor.wrap(  # noqa: E731
        t, spec=Rules(storage=StorageKind.SHARDED), gather_meta=meta, kind=RowKind.OWNED
    )
    h: Any = wrap(owned)
    with AdapterRegistry([SHARDED]), collect_exchanges() as exchanged:
        for _ in range(layers):
            like = h
            h = edge_sum(h, SENDERS, RECEIVERS, N + 1)
            h = h if layers == 1 else ShardTensor.promote(h[:-1], like=like)
    out = h.as_subclass(torch.Tensor)[: len(ids)]
    share = (out**2 * WEIGHT[ids]).sum() + sum(e.reshape(-1)[:0].sum() for e in exchanged)
    (grad,) = torch.autograd.grad(share, owned)
    return ids, out.detach(), grad, tuple(h.shape)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_rows(rank_pool: Pool, size: int, layers: int) -> None:
    x = X.clone().requires_grad_()
    out = x
    for _ in range(layers):
        out = edge_sum(out, SENDERS, RECEIVERS, N)
    (grad,) = torch.autograd.grad((out**2 * WEIGHT).sum(), x)
    for ids, mine, slope, shape in rank_pool(size).run(_sharded, layers, timeout=40):
        torch.testing.assert_close(mine, out[ids].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slope, grad[ids], rtol=1e-12, atol=1e-12)
        assert shape == (len(ids) + (layers == 1), F)
