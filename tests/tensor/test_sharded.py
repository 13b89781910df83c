"""Sharded storage on several ranks against the same operations on the whole tensor in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn

from nvdd_core.comm import Mesh
from nvdd_core.errors import SpecError
from nvdd_core.tensor import (
    DispatchTrace,
    GatherMetadata,
    RowKind,
    ShardTensor,
    StorageKind,
    collect_exchanges,
)
from tests._spawn import RankPool
from tests.tensor._rows import Rules, caught, random, total
from tests.tensor._sharded import SPEC, WORLDS, F, N, T, directory, gap, shard, share, wanted

Pool = Callable[..., RankPool]
# -- reading -----------------------------------------------------------------------------------------------------

READS: dict[str, tuple[tuple[int, ...], Callable[[T, T], T]]] = {
    "index_select": ((7,), lambda x, i: x.index_select(0, i)),
    "torch.index_select": ((7,), lambda x, i: torch.index_select(input=x, dim=-2, index=i)),
    "aten.index_select": ((7,), lambda x, i: torch.ops.aten.index_select.default(x, 0, i)),
    "getitem": ((7,), lambda x, i: x[i]),
    "int32": ((7,), lambda x, i: x[i.int()]),
    "list": ((3,), lambda x, i: x[i.tolist()]),
    "scalar tensor": ((), lambda x, i: x[i]),
    "table": ((4, 2), lambda x, i: x[i]),
    "row and column": ((7,), lambda x, i: x[i, 1]),
    "row and columns": ((3,), lambda x, i: x[i, torch.tensor([0, 2, 1])]),
    "row and slice": ((7,), lambda x, i: x[i, ..., 1:]),
    "new axis": ((7,), lambda x, i: x[None, i]),
    "aten.index": ((7,), lambda x, i: torch.ops.aten.index.Tensor(x, [i])),
    "aten._unsafe_index": ((7,), lambda x, i: torch.ops.aten._unsafe_index.Tensor(x, [i])),
    "gather": ((7, 2), lambda x, i: torch.gather(x, 0, i)),
    "take_along_dim": ((7, 1), lambda x, i: torch.take_along_dim(x, i, dim=0)),
    "embedding": ((4, 2), lambda x, i: fn.embedding(i, x)),
    "embedding padding": ((4, 2), lambda x, i: fn.embedding(i, x, padding_idx=-3)),
    "torch.embedding": ((5,), lambda x, i: torch.embedding(x, i)),
    "empty": ((0,), lambda x, i: x[i]),
    "not the rows": ((), lambda x, i: x[:, 1:].index_select(1, torch.tensor([0, 1]))[0:0]),
}


def _read(name: str) -> tuple[bool, str, float, float, float, list[str]]:
    shape, read = READS[name]
    meta = directory()
    mine = wanted(meta.mesh.rank, shape)
    whole = random(N, F).requires_grad_()
    owned = whole.detach()[meta.ids].requires_grad_()
    with DispatchTrace() as trace, collect_exchanges() as exchanged:
        out = read(shard(owned, meta), mine)
    expected = read(whole, mine)
    grad, second = derivatives(out, owned, exchanged, random(N, F, seed=9)[meta.ids])
    ref_grad, ref_second = reference(
        lambda x: sum((read(x, wanted(r, shape)) ** 3).sum() for r in range(meta.mesh.size)),
        random(N, F, seed=9),
    )
    return (
        out.shape == expected.shape,
        type(out).__name__,
        gap(out, expected),
        gap(grad, ref_grad[meta.ids]),
        gap(second, ref_second[meta.ids]),
        [r.handler for r in trace.handled],
    )


def derivatives(out: T, owned: T, exchanged: list[T], weight: T) -> tuple[T, T]:
    """Gradient of a sum of cubes and its derivative along ``weight``; each rank's share is its own entries."""
    value = (
        (out.as_subclass(T) ** 3).sum() + sum(t.reshape(-1)[:0].sum() for t in exchanged) + 0.0 * owned.sum()
    )
    (grad,) = torch.autograd.grad(value, owned, create_graph=True)
    (second,) = torch.autograd.grad((grad * weight).sum() + 0.0 * owned.sum(), owned)
    return grad.detach(), second


def reference(value: Callable[[T], Any], weight: T) -> tuple[T, T]:
    whole = random(N, F).requires_grad_()
    (grad,) = torch.autograd.grad(value(whole) + 0.0 * whole.sum(), whole, create_graph=True)
    (second,) = torch.autograd.grad((grad * weight).sum() + 0.0 * whole.sum(), whole)
    return grad.detach(), second


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", READS)
def test_reading_by_global_id(rank_pool: Pool, world: int, name: str) -> None:
    for shapes, kind, value, grad, second, handlers in rank_pool(world).run(_read, name):
        assert shapes
        assert kind == "Tensor"
        assert max(value, grad, second) < 1e-12, (value, grad, second)
        assert handlers == ([] if name == "not the rows" else ["sharded_lookup"])


# -- adding ----------------------------------------------------------------------------------------------------------


def _wide(i: T) -> T:
    return i[:, None].expand(-1, F)


def _in_place(name: str) -> Callable[[T, T, T], T]:
    def add(x: T, i: T, s: T) -> T:
        {
            "index_add_": lambda: x.index_add_(0, i, s, alpha=-2.0),
            "scatter_add_": lambda: x.scatter_add_(0, _wide(i), s),
            "index_put_": lambda: x.index_put_((i,), s, accumulate=True),
            "scatter_": lambda: x.scatter_(0, _wide(i), s, reduce="add"),
        }[name]()
        return x  # what it returns is dropped

    return add


ADDS: dict[str, Callable[[T, T, T], T]] = {
    **{n: _in_place(n) for n in ("index_add_", "scatter_add_", "index_put_")},
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "scatter_add": lambda x, i, s: torch.scatter_add(x, 0, _wide(i), s),
    "scatter_reduce": lambda x, i, s: torch.scatter_reduce(x, 0, _wide(i), s, "sum"),
    "index_put": lambda x, i, s: x.index_put((i, torch.tensor(1)), s[:, 0], accumulate=True),
    "index_reduce-free columns": lambda x, i, s: x.scatter_add(0, i[:, None], s[:, :1]),
}
E = 9


def _add(name: str) -> tuple[str, float, float, float, bool, list[str]]:
    add, meta = ADDS[name], directory()
    size, rank = meta.mesh.size, meta.mesh.rank
    start = random(N, F, seed=1)

    def entries(x: T, r: int) -> T:  # what rank r adds, made from rows that it looks up
        return torch.tanh(x[wanted(r, (E,), 30)]) * (1.0 + r)

    def whole(x: T) -> T:
        out = start.clone()
        for r in range(size):
            out = add(out, wanted(r, (E,)), entries(x, r))
        return out

    owned = random(N, F)[meta.ids].requires_grad_()
    x = shard(owned, meta)
    dest = shard(start[meta.ids], meta)
    with DispatchTrace() as trace, collect_exchanges() as exchanged:
        out = add(dest, wanted(rank, (E,)), entries(x, rank))
    grad, second = derivatives(out, owned, exchanged, random(N, F, seed=9)[meta.ids])
    ref_grad, ref_second = reference(lambda t: (whole(t) ** 3).sum(), random(N, F, seed=9))
    return (
        type(out).__name__,
        gap(out, whole(random(N, F))[meta.ids]),
        gap(grad, ref_grad[meta.ids]),
        gap(second, ref_second[meta.ids]),
        (out is dest) == name.endswith("_"),
        [r.handler for r in trace.handled],
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ADDS)
def test_adding_by_global_id(rank_pool: Pool, world: int, name: str) -> None:
    for kind, value, grad, second, same, handlers in rank_pool(world).run(_add, name):
        assert kind == "ShardTensor"
        assert max(value, grad, second) < 1e-11, (value, grad, second)
        assert same
        assert handlers == ["sharded_lookup", "sharded_scatter"]


def _segments() -> tuple[float, float]:
    meta = directory()
    system = torch.arange(N) % 3
    start = random(3, F, seed=8)
    x = shard(
        random(N, F)[meta.ids], meta, Rules(storage=StorageKind.SHARDED, system_reductions=True), n_systems=3
    )
    out = (
        x.new_zeros(3, F).copy_(start)
        if len(meta.ids) != 3
        else ShardTensor.promote(start.clone(), x, RowKind.SEGMENTS)
    )
    out.index_add_(0, system[meta.ids], x)
    local = torch.zeros(3, F, dtype=torch.float64).index_add(0, system[meta.ids], x.to_local())
    return gap(out, start.index_add(0, system, random(N, F))), gap(
        total(local), random(N, F).new_zeros(3, F).index_add(0, system, random(N, F))
    )


@pytest.mark.parametrize("world", WORLDS)
def test_rows_are_summed_by_segment_once(rank_pool: Pool, world: int) -> None:
    for reduced, local in rank_pool(world).run(_segments):
        assert max(reduced, local) < 1e-12


def _without_entries() -> float:
    """Rank 1 reads nothing and makes nothing of what it holds; the collected outputs keep it in the adjoints."""
    meta = directory()
    owned = random(N, F)[meta.ids].requires_grad_()
    index = torch.arange(N)[: 0 if meta.mesh.rank else N]
    with collect_exchanges() as exchanged:
        x = shard(owned, meta)
        out = torch.zeros_like(x).index_add(0, index, x[index] ** 2)
    share = (out.to_local() * (0.0 if meta.mesh.rank else 1.0)).sum() + sum(
        t.reshape(-1)[:0].sum() for t in exchanged
    )
    (grad,) = torch.autograd.grad(share, owned)
    return gap(grad, 2.0 * owned.detach() * (0.0 if meta.mesh.rank else 1.0))


def test_a_rank_without_entries_takes_part_in_the_adjoints(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(_without_entries, timeout=30)) < 1e-14


def _open_on_one_rank() -> str:
    meta = directory()  # 5 rows on the rank that has as many segments as rows
    segments = len(share(2, 1))
    x = ShardTensor.wrap(random(N, F)[meta.ids], spec=SPEC, gather_meta=meta, n_systems=segments)
    return caught(lambda: x[torch.tensor([0])])


def test_rows_that_could_be_segments_on_one_rank_are_an_error_on_all(rank_pool: Pool) -> None:
    for said in rank_pool(2).run(_open_on_one_rank, timeout=30):
        assert said.startswith("SpecError: rank 1: ")
        assert "as many segments" in said


# -- padding, wrong ids, plans ---------------------------------------------------------------------------------------


def _padding() -> list[float]:
    meta = directory()
    mine = wanted(meta.mesh.rank, (20,), ids=N + 1)
    extended = torch.cat([random(N, F), torch.zeros(1, F, dtype=torch.float64)])
    x = shard(random(N, F)[meta.ids], meta)
    out = torch.zeros_like(x).index_add_(0, mine, torch.ones(20, F, dtype=torch.float64))
    hits = torch.zeros(N + 1, dtype=torch.float64)
    for r in range(meta.mesh.size):
        hits += torch.bincount(wanted(r, (20,), ids=N + 1), minlength=N + 1)
    return [
        gap(x[mine], extended[mine]),
        gap(x[torch.full((4,), N)], torch.zeros(4, F, dtype=torch.float64)),
        gap(out, hits[meta.ids][:, None].expand(-1, F)),
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_padding_reads_zero_and_writes_nowhere(rank_pool: Pool, world: int) -> None:
    for errors in rank_pool(world).run(_padding):
        assert max(errors) < 1e-14


def _bad_id(bad: int) -> list[str]:
    """The last rank alone names an id that no row has; afterwards everything still works."""
    meta = directory()
    x = shard(random(N, F)[meta.ids], meta)
    last = meta.mesh.rank == meta.mesh.size - 1
    index = torch.tensor([0, bad if last else 1])
    out = torch.zeros_like(x)
    said = [
        caught(lambda: x[index]),
        caught(lambda: fn.embedding(index, x)),
        caught(lambda: out.index_add_(0, index, torch.ones(2, F, dtype=torch.float64))),
        caught(lambda: x[torch.zeros(2) if last else index.clamp(0, 1)]),
    ]
    return [*said, str(gap(x[index.clamp(0, 1)], random(N, F)[index.clamp(0, 1)]))]


@pytest.mark.parametrize("bad", [-1, N + 1, 2**40])
def test_an_id_out_of_range_is_an_error_on_all_ranks(rank_pool: Pool, bad: int) -> None:
    for *said, afterwards in rank_pool(3).run(_bad_id, bad):
        for message in said[:3]:
            assert message.startswith(
                f"SpecError: rank 2: no row has the global id {bad}; ids are 0 .. {N - 1}"
            )
        assert said[3].startswith("SpecError: rank 2: global ids must be integers, found torch.float32")
        assert float(afterwards) == 0.0


def _build(name: str) -> str:
    mesh = Mesh.from_process_group()
    ids = {
        "twice": [[0, 1, 4], [2, 3, 1]],
        "beyond": [[0, 1, 2], [3, 9, 5]],
        "negative": [[0, 1, 2], [3, -4, 5]],
        "missing": [[0, 1, 2], [3, 5]],
        "float": [[0, 1, 2], [3.0]],
    }[name][mesh.rank]
    return caught(lambda: GatherMetadata.build(mesh, torch.tensor(ids), 6 if name == "missing" else None))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "the global id 1 is there 2 times, on ranks [0, 1]"),
        ("beyond", "rank 1 has a row with the global id 9, but the 6 rows of all ranks have the ids 0 .. 5"),
        ("negative", "rank 1 has a row with the global id -4"),
        ("missing", "rank 1 has a row with"),
        ("float", "rank 1: global ids must be integers"),
    ],
)
def test_a_directory_names_each_row_once(rank_pool: Pool, name: str, message: str) -> None:
    if name == "missing":
        message = "no rank has the row with the global id 4"
    for said in rank_pool(2).run(_build, name):
        assert said.startswith(f"SpecError: {message}")


def _write(how: str, index: T) -> None:
    """Refill an index; torch counts the first kind of write only."""
    new = (int(index[0]) + 1) % N
    if how == "torch":
        index[0] = new
    elif how == "data":
        index.data[0] = new
    else:
        index.numpy()[0] = new


def _plans(how: str) -> list[Any]:
    """How many rows were asked for: a plan serves the same tensor until someone, anywhere, writes to theirs."""
    meta = directory()
    x, counter = shard(random(N, F)[meta.ids], meta), meta.mesh.counter
    index = wanted(meta.mesh.rank, (6,))
    found, counts = [], []
    for step in range(5):
        if step == 2 and meta.mesh.rank == 1:
            _write(how, index)
        if step == 4:
            index = index.clone()  # another tensor, at the address of the old one or not
            gc.collect()
        before = counter.snapshot()
        found.append(gap(x[index], random(N, F)[index]))
        counts.append(counter.since(before).calls.get("lookup", 0))
    return [max(found), counts]


@pytest.mark.parametrize("how", ["torch", "data", "numpy"])
def test_plans_are_kept_for_an_unchanged_index(rank_pool: Pool, how: str) -> None:
    for error, counts in rank_pool(2).run(_plans, how):
        assert error == 0.0
        assert counts == [1, 0, 1, 0, 1]


def _alternating() -> list[bool]:
    """Rank 0 takes turns between two indices while the other has one: plans of different calls don't fit."""
    mesh = Mesh.from_process_group()
    meta = directory(mesh)
    x = shard(torch.arange(N, dtype=torch.float64)[meta.ids], meta)
    other = [i for i in range(N) if i not in meta.ids.tolist()]
    one, two = torch.tensor(other[:2]), torch.tensor(other[3:1:-1])
    if mesh.rank:
        one = two
    return [torch.equal(x[index], index.double()) for index in (one, two, one, one)]


def test_a_kept_plan_is_used_by_all_ranks_or_none(rank_pool: Pool) -> None:
    assert rank_pool(2).run(_alternating) == [[True] * 4] * 2


def test_kept_plans_are_few_and_of_living_tensors() -> None:
    meta = directory(Mesh.single())
    kept = [torch.tensor([i]) for i in range(12)]
    for index in [*kept, *(torch.tensor([1]) for _ in range(3))]:
        meta.plan_for(index)
    assert len(meta._kept) <= 8
    with torch.inference_mode():
        index = torch.tensor([3])
        x = shard(random(N, F)[meta.ids], meta)
        first = x[index]
        index.fill_(4)
        assert torch.equal(torch.stack([first[0], x[index][0]]), random(N, F)[3:5])


def _many_indices() -> tuple[int, int]:
    """Lookups that are planned anew after many other indices: of every id, and of an index that is used in between."""
    meta = directory()
    owned = random(N, F)[meta.ids]
    x, counter = shard(owned, meta), meta.mesh.counter
    used, others = torch.arange(N), [torch.tensor([i % N]) for i in range(12)]
    meta.full_gather(owned)
    x[used]
    again = 0
    for other in others:
        x[other]
        before = counter.snapshot()
        x[used]
        again += counter.since(before).calls.get("lookup", 0)
    before = counter.snapshot()
    meta.full_gather(owned)
    return again, counter.since(before).calls.get("lookup", 0)


def test_plans_in_use_outlast_many_other_indices(rank_pool: Pool) -> None:
    assert rank_pool(2).run(_many_indices) == [(0, 0)] * 2


# -- the whole ---------------------------------------------------------------------------------------------------------


def _whole() -> tuple[list[Any], list[float], list[int]]:
    meta = directory()
    owned = random(N, F)[meta.ids].requires_grad_()
    full = meta.full_gather(owned)
    mine = random(N, F, seed=20 + meta.mesh.rank)
    (grad,) = torch.autograd.grad((full[:-1] ** 2 * mine).sum(), owned)
    weights = sum(random(N, F, seed=20 + r) for r in range(meta.mesh.size))
    back = meta.slice_owned(full)
    return (
        [tuple(full.shape), tuple(back.shape)],
        [
            gap(full[:-1], random(N, F)),
            float(full[-1].detach().abs().sum()),
            gap(back[:-1], owned.detach()),
            float(back[-1].detach().abs().sum()),
            gap(grad, (2.0 * random(N, F) * weights)[meta.ids]),
        ],
        meta.rank_assignment.tolist(),
    )


@pytest.mark.parametrize("world", WORLDS)
def test_full_gather_and_slice(rank_pool: Pool, world: int) -> None:
    owners = [-1] * N
    for rank in range(world):
        for i in share(world, rank).tolist():
            owners[i] = rank
    for rank, (shapes, errors, assignment) in enumerate(rank_pool(world).run(_whole)):
        assert shapes == [(N + 1, F), (len(share(world, rank)) + 1, F)]
        assert max(errors) < 1e-12
        assert assignment == owners


def _whole_of_shards() -> float:
    meta = directory()
    x = shard(random(N, F)[meta.ids], meta)
    full = meta.full_gather(x)
    return (
        float(type(full) is not T)
        + gap(full[:-1], random(N, F))
        + gap(meta.slice_owned(full)[:-1], x.to_local())
    )


@pytest.mark.parametrize("world", WORLDS)
def test_full_gather_of_a_shard_tensor(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(_whole_of_shards) == [0.0] * world


def test_slice_owned_wants_all_rows() -> None:
    with pytest.raises(SpecError, match="needs the 11 rows of all ranks and padding's"):
        directory(Mesh.single()).slice_owned(torch.zeros(N, F))
