"""Boxes, owners, ghosts and migration, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.partition import (
    Bisection,
    Bounds,
    Box,
    Frame,
    Grid,
    IndexBlocks,
    RowPacker,
    Rows,
    ghost_destinations,
    reshard_by_destination,
    segment_bounds,
)
from tests.cases import oracle
from tests.cases.ranks import mesh

SKEW = oracle.triclinic()[1]


def _frame(pos: torch.Tensor, cell, pbc, segment: torch.Tensor | None = None) -> tuple[Frame, torch.Tensor]:
    segment = torch.zeros(len(pos), dtype=torch.int64) if segment is None else segment
    cells = torch.as_tensor(np.asarray(cell, float)).view(-1, 3, 3)
    box = Box.from_cells(cells, torch.tensor([list(pbc)] * len(cells)))
    bounds = segment_bounds(box.fractional(pos, segment), segment, len(cells))
    return Frame.from_bounds(box, *bounds), segment


@pytest.mark.parametrize("pbc", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_completed_cells(pbc) -> None:
    """Open axes get unit vectors perpendicular to the periodic ones and to each other."""
    box = Box.from_cells(torch.as_tensor(SKEW)[None], torch.tensor([pbc]).bool())
    cell = box.cell[0].numpy()
    for k in range(3):
        if pbc[k]:
            assert np.array_equal(cell[k], SKEW[k])
        else:
            others = cell[[m for m in range(3) if m != k]]
            assert abs(np.linalg.norm(cell[k]) - 1) < 1e-14
            assert np.abs(others @ cell[k]).max() < 1e-12
            assert abs(float(box.heights[0, k]) - 1) < 1e-12
    heights = abs(np.linalg.det(cell)) / [
        np.linalg.norm(np.cross(cell[(k + 1) % 3], cell[(k + 2) % 3])) for k in range(3)
    ]
    assert np.allclose(box.heights[0].numpy(), heights, rtol=1e-12)


@pytest.mark.parametrize(
    "cell", [np.zeros((3, 3)), [[1, 0, 0], [2, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [1, 1, 1e-14]]]
)
def test_singular_cells_are_refused(cell) -> None:
    with pytest.raises(InputError, match="singular"):
        Box.from_cells(torch.as_tensor(np.asarray(cell, float))[None], torch.ones(1, 3).bool())


def test_folding() -> None:
    rng = np.random.default_rng(0)
    pos = torch.as_tensor(rng.normal(size=(200, 3)) * 30)
    frame, segment = _frame(pos, SKEW, (True, True, False))
    frac, offset = frame.fold(pos, segment)
    assert bool(((frac[:, :2] >= 0) & (frac[:, :2] <= 1)).all())
    unit = frame.unit(frac, segment)
    assert bool(((unit >= 0) & (unit <= 1)).all())
    turns = offset @ frame.box.inverse[0] - offset[0] @ frame.box.inverse[0]
    assert torch.allclose(turns[:, :2], turns[:, :2].round(), atol=1e-9)
    assert torch.allclose(turns[:, 2], torch.zeros(200, dtype=torch.float64), atol=1e-9)


def _rows(n: int, kind: str) -> Rows:
    rng = np.random.default_rng(n)
    unit = {
        "random": rng.random((n, 3)),
        "plane": np.column_stack([np.full(n, 0.5), rng.integers(0, 3, (n, 2)) / 3.0]),
        "equal": np.full((n, 3), 0.25),
        "corner": rng.random((n, 3)) * 1e-3,
    }[kind]
    return Rows(torch.as_tensor(unit), torch.zeros(n, dtype=torch.int64), torch.arange(n))


@pytest.mark.parametrize("kind", ["random", "plane", "equal", "corner"])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 100])
def test_bisection_balances(kind: str, n_ranks: int, n: int) -> None:
    rows = _rows(n, kind)
    partition = Bisection(n, 1, n_ranks)
    partition.fit(rows, torch.ones(1, 3), Mesh.single())
    counts = torch.bincount(partition.assign(rows), minlength=n_ranks)
    assert int(counts.sum()) == n
    assert len(counts) == n_ranks
    if n >= n_ranks:
        assert int(counts.min()) >= 1
    assert int(counts.max() - counts.min()) <= max(1, int(np.ceil(np.log2(n_ranks))))


def _fit(n: int, n_segments: int) -> torch.Tensor:
    group = mesh()
    rng = np.random.default_rng(1)
    unit, segment = torch.as_tensor(rng.random((n, 3))), torch.as_tensor(rng.integers(0, n_segments, n))
    mine = torch.arange(n) % group.size == group.rank
    partition = Bisection(n, n_segments, 6)
    ids = torch.arange(n)
    partition.fit(Rows(unit[mine], segment[mine], ids[mine]), torch.ones(n_segments, 3), group)
    return partition.assign(Rows(unit, segment, ids))


@pytest.mark.parametrize("n_segments", [1, 5])
def test_bisection_does_not_depend_on_who_holds_the_rows(rank_pool, n_segments: int) -> None:
    alone = _fit(333, n_segments)
    for found in rank_pool(3).run(_fit, 333, n_segments):
        assert torch.equal(found, alone)


def test_grid_and_blocks() -> None:
    rows = _rows(1000, "random")
    owner = Grid((2, 3, 1), 6).assign(rows)
    x = (rows.unit * torch.tensor([2, 3, 1])).long()
    assert torch.equal(owner, x[:, 0] * 3 + x[:, 1])
    assert Grid((1, 1, 2), 2).assign(Rows(torch.ones(1, 3), rows.segment[:1], rows.ids[:1])).tolist() == [1]
    assert torch.bincount(IndexBlocks(1000, 7).assign(rows)).tolist() == [143] * 6 + [142]
    with pytest.raises(InputError, match="6 domains, but there are 4 ranks"):
        Grid((1, 2, 3), 4)


def _ghosts(pbc: tuple[bool, ...], width: float) -> tuple[torch.Tensor, dict[int, set[int]]]:
    group = mesh()
    rng = np.random.default_rng(5)
    pos = torch.as_tensor(rng.random((120, 3)) @ SKEW * 2.0 - 3.0)
    owner = torch.as_tensor(rng.integers(0, group.size, 120))
    near = pos[:, 0].argsort()
    owner[near] = torch.arange(120) * group.size // 120  # domains with a shape
    frame, segment = _frame(pos, 2 * SKEW, pbc)
    mine = (owner == group.rank).nonzero()[:, 0]
    frac, _ = frame.fold(pos[mine], segment[mine])
    bounds = Bounds.gather(frac, segment[mine], 1, group)
    index, splits = ghost_destinations(frac, segment[mine], bounds, frame, width, group)
    parts = index.split(list(splits))
    return owner, {r: set(mine[part].tolist()) for r, part in enumerate(parts)}


@pytest.mark.parametrize("pbc", [(True, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("width", [0.7, 2.5, 9.0])
def test_no_ghost_is_missed(rank_pool, pbc: tuple[bool, ...], width: float) -> None:
    rng = np.random.default_rng(5)
    pos = rng.random((120, 3)) @ SKEW * 2.0 - 3.0
    i, j, _ = oracle.directed_edges(pos, _open_completed(2 * SKEW, pbc), pbc, width)
    answers = rank_pool(4).run(_ghosts, pbc, width)
    owner = answers[0][0].numpy()
    for receiver, sender in zip(i, j, strict=True):
        a, b = owner[sender], owner[receiver]
        assert a == b or sender in answers[a][1][b], (receiver, sender)


def _open_completed(cell, pbc):
    return Box.from_cells(torch.as_tensor(cell)[None], torch.tensor([list(pbc)])).cell[0].numpy()


def _fields(n: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "flag": torch.rand(n, generator=g) > 0.5,
        "x": torch.rand(n, 3, dtype=torch.float64, generator=g),
        "small": torch.rand(n, 2, 2, generator=g),
        "id": torch.arange(n) + 1000 * seed,
        "empty": torch.zeros(n, 0),
        "byte": torch.randint(0, 255, (n,), generator=g, dtype=torch.uint8),
    }


@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_packing_round_trip(n: int) -> None:
    fields = _fields(n, 1)
    packer = RowPacker(fields)
    back = packer.unpack(packer.pack(fields))
    for name, t in fields.items():
        assert back[name].dtype == t.dtype
        assert torch.equal(back[name], t)
    assert {k: v.shape for k, v in packer.empty().items()} == {k: v[:0].shape for k, v in fields.items()}


def _migrate(rule: str) -> tuple[list[int], bool]:
    group = mesh()
    n = 10 * group.rank  # rank 0 starts with nothing
    fields = _fields(n, group.rank)
    to = {
        "last": torch.full((n,), group.size - 1),
        "mixed": torch.arange(n) % group.size,
        "stay": torch.full((n,), group.rank),
    }[rule]
    moved = reshard_by_destination(fields, to, group)
    whole = True
    for row in range(len(moved["id"])):
        seed, k = divmod(int(moved["id"][row]), 1000)
        source = _fields(10 * seed, seed)
        whole &= all(torch.equal(moved[name][row], source[name][k]) for name in source)
    return sorted(moved["id"].tolist()), whole


@pytest.mark.parametrize("rule", ["last", "mixed", "stay"])
def test_rows_arrive_whole(rank_pool, rule: str) -> None:
    answers = rank_pool(4).run(_migrate, rule)
    ids = sorted(i for owned, _ in answers for i in owned)
    assert ids == sorted(k + 1000 * rank for rank in range(4) for k in range(10 * rank))
    assert all(whole for _, whole in answers)
    if rule == "last":
        assert [len(owned) for owned, _ in answers] == [0, 0, 0, 60]
