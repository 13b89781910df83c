"""Handlers on several ranks against the same computation in one process: values, derivatives, budgets, faults."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nvdd_core.errors import SpecError
from nvdd_core.tensor import (
    DispatchTrace,
    ParticleHaloConfig,
    RowKind,
    ScatterMode,
    ShardTensor,
    collect_exchanges,
    loading_onto,
)
from tests._spawn import RankPool
from tests.tensor._rows import Rules, Spread, caught, random, rows, spread, total

Pool = Callable[..., RankPool]
T = torch.Tensor

N, F = 9, 3
WEIGHT = random(N, F, seed=7)
SENDERS = torch.arange(N).repeat_interleave(N - 1)
RECEIVERS = torch.cat([torch.tensor([j for j in range(N) if j != i]) for i in range(N)])
E = len(SENDERS)
EDGE = random(E, 1, seed=3)


def layout(name: str, size: int) -> Spread:
    """Named ways to spread nine rows over ranks."""
    if name == "even":
        return spread([i % size for i in range(N)])
    if name == "uneven":  # the last rank has one row, a ghost is copied only where edges need it
        return spread([min(i // 4, size - 1) if size > 1 else 0 for i in range(N)])
    if name == "empty rank":  # the last rank owns nothing
        return spread([i % (size - 1) for i in range(N)])
    raise ValueError(name)


def edges_of(s: Spread, mode: ScatterMode) -> T:
    """Edges that this rank computes: by owner of the receiver, or by any rule when writes go home."""
    owner = torch.full((N,), -1)
    for rank, ids in enumerate(s.mesh.all_gather_objects(s.owned_ids.tolist())):
        owner[ids] = rank
    if mode is ScatterMode.HALO_CORRECTION:  # on the sender's rank, so that most receivers are ghosts
        return (owner[SENDERS] == s.mesh.rank).nonzero()[:, 0]
    return (owner[RECEIVERS] == s.mesh.rank).nonzero()[:, 0]


def message(x: T, senders: T, edge: T) -> T:
    return torch.tanh(x[senders]) * edge


def add_in_place(out: T, index: T, msg: T) -> T:
    out.index_add_(0, index, msg)  # the return value is dropped
    return out


def add_scatter(out: T, index: T, msg: T) -> T:
    out.scatter_add_(0, index[:, None].expand(-1, msg.shape[1]), msg)
    return out


def add_rebind(out: T, index: T, msg: T) -> T:
    return out.index_add(0, index, msg)


def add_put(out: T, index: T, msg: T) -> T:
    out.index_put_((index,), msg, accumulate=True)
    return out


def add_reduce(out: T, index: T, msg: T) -> T:
    return torch.scatter_reduce(out, 0, index[:, None].expand(-1, msg.shape[1]), msg, "sum")


ADDS = {
    "in place": add_in_place,
    "scatter": add_scatter,
    "rebind": add_rebind,
    "put": add_put,
    "reduce": add_reduce,
}


def model(x: T, senders: T, receivers: T, edge: T, add: Callable[[T, T, T], T]) -> T:
    """Two layers; the second reads what the first wrote, and starts from a tensor that is not zero."""
    h = add(torch.zeros_like(x), receivers, message(x, senders, edge))
    g = h.clone() if isinstance(h, ShardTensor) else h * 1.0
    g = add(g, receivers, message(h, senders, edge))
    g = add(g, receivers, message(x, senders, edge) * 0.5)
    return h * h + g * g * g


def reference(add: Callable[[T, T, T], T]) -> tuple[T, T, T]:
    """Energy share of each row, its gradient, and a product with the second derivative."""
    x = random(N, F).requires_grad_()
    out = model(x, SENDERS, RECEIVERS, EDGE, add)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((grad * WEIGHT).sum(), x)
    return out.detach(), grad.detach(), second


def _two_layers(where: str, mode: ScatterMode, name: str) -> tuple[float, float, float, float]:
    s = layout(where, dist.get_world_size())
    out_ref, grad_ref, second_ref = reference(ADDS[name])
    plan = s.meta.plan
    mine = edges_of(s, mode)
    owned = random(N, F)[s.owned_ids].requires_grad_()
    x = rows(plan.forward(owned), s.meta, Rules(mode))
    with collect_exchanges() as exchanged:
        out = model(x, s.local_of(SENDERS[mine]), s.local_of(RECEIVERS[mine]), EDGE[mine], ADDS[name])
    assert len(exchanged) == 3
    # this rank's share: owned rows; the empty slices make every rank take part in every adjoint
    share = out[: s.n_owned].sum() + sum(t.reshape(-1)[:0].sum() for t in exchanged)
    (grad,) = torch.autograd.grad(share, owned, create_graph=True)
    (second,) = torch.autograd.grad((grad * WEIGHT[s.owned_ids]).sum(), owned)
    return (
        deviation(out, out_ref[s.ids], out_ref),
        deviation(out[s.n_owned :], out_ref[s.ids[s.n_owned :]], out_ref),
        deviation(grad, grad_ref[s.owned_ids], grad_ref),
        deviation(second, second_ref[s.owned_ids], second_ref),
    )


def deviation(found: T, expected: T, scale: T) -> float:
    """Largest difference, in units of the largest entry of ``scale``; 0 without entries."""
    found = found.detach().as_subclass(T)
    return float((found - expected).abs().max() / scale.abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", [ScatterMode.HALO_CORRECTION, ScatterMode.REFRESH])
@pytest.mark.parametrize("name", ADDS)
def test_two_layers_and_their_derivatives(rank_pool: Pool, world: int, mode: ScatterMode, name: str) -> None:
    for errors in rank_pool(world).run(_two_layers, "even", mode, name):
        assert max(errors) < 1e-13, errors


@pytest.mark.parametrize("where", ["uneven", "empty rank"])
@pytest.mark.parametrize("mode", [ScatterMode.HALO_CORRECTION, ScatterMode.REFRESH])
def test_uneven_and_empty_ranks(rank_pool: Pool, where: str, mode: ScatterMode) -> None:
    for errors in rank_pool(3).run(_two_layers, where, mode, "in place"):
        assert max(errors) < 1e-12, errors


def _numerical_second_derivative(mode: ScatterMode) -> float:
    """gradgradcheck over ranks: one entry of one rank is moved at a time, every rank evaluates."""
    s = spread([0, 1, 0, 1])
    keep = (SENDERS < 4) & (RECEIVERS < 4)
    mine = edges_of_few(s, keep, mode)
    senders, receivers = s.local_of(SENDERS[mine]), s.local_of(RECEIVERS[mine])

    def gradient(owned: T) -> T:
        owned = owned.requires_grad_()
        x = rows(s.meta.plan.forward(owned), s.meta, Rules(mode))
        out = model(x, senders, receivers, EDGE[mine], add_in_place)[: s.n_owned].sum()
        (grad,) = torch.autograd.grad(out, owned, create_graph=True)
        return grad

    start, weight = random(4, 2)[s.owned_ids], random(4, 2, seed=5)[s.owned_ids]
    owned = start.clone().requires_grad_()
    (second,) = torch.autograd.grad((gradient(owned) * weight).sum(), owned)
    worst, eps = 0.0, 1e-6
    for rank in range(s.mesh.size):
        for entry in range(4):
            move = torch.zeros(4, dtype=torch.float64)
            move[entry] = eps if rank == s.mesh.rank else 0.0
            up, down = gradient(start + move.view(2, 2)), gradient(start - move.view(2, 2))
            slope = float(total(((up - down) * weight).sum() / (2 * eps)))
            if rank == s.mesh.rank:
                worst = max(worst, abs(slope - float(second.view(-1)[entry])))
    return worst


def edges_of_few(s: Spread, keep: T, mode: ScatterMode) -> T:
    end = SENDERS if mode is ScatterMode.HALO_CORRECTION else RECEIVERS
    return (keep & torch.isin(end, s.owned_ids)).nonzero()[:, 0]


@pytest.mark.parametrize("mode", [ScatterMode.HALO_CORRECTION, ScatterMode.REFRESH])
def test_second_derivative_against_differences(rank_pool: Pool, mode: ScatterMode) -> None:
    for worst in rank_pool(2).run(_numerical_second_derivative, mode):
        assert worst < 1e-7


# -- what a scatter into rows does ------------------------------------------------------------------------------------


def _half_list() -> list[float]:
    """Each pair once, both ends written, by two scatters into one tensor that starts from stale ghosts."""
    s = spread([i % 2 for i in range(N)])
    pair = (SENDERS < RECEIVERS) & torch.isin(SENDERS, s.owned_ids)
    i, j, e = SENDERS[pair], RECEIVERS[pair], EDGE[pair].expand(-1, F)
    start = random(N, F)
    expected = start.clone()
    all_pairs = SENDERS < RECEIVERS
    full = EDGE[all_pairs].expand(-1, F)
    expected.index_add_(0, SENDERS[all_pairs], full).index_add_(0, RECEIVERS[all_pairs], -2.0 * full)
    dest = rows(start[s.ids], s.meta)
    dest[s.n_owned :] = 1e6  # stale ghosts never count
    alias = dest.to_local()
    dest.index_add_(0, s.local_of(i), e)
    dest.index_add_(0, s.local_of(j), e, alpha=-2.0)
    again = rows(start[s.ids], s.meta).index_add(0, s.local_of(i), e)
    again = again.index_add(0, s.local_of(j), -2.0 * e)
    return [float((t - expected[s.ids]).abs().max()) for t in (dest, alias, again)]


def test_repeated_scatters_into_ghosts_and_owned_rows(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(_half_list):
        assert max(errors) < 1e-12


def _budget(
    mode: ScatterMode,
) -> tuple[dict[str, int], dict[str, int], list[tuple[str, dict[str, int]]], int]:
    s = spread([i % 2 for i in range(N)])
    owned = random(N, F)[s.owned_ids].requires_grad_()
    x = rows(s.meta.plan.forward(owned), s.meta, Rules(mode))
    mine = edges_of(s, mode)
    counter = s.mesh.counter
    start = counter.snapshot()
    with DispatchTrace() as trace:
        out = torch.zeros_like(x)
        out.index_add_(0, s.local_of(RECEIVERS[mine]), message(x, s.local_of(SENDERS[mine]), EDGE[mine]))
        y = out * out
    forward = counter.since(start)
    middle = counter.snapshot()
    torch.autograd.grad(y[: s.n_owned].sum(), owned)
    backward = counter.since(middle)
    moved = [(r.handler, dict(r.moved)) for r in trace.records if r.handler == "row_scatter"]
    return dict(forward.calls), dict(backward.calls), moved, s.n_owned


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [
        (ScatterMode.LOCAL, {}, {"reverse": 1}),
        (ScatterMode.REFRESH, {"exchange": 1}, {"reverse": 2}),
        (ScatterMode.HALO_CORRECTION, {"exchange": 1, "reverse": 1}, {"exchange": 1, "reverse": 2}),
    ],
)
def test_exchanges_per_scatter(
    rank_pool: Pool, mode: ScatterMode, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """The adjoint of the positions' own exchange is in ``backward`` too."""
    for rank, (calls, back, moved, n_owned) in enumerate(rank_pool(2).run(_budget, mode)):
        assert calls == forward
        assert back == backward
        sent = {"exchange": n_owned * F * 8, "reverse": (N - n_owned) * F * 8}
        assert moved == [("row_scatter", {k: sent[k] for k in forward})], rank


def _max_over_owned_receivers() -> float:
    s = spread([i % 2 for i in range(N)])
    mine = edges_of(s, ScatterMode.REFRESH)
    src = random(E, F, seed=4)
    wide = RECEIVERS[:, None].expand(-1, F)
    expected = torch.zeros(N, F, dtype=torch.float64).scatter_reduce(0, wide, src, "amax", include_self=False)
    x = rows(torch.zeros(N, F, dtype=torch.float64), s.meta, Rules(ScatterMode.REFRESH))
    local = s.local_of(RECEIVERS[mine])[:, None].expand(-1, F)
    x.scatter_reduce_(0, local, src[mine], "amax", include_self=False)
    return float((x - expected[s.ids]).abs().max())


def test_other_reductions_are_right_for_owned_receivers(rank_pool: Pool) -> None:
    assert rank_pool(2).run(_max_over_owned_receivers) == [0.0, 0.0]


# -- sums by segment -------------------------------------------------------------------------------------------------

SYSTEM = torch.tensor([0, 1, 0, 2, 2, 0, 1, 1, 0])


def _segments(where: str, dest: str, tag: str, reduced: bool) -> tuple[float, float, float]:
    s = layout(where, dist.get_world_size())
    owned = random(N, F)[s.owned_ids].requires_grad_()
    local = s.meta.plan.forward(owned)
    x = rows(local, s.meta, Rules(system_reductions=reduced), n_systems=3, kind=RowKind.LOCAL)
    start = random(3, F, seed=8)
    index = SYSTEM[s.ids]
    source: T = x.clone()
    if tag == "index":
        source, index = x * 1.0, ShardTensor.promote(index, x, RowKind.LOCAL)
    made = {
        "plain": lambda: start.clone(),
        "new_zeros": lambda: x.new_zeros(3, F).copy_(start),
        "tagged": lambda: ShardTensor.promote(start.clone(), x, RowKind.SEGMENTS),
    }[dest]()
    made.index_add_(0, index, source)
    # each rank's share: its own rows' contribution to a function of the sums
    value = made.as_subclass(T)
    share = (value[SYSTEM[s.owned_ids]] * owned).sum() if reduced else (value * value).sum()
    (grad,) = torch.autograd.grad(share, owned)
    ref = random(N, F).requires_grad_()
    if reduced:
        sums = start.index_add(0, SYSTEM, ref)
        (ref_grad,) = torch.autograd.grad((sums[SYSTEM] * ref).sum(), ref)
    else:
        sums = start.index_add(0, SYSTEM[s.owned_ids], ref[s.owned_ids])
        (ref_grad,) = torch.autograd.grad((sums * sums).sum(), ref)
    calls = float(s.mesh.counter.calls["all_reduce"])
    return (
        deviation(value, sums, sums),
        deviation(grad, ref_grad[s.owned_ids], ref_grad),
        calls - (2.0 if reduced else 0.0),
    )


@pytest.mark.parametrize("dest", ["plain", "new_zeros", "tagged"])
@pytest.mark.parametrize("tag", ["source", "index"])
@pytest.mark.parametrize("reduced", [True, False])
def test_sums_by_segment(rank_pool: Pool, dest: str, tag: str, reduced: bool) -> None:
    for errors in rank_pool(2).run(_segments, "even", dest, tag, reduced):
        assert max(map(abs, errors)) < 1e-12, errors


@pytest.mark.parametrize("where", ["uneven", "empty rank"])
def test_sums_by_segment_on_uneven_and_empty_ranks(rank_pool: Pool, where: str) -> None:
    for errors in rank_pool(3).run(_segments, where, "plain", "source", True):
        assert max(map(abs, errors)) < 1e-12, errors


def _as_many_segments_as_rows(kind: RowKind | None, dest: str) -> list[float]:
    """Rank 0 has three local rows and three segments; rank 1 has five rows, so there nothing is ambiguous."""
    s = spread([0, 0, 1, 1, 1, 1], [[2], [0]])
    x = rows(random(6, F)[s.ids], s.meta, Rules(system_reductions=True), n_systems=3, kind=kind)
    made = x.new_zeros(3, F) if dest == "new_zeros" else torch.zeros(3, F, dtype=torch.float64)
    made.index_add_(0, torch.tensor([0, 1, 2, 2, 1, 0])[s.ids], x)
    expected = torch.zeros(3, F, dtype=torch.float64).index_add(
        0, torch.tensor([0, 1, 2, 2, 1, 0]), random(6, F)
    )
    out = torch.zeros_like(x)  # rows, on both ranks, whatever their number
    out.index_add_(
        0, torch.tensor([s.n_owned]), torch.ones(1, F, dtype=torch.float64)
    )  # into the first ghost
    new = x.new_zeros(x.shape[0], F)
    new.index_add_(0, torch.tensor([s.n_owned]), torch.ones(1, F, dtype=torch.float64))
    hit = torch.zeros(6, dtype=torch.float64)
    hit[[0, 2]] = 1.0
    return [
        float((made.as_subclass(T) - expected).abs().max()),
        float((out.to_local()[:, 0] - hit[s.ids]).abs().max()),
        float((new.as_subclass(T)[:, 0] - hit[s.ids]).abs().max()),
    ]


@pytest.mark.parametrize("kind", [None, RowKind.LOCAL])
@pytest.mark.parametrize("dest", ["plain", "new_zeros"])
def test_as_many_segments_as_rows_on_one_rank(rank_pool: Pool, kind: RowKind | None, dest: str) -> None:
    for errors in rank_pool(2).run(_as_many_segments_as_rows, kind, dest):
        assert max(errors) < 1e-12, errors


# -- faults ----------------------------------------------------------------------------------------------


def _two_shardings() -> list[str]:
    """A split 0 + 5 against a split 2 + 3 of the same five rows, without ghosts."""
    a = spread([1, 1, 1, 1, 1], [[], []])
    b = spread([0, 0, 1, 1, 1], [[], []])
    g = random(5, F)
    x, y = rows(g[a.ids], a.meta), rows(g[b.ids], b.meta)
    index = torch.zeros(y.shape[0], dtype=torch.int64)
    calls: list[Callable[[], Any]] = [
        lambda: x + y,
        lambda: torch.mul(x, y),
        lambda: torch.where(x > 0, x, y),
        lambda: torch.cross(x, y, dim=1),
        lambda: x.index_add(0, index, y),
        lambda: torch.cat([x, y]),
        lambda: x < y,
        lambda: x.add_(y),
        lambda: x.index_add_(0, index, y),
    ]
    return [caught(call) for call in calls]


def test_two_shardings_are_refused_on_all_ranks(rank_pool: Pool) -> None:
    for messages in rank_pool(2).run(_two_shardings):
        assert all(m.startswith("SpecError: ") for m in messages), messages


def _pickled() -> tuple[str, str, float, float]:
    s = spread([i % 2 for i in range(N)])
    x = rows(random(N, F)[s.ids], s.meta)
    data = pickle.dumps((x, torch.zeros_like(x)))
    stream = io.BytesIO()
    torch.save(x, stream)
    unbound = caught(lambda: pickle.loads(data))
    stream.seek(0)
    unbound_file = caught(lambda: torch.load(stream, weights_only=False))
    stream.seek(0)
    with loading_onto(s.mesh):
        y, out = pickle.loads(data)
        z = torch.load(stream, weights_only=False)
    copied = copy.deepcopy(out)
    for t in (out, copied):
        t.index_add_(0, torch.arange(N), torch.ones(N, F, dtype=torch.float64))
    return (
        unbound,
        unbound_file,
        float((x - y + (x - z)).abs().max()),
        float((out + copied - 4.0).abs().max()),
    )


def test_pickles_are_bound_to_a_mesh(rank_pool: Pool) -> None:
    for rank, (unbound, unbound_file, difference, sums) in enumerate(rank_pool(2).run(_pickled)):
        assert unbound.startswith(f"DistributedError: this ShardTensor belongs to rank {rank} of 2")
        assert unbound_file == unbound
        assert (difference, sums) == (0.0, 0.0)


def _missing_adjoint() -> float:
    """Rank 1's value doesn't depend on the exchange; the collected outputs keep it in the adjoint."""
    s = spread([i % 2 for i in range(N)])
    owned = random(N, F)[s.owned_ids].requires_grad_()
    with collect_exchanges() as exchanged:
        x = rows(s.meta.plan.forward(owned), s.meta, Rules(ScatterMode.REFRESH))
        out = torch.zeros_like(x)
        out.index_add_(0, torch.arange(s.n_owned), x.to_local()[: s.n_owned] ** 2)
    share = out[s.n_owned :].sum() if s.mesh.rank == 0 else owned.sum() * 0.0
    share = share + sum(t.reshape(-1)[:0].sum() for t in exchanged) + x.to_local().reshape(-1)[:0].sum()
    (grad,) = torch.autograd.grad(share, owned)
    expected = 2.0 * owned if s.mesh.rank == 1 else torch.zeros_like(owned)
    return float((grad - expected).abs().max())


def test_a_rank_that_reads_no_ghost_takes_part_in_the_adjoint(rank_pool: Pool) -> None:
    assert rank_pool(2).run(_missing_adjoint, timeout=30) == [0.0, 0.0]


def _config_of_another_mesh() -> str:
    a, b = spread([0, 1]), spread([0, 1])
    return caught(
        lambda: ShardTensor.wrap(
            torch.zeros(2), spec=Rules(), meta=a.meta, config=ParticleHaloConfig(b.mesh, 1.0)
        )
    )


def test_config_of_another_mesh_is_refused(rank_pool: Pool) -> None:
    for message_ in rank_pool(2).run(_config_of_another_mesh):
        assert message_.startswith(f"{SpecError.__name__}: ")
