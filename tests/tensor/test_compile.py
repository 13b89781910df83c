"""O-43: a compiled model step gives what the eager one gives, whatever ShardTensor it meets, and is compiled seldom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.tensor import DispatchTrace, GatherMetadata, RowKind, ScatterMode, ShardTensor, StorageKind
from tests._spawn import RankPool
from tests.tensor._rows import Rules, random, rows, single, spread

T = torch.Tensor
WEIGHT = random(3, 3, seed=2)
MOST = 8


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def head(h: T) -> T:
    """The part that sees plain tensors only, and is worth compiling."""
    return torch.tanh(h @ WEIGHT).pow(2) + torch.sin(h)


def step(x: T, senders: T, receivers: T, edge: T) -> T:
    """One layer, with plain operations before, between and after those on `x`."""
    scale = torch.exp(-edge * edge)
    out = torch.zeros_like(x)
    out.index_add_(0, receivers, torch.tanh(x[senders]) * scale)
    return head(out * 2.0 + x)


def chain(n: int) -> tuple[T, T, T]:
    """Edges from each row to the next, and their lengths."""
    return torch.arange(n), torch.arange(n).roll(-1), random(n, 1, seed=n)


def outcome(model: Callable[..., T], x: T, edges: tuple[T, T, T]) -> tuple[T, T]:
    """Values and gradient of their squares."""
    x = x.detach().clone().requires_grad_()
    out = model(x, *edges)
    (grad,) = torch.autograd.grad((out * out).sum() + 0.0 * x.sum(), x)
    return out.detach().as_subclass(T), grad.as_subclass(T)


def gap(a: Iterable[T], b: Iterable[T]) -> float:
    return max((float((p - q).abs().max()) for p, q in zip(a, b, strict=True) if p.numel()), default=0.0)


def on_one_rank(n: int) -> ShardTensor:
    return rows(random(n, 3, seed=n), single(n), Rules(ScatterMode.REFRESH))


class Counter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self, backend: str = "eager") -> None:
        self.graphs, self.backend = 0, backend

    def __call__(self, graph: Any, example: list[T]) -> Callable[..., Any]:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, example)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_is_right_and_compiled_seldom(backend: str) -> None:
    counter = Counter(backend)
    compiled = torch.compile(step, backend=counter)
    sizes = [108, 109, 864, 0, 1, 2, *range(3, 97)]
    assert len(sizes) == 100
    for n in sizes:
        x, edges = on_one_rank(n), chain(n)
        assert gap(outcome(compiled, x, edges), outcome(step, x, edges)) < 1e-12, n
        if n % 10 == 0:  # without the class
            plain = x.to_local()
            assert gap(outcome(compiled, plain, edges), outcome(step, plain, edges)) < 1e-12, n
    assert 0 < counter.graphs <= MOST


def test_a_step_first_met_with_plain_tensors() -> None:
    """Its graph, which is there by then, is not used for a ShardTensor."""
    counter = Counter()
    compiled = torch.compile(step, backend=counter)
    for n in (5, 6, 7):
        compiled(random(n, 3), *chain(n))
    assert counter.graphs > 0
    for n in (5, 6, 8):
        x, edges = on_one_rank(n), chain(n)
        with DispatchTrace() as trace:
            found = outcome(compiled, x, edges)
        assert gap(found, outcome(step, x, edges)) < 1e-12
        assert "row_scatter" in [r.handler for r in trace.records]
    assert counter.graphs <= MOST


def _kinds(x: T, index: T) -> list[T]:
    """What each operation gives, in a function that could also swallow errors."""
    try:
        buffer = x.new_zeros(x.shape[0])
        sums = torch.zeros(2, 3, dtype=x.dtype)
        sums.index_add_(0, index, x)
    except Exception:
        return []
    return [buffer, sums, x.clone(), x * 2.0]


def test_classes_and_handlers_are_those_of_eager_code() -> None:
    compiled = torch.compile(_kinds, backend=Counter())
    for n in (4, 5, 0):
        x = rows(random(n, 3), single(n), n_systems=2, kind=RowKind.LOCAL)
        index = torch.arange(n) % 2
        found, right = compiled(x, index), _kinds(x, index)
        assert [type(t) for t in found] == [type(t) for t in right] == [ShardTensor, T, ShardTensor, T]
        assert gap(found, right) < 1e-12


def _wraps(t: T, meta: Any) -> T:
    x = ShardTensor.wrap(t * 2.0, spec=Rules(ScatterMode.REFRESH), meta=meta)
    return x.to_local() + torch.zeros_like(x)


def test_wrapping_inside() -> None:
    compiled = torch.compile(_wraps, backend=Counter())
    for n in (3, 4, 5):
        assert torch.equal(compiled(random(n, 3), single(n)), random(n, 3) * 2.0)


def test_fullgraph_is_refused_by_torch() -> None:
    with pytest.raises(Exception, match="handles ShardTensors is not compiled"):
        torch.compile(step, backend=Counter(), fullgraph=True)(on_one_rank(4), *chain(4))


# -- several ranks --------------------------------------------------------------------------------------------------

PLACEMENTS = {
    "halved": [0, 0, 0, 1, 1, 1],
    "another": [1, 0, 1, 0, 0, 1],
    "empty shard": [0, 0, 0, 0, 0, 0],
    "more rows": [0, 1] * 7,
    "odd": [0, 0, 1, 1, 0],
}


def _placed() -> tuple[list[float], int]:
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(step, backend=counter)
    gaps = []
    for _ in range(2):
        for owner in PLACEMENTS.values():
            for ghosts in (None, [[], []]):  # with a halo and without one
                s = spread(owner, ghosts)
                senders, receivers, edge = chain(len(owner))
                mine = torch.isin(receivers, s.owned_ids) & torch.isin(senders, s.ids)
                edges = (s.local_of(senders[mine]), s.local_of(receivers[mine]), edge[mine])
                x = rows(random(len(owner), 3)[s.ids], s.meta, Rules(ScatterMode.REFRESH))
                with torch.no_grad():  # values here, derivatives below
                    found = compiled(x, *edges)
                    whole = step(random(len(owner), 3), *chain(len(owner)))
                    eager = step(x, *edges)
                if ghosts is None:
                    gaps.append(gap([found], [whole[s.ids]]))
                gaps.append(gap([found], [eager]))
                gaps.append(
                    gap(_gradient(compiled, s, edges, len(owner)), _gradient(step, s, edges, len(owner)))
                )
    return gaps, counter.graphs


def _gradient(model: Callable[..., T], s: Any, edges: tuple[T, T, T], n: int) -> list[T]:
    owned = random(n, 3)[s.owned_ids].requires_grad_()
    x = rows(s.meta.plan.forward(owned), s.meta, Rules(ScatterMode.REFRESH))
    out = model(x, *edges)
    (grad,) = torch.autograd.grad((out**2).sum() + 0.0 * owned.sum(), owned)
    return [grad]


def test_other_placements_on_two_ranks(rank_pool: Callable[..., RankPool]) -> None:
    for gaps, graphs in rank_pool(2).run(_placed, timeout=60):
        assert max(gaps) < 1e-12, gaps
        assert graphs <= MOST


def looked_up(x: T, index: T) -> T:
    return head(x[index] * 2.0)


def _sharded() -> tuple[list[float], int]:
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(looked_up, backend=counter)
    mesh = Mesh.from_process_group()
    gaps = []
    for n in range(3, 20):
        ids = torch.arange(n)[torch.arange(n) % (2 if n % 3 else 1) == mesh.rank]  # rank 1 empty at times
        meta = GatherMetadata.build(mesh, ids)
        x = ShardTensor.wrap(
            random(n, 3)[ids], spec=Rules(storage=StorageKind.SHARDED), gather_meta=meta, kind=RowKind.OWNED
        )
        index = torch.arange(n).roll(mesh.rank)[: n // 2]
        gaps.append(gap([compiled(x, index)], [looked_up(random(n, 3), index)]))
    return gaps, counter.graphs


def test_lookups_on_two_ranks(rank_pool: Callable[..., RankPool]) -> None:
    for gaps, graphs in rank_pool(2).run(_sharded, timeout=60):
        assert max(gaps) < 1e-12
        assert graphs <= MOST
