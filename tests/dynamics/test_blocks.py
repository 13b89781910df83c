"""Rows come to rank 0 in id order, a block at a time, whatever the ranks were."""

from __future__ import annotations

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import iter_row_blocks
from nvdd_core.errors import DistributedError


def _fields(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every dtype and shape that travels; NaN and -0.0 must keep their bits."""
    x = ids.to(torch.float64)
    return {
        "vector": torch.stack([x / 3.0, -x * 0.0, torch.full_like(x, torch.nan)], dim=1),
        "scalar": x.sqrt(),
        "single": (x / 7.0).to(torch.float32),
        "matrix": x[:, None, None] * torch.eye(2),
        "flag": ids % 3 == 0,
        "small": (ids % 100).to(torch.int8),
        "nothing": torch.empty((len(ids), 0)),
    }


def _gather(
    n: int, block_rows: int, mesh: Mesh, ids: torch.Tensor
) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    blocks = iter_row_blocks(mesh, ids, _fields(ids), n, block_rows)
    return [(block.start, block.stop, dict(block.fields)) for block in blocks]


def _check(blocks: list[tuple[int, int, dict[str, torch.Tensor]]], n: int, block_rows: int) -> None:
    assert [start for start, _, _ in blocks] == list(range(0, n, block_rows))
    for start, stop, fields in blocks:
        assert stop == min(n, start + block_rows)
        for name, expected in _fields(torch.arange(start, stop)).items():
            assert fields[name].dtype == expected.dtype
            assert fields[name].shape == expected.shape
            assert fields[name].numpy().tobytes() == expected.numpy().tobytes(), name


@pytest.mark.parametrize("n", [0, 1, 8, 9, 100])
@pytest.mark.parametrize("block_rows", [1, 4, 1000])
def test_one_rank(n: int, block_rows: int) -> None:
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    _check(_gather(n, block_rows, Mesh.single(), ids), n, block_rows)


def _on_rank(n: int, block_rows: int, owners: str):
    mesh = Mesh.from_process_group()
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    if owners == "spread":
        ids = ids[mesh.rank :: mesh.size]
    else:
        ids = ids if mesh.rank == mesh.size - 1 else ids[:0]
    return _gather(n, block_rows, mesh, ids)


@pytest.mark.parametrize(("n", "block_rows"), [(101, 16), (5, 2), (2, 100)])
@pytest.mark.parametrize("owners", ["spread", "all on the last rank"])
def test_three_ranks(rank_pool, n: int, block_rows: int, owners: str) -> None:
    first, *others = rank_pool(3).run(_on_rank, n, block_rows, owners)
    _check(first, n, block_rows)
    assert others == [[], []]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2, 2], "row id 2 occurs twice"),
        ([0, 1, 2], "found 3 on all ranks together, expected 4"),
        ([0, 1, 2, 3, 3], "found 5 on all ranks together, expected 4"),
        ([0, 1, 2, 9], "found 3 on all ranks together, expected 4"),
        ([0, 1, 2, 3, 9], "5 rows on all ranks together, expected 4"),
        ([0, 1, 2, 3, -1], "5 rows on all ranks together, expected 4"),
    ],
)
def test_lost_or_doubled_rows(ids: list[int], message: str) -> None:
    rows = torch.tensor(ids)
    with pytest.raises(DistributedError, match=message):
        list(iter_row_blocks(Mesh.single(), rows, {"x": rows}, 4))
