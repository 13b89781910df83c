"""What sharded rows keep, what they refuse, what wrapping takes, and how they travel."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, SpecError
from nvdd_core.tensor import (
    DispatchTrace,
    GatherMetadata,
    ParticleHaloConfig,
    RowKind,
    ShardTensor,
    StorageKind,
    loading_onto,
)
from tests._spawn import RankPool
from tests.tensor._rows import caught, random
from tests.tensor._sharded import ORDER, SPEC, F, N, T, directory, gap, shard, share, wanted

Pool = Callable[..., RankPool]
# -- what is kept and what is refused, in one process ---------------------------------------------------------------


@pytest.fixture
def meta() -> GatherMetadata:
    return directory(Mesh.single())


@pytest.fixture
def x(meta: GatherMetadata) -> ShardTensor:
    return shard(random(N, F), meta, n_systems=2)


REFUSED: dict[str, Callable[[ShardTensor], Any]] = {
    "integer": lambda x: x[3],
    "integer and column": lambda x: x[3, 1],
    "slice": lambda x: x[:4],
    "slice of all": lambda x: x[:N],
    "step": lambda x: x[::2],
    "boolean": lambda x: x[True],
    "select": lambda x: x.select(0, 2),
    "narrow": lambda x: torch.narrow(x, 0, 1, 2),
    "take": lambda x: torch.take(x, torch.tensor([4])),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([4])),
    "set integer": lambda x: x.__setitem__(3, 0.0),
    "set ids": lambda x: x.__setitem__(torch.tensor([1, 2]), 0.0),
    "set slice": lambda x: x.__setitem__(slice(0, 2), 0.0),
    "index_put": lambda x: x.index_put_((torch.tensor([1]),), torch.zeros(1, F, dtype=torch.float64)),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([1]), torch.zeros(1, F, dtype=torch.float64)),
    "index_fill": lambda x: x.index_fill_(0, torch.tensor([1]), 0.0),
    "scatter": lambda x: x.scatter(0, torch.tensor([[1]]), 0.0),
    "amax": lambda x: x.scatter_reduce(0, torch.zeros(1, F).long(), torch.zeros(1, F).double(), "amax"),
    "max_norm": lambda x: fn.embedding(torch.tensor([1]), x, max_norm=1.0),
    "embedding_bag": lambda x: fn.embedding_bag(torch.tensor([[1]]), x),
    "aten slice": lambda x: torch.ops.aten.slice(x, 0, 0, 3),
    "aten slice default": lambda x: torch.ops.aten.slice.Tensor(x),
    "split": lambda x: x.split(4),
    "torch.split": lambda x: torch.split(x, [4, N - 4], dim=-2),
    "chunk": lambda x: torch.chunk(x, 2),
    "tensor_split": lambda x: x.tensor_split(3),
    "vsplit": lambda x: torch.vsplit(x, [4]),
    "unbind": lambda x: x.unbind(),
    "iteration": lambda x: list(x),
    "reversed": lambda x: reversed(x),
    "flip": lambda x: x.flip(1, 0),
    "torch.flip": lambda x: torch.flip(x, dims=(-2,)),
    "roll": lambda x: torch.roll(x, 1, 0),
    "roll all": lambda x: x.roll(1),
    "rot90": lambda x: torch.rot90(x),
    "sort": lambda x: x.sort(0),
    "argsort": lambda x: torch.argsort(x, dim=0, stable=True),
    "topk": lambda x: torch.topk(x, 2, dim=0),
    "cumsum": lambda x: x.cumsum(0),
    "numpy's word": lambda x: x.cumsum(axis=0),
    "diff": lambda x: torch.diff(x, dim=0),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 2),
    "select_copy": lambda x: torch.select_copy(x, 0, 2),
    "select_scatter": lambda x: x.select_scatter(torch.zeros(F).double(), 0, 1),
    "slice_scatter": lambda x: x.slice_scatter(torch.zeros(2, F).double(), 0, 1, 3),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "view": lambda x: x.view(-1, 3)[torch.tensor([4])],
    "view of all": lambda x: x.view(N * F),
    "reshape": lambda x: torch.reshape(x, shape=(-1,)),
    "view_as": lambda x: x.view_as(torch.zeros(F, N)),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (1, N)),
    "unsafe put": lambda x: torch.ops.aten._unsafe_index_put(
        x, [torch.tensor([1])], torch.zeros(1, F).double(), True
    ),
    "rows into rows": lambda x: x.index_add(0, torch.arange(N), x.clone()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(x: ShardTensor, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        REFUSED[name](x)
    assert "x.to_local()" in str(caught.value) or name in ("amax", "max_norm")
    assert torch.equal(x.to_local(), random(N, F))


LOCAL: dict[str, Callable[[T], T]] = {
    "mask": lambda x: x[x[:, 0] > 0],
    "columns": lambda x: x[:, 1],
    "ellipsis": lambda x: x[..., 1:],
    "all": lambda x: x[:],
    "column index": lambda x: x[:, torch.tensor([2, 0])],
    "other dim": lambda x: x.index_select(1, torch.tensor([1])),
    "gather columns": lambda x: torch.gather(x, 1, torch.zeros(N, 1, dtype=torch.int64)),
    "add": lambda x: x + 1.0,
    "sum": lambda x: x.sum(0),
    "select column": lambda x: x.select(1, 0),
    "cat": lambda x: torch.cat([x, x], 1),
    "split columns": lambda x: torch.cat(x.split(2, -1)[::-1], 1),
    "unbind columns": lambda x: x.unbind(1)[2],
    "flip columns": lambda x: x.flip(-1),
    "roll columns": lambda x: x.roll(1, 1),
    "sort columns": lambda x: x.sort().values,
    "cumsum columns": lambda x: torch.cumsum(x, dim=1),
    "view with the rows": lambda x: x.view(x.shape[0], F, -1),
    "reshape with the rows": lambda x: x.reshape((N, 1, F)),
    "other dtype": lambda x: x.view(torch.int64),
    "flatten columns": lambda x: x.view(x.shape[0], F, 1).flatten(1) + x.flatten(1),
}


@pytest.mark.parametrize("name", LOCAL)
def test_operations_without_ids_are_local_and_give_plain_tensors(x: ShardTensor, name: str) -> None:
    found = LOCAL[name](x)
    assert type(found) is torch.Tensor
    assert torch.equal(found, LOCAL[name](random(N, F)))


def test_writing_whole_and_by_mask_is_local(x: ShardTensor) -> None:
    x[:, 0] = 1.0
    x[x.to_local()[:, 1] > 0] = 2.0
    x[...] += 1.0
    x.index_put_((x.to_local()[:, 1] < 0,), torch.tensor(1.0, dtype=torch.float64), accumulate=True)
    t = random(N, F)
    t[:, 0] = 1.0
    t[t[:, 1] > 0] = 2.0
    t += 1.0
    t[t[:, 1] < 0] += 1.0
    assert type(x) is ShardTensor
    assert torch.equal(x.to_local(), t)


def same(a: T, b: ShardTensor) -> bool:
    return type(a) is ShardTensor and all(getattr(a, n) == getattr(b, n) for n in ShardTensor._FIELDS)


KEEPS: dict[str, Callable[[ShardTensor], T]] = {
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(N, 2),
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.int64),
    "to device": lambda x: x.to("cpu", copy=True),
    "parameter": torch.nn.Parameter,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "in place": lambda x: x.add_(1.0),
}


@pytest.mark.parametrize("name", KEEPS)
def test_keeps_class_and_fields(x: ShardTensor, name: str) -> None:
    assert same(KEEPS[name](x), x)


def test_parameters_and_state(x: ShardTensor, meta: GatherMetadata) -> None:
    table = torch.nn.Embedding(N, F, _weight=torch.nn.Parameter(x))
    other = torch.nn.Embedding(N, F, _weight=torch.nn.Parameter(torch.zeros_like(x)))
    assert same(table.state_dict()["weight"], x)
    other.load_state_dict(table.state_dict())
    assert same(other.weight, x)
    found = other(torch.tensor([[1, 4]]))
    assert torch.equal(found[0], random(N, F)[ORDER.argsort()[[1, 4]]])
    found.sum().backward()
    assert float(other.weight.grad.sum()) == 2.0 * F  # type: ignore[union-attr]


# -- wrap ------------------------------------------------------------------------------------------------


def test_wrap_infers_owned_rows_and_refuses_misfits(meta: GatherMetadata) -> None:
    t = random(N, F)
    x = ShardTensor.wrap(t, spec=None, gather_meta=meta)
    assert (x.kind, x.rules.storage, x.row_layout) == (RowKind.OWNED, StorageKind.HALO, meta)
    assert x.data_ptr() == t.data_ptr()
    with pytest.raises(SpecError, match="fits none"):
        ShardTensor.wrap(t[:4], spec=SPEC, gather_meta=meta)
    with pytest.raises(SpecError, match="kind 'local'"):
        shard(t, meta, kind=RowKind.LOCAL)
    with pytest.raises(SpecError, match="different meshes"):
        shard(t, meta, config=ParticleHaloConfig(Mesh.single(), 1.0))


def test_rows_that_could_be_segments_are_not_looked_up(meta: GatherMetadata) -> None:
    x = ShardTensor.wrap(random(N, F), spec=SPEC, gather_meta=meta, n_systems=N)
    for call in (
        lambda: x[torch.tensor([1])],
        lambda: x.index_add(0, torch.tensor([1]), torch.zeros(1, F).double()),
    ):
        with pytest.raises(SpecError, match=r"fits its 11 rows and as many segments.*kind="):
            call()
    segments = ShardTensor.promote(random(N, F), x, RowKind.SEGMENTS)
    assert torch.equal(segments[torch.tensor([1])], random(N, F)[1:2])  # every rank holds all segments


def test_trace_shows_lookups_and_bytes(x: ShardTensor) -> None:
    with DispatchTrace() as trace:
        x[torch.tensor([1])]
        torch.zeros_like(x).index_add_(0, torch.tensor([1]), torch.zeros(1, F, dtype=torch.float64))
    assert [r.handler for r in trace.records] == ["sharded_lookup", "allocate_like", "sharded_scatter"]


def _traced_bytes() -> list[dict[str, int]]:
    meta = directory()
    x = shard(random(N, F)[meta.ids], meta)
    index = torch.arange(N)
    x[index]
    with DispatchTrace() as trace:
        x[index]
        torch.zeros_like(x).index_add_(0, index, random(N, F))
    return [dict(r.moved) for r in trace.records]


def test_trace_counts_bytes_over_ranks(rank_pool: Pool) -> None:
    """A kept plan costs one vote of four integers and the rows that move."""
    for rank, (read, _, add) in enumerate(rank_pool(2).run(_traced_bytes)):
        n = len(share(2, rank))
        assert read == {"all_gather": 4 * 8, "exchange": n * F * 8}
        assert add == {"all_gather": 4 * 8, "reverse": (N - n) * F * 8}


# -- travelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickles_keep_rows_and_alignment(x: ShardTensor, how: str) -> None:
    pair = {"x": x, "z": torch.zeros_like(x)}
    back = through(pair, how)
    assert torch.equal(back["x"], x)
    assert back["x"]._gather_meta is back["z"]._gather_meta
    assert type(back["x"] + back["z"]) is torch.Tensor
    assert torch.equal(back["x"] + x, 2.0 * x.to_local())  # copies are the same distribution
    assert torch.equal(back["x"][torch.tensor([4])], x[torch.tensor([4])])


def through(value: Any, how: str) -> Any:
    if how == "pickle":
        return pickle.loads(pickle.dumps(value))
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def _travelled() -> tuple[str, float, float]:
    meta = directory()
    x = shard(random(N, F)[meta.ids], meta)
    data = pickle.dumps(x)
    with loading_onto(meta.mesh):
        y = pickle.loads(data)
    index = wanted(meta.mesh.rank, (5,))
    both = y + x
    return (
        caught(lambda: pickle.loads(data)),
        gap(y[index], random(N, F)[index]),
        gap(both, 2.0 * x.to_local()),
    )


def test_pickles_are_bound_to_a_mesh(rank_pool: Pool) -> None:
    for rank, (unbound, read, summed) in enumerate(rank_pool(2).run(_travelled)):
        assert unbound.startswith(
            f"{DistributedError.__name__}: this ShardTensor belongs to rank {rank} of 2"
        )
        assert read == summed == 0.0


def _given(x: ShardTensor) -> tuple[ShardTensor, T]:
    return x, x[torch.tensor([2, N])]


def test_round_trip_through_a_worker(rank_pool: Pool, x: ShardTensor) -> None:
    ((back, found),) = rank_pool(1).run(_given, x)
    assert type(back) is ShardTensor
    assert torch.equal(back.to_local() + x, 2.0 * x.to_local())
    assert torch.equal(found, x[torch.tensor([2, N])])
