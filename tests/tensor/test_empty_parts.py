"""O-41: exchanges in which rank 1 sends nothing, rank 2 receives nothing and rank 3 does neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nvdd_core.tensor import (
    GatherMetadata,
    RowKind,
    ScatterMode,
    ShardTensor,
    StorageKind,
    collect_exchanges,
)
from tests._spawn import RankPool
from tests.tensor._rows import Rules, rows, spread

OWNER = [0, 0, 1, 1, 2, 2, 3]
GHOSTS: list[list[int]] = [[4], [0, 4, 5], [], []]
N = len(OWNER)


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2 * N).view(N, 2).to(dtype)


def _halo(
    dtype: torch.dtype, mode: ScatterMode
) -> tuple[list[bool], torch.Tensor, list[int], torch.Tensor | None]:
    s = spread(OWNER, GHOSTS)
    floating = dtype.is_floating_point
    owned = values(dtype)[s.owned_ids].requires_grad_(floating)
    with collect_exchanges() as exchanged:
        local = s.meta.plan.forward(owned)
        out = torch.zeros_like(rows(local, s.meta, Rules(mode)))
        out.index_add_(0, torch.arange(s.n_owned), local[: s.n_owned])
    ghosts = out.to_local()[s.n_owned :]
    right = [
        bool(torch.equal(local.detach(), values(dtype)[s.ids])),
        bool(torch.equal(out.detach().to_local(), values(dtype)[s.ids])),
        ghosts.dtype == dtype,
        ghosts.shape == (len(GHOSTS[s.mesh.rank]), 2),
    ]
    grad = None
    if floating:  # of the ghosts' sum alone: a row counts once for every copy that was sent of it
        share = ghosts.sum() + sum(t.reshape(-1)[:0].sum() for t in exchanged) + 0.0 * local.sum()
        (grad,) = torch.autograd.grad(share, owned)
    return right, s.owned_ids, list(s.meta.plan.send_splits), grad


@pytest.mark.parametrize("mode", [ScatterMode.REFRESH, ScatterMode.HALO_CORRECTION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_halo(rank_pool: Callable[..., RankPool], dtype: torch.dtype, mode: ScatterMode) -> None:
    answers = rank_pool(4).run(_halo, dtype, mode, timeout=10)
    assert [sum(sent) for _, _, sent, _ in answers] == [1, 0, 3, 0]
    copies = torch.bincount(torch.tensor([i for ids in GHOSTS for i in ids]), minlength=N)
    for right, ids, _, grad in answers:
        assert all(right), right
        if dtype.is_floating_point:
            assert grad is not None
            assert grad.dtype == dtype
            assert torch.equal(grad, copies[ids].to(dtype)[:, None].expand(-1, 2))


def _lookups(dtype: torch.dtype) -> tuple[list[bool], torch.Tensor, torch.Tensor | None]:
    s = spread(OWNER, GHOSTS)
    meta = GatherMetadata.build(s.mesh, s.owned_ids)
    floating = dtype.is_floating_point
    owned = values(dtype)[s.owned_ids].requires_grad_(floating)
    x = ShardTensor.wrap(owned, spec=Rules(storage=StorageKind.SHARDED), gather_meta=meta, kind=RowKind.OWNED)
    index = torch.tensor(GHOSTS[s.mesh.rank], dtype=torch.int64)
    with collect_exchanges() as exchanged:
        found = x[index]
        home = torch.zeros_like(x).index_add_(0, index, found)
    copies = torch.bincount(torch.tensor([i for ids in GHOSTS for i in ids]), minlength=N)
    right = [
        bool(torch.equal(found.detach(), values(dtype)[index])),
        found.dtype == dtype,
        found.shape == (len(index), 2),
        bool(torch.equal(home.detach().to_local(), (values(dtype) * copies[:, None].to(dtype))[s.owned_ids])),
    ]
    grad = None
    if floating:
        share = home.to_local().sum() + sum(t.reshape(-1)[:0].sum() for t in exchanged) + 0.0 * owned.sum()
        (grad,) = torch.autograd.grad(share, owned)
    return right, copies[s.owned_ids], grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_lookups(rank_pool: Callable[..., RankPool], dtype: torch.dtype) -> None:
    for right, copies, grad in rank_pool(4).run(_lookups, dtype, timeout=10):
        assert all(right), right
        if dtype.is_floating_point:
            assert grad is not None
            assert torch.equal(grad, copies.to(dtype)[:, None].expand(-1, 2))
