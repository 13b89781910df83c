"""Neighbour lists against ASE's on hard cells, and the list's forms against each other."""

from __future__ import annotations

import weakref

import ase
import numpy as np
import pytest
import torch
from ase.neighborlist import neighbor_list
from hypothesis import given, settings, strategies as st
from scipy.spatial import cKDTree

from nvdd_core.graph import NeighborList, build_neighbors, pairs
from nvdd_core.partition import Box, Frame, segment_bounds
from tests.cases import oracle


def build(
    pos, cell, pbc, cutoff: float, n_owned: int | None = None
) -> tuple[NeighborList, torch.Tensor, Frame]:
    """List the neighbours of the first rows, as a rank that owns them would."""
    points = torch.as_tensor(np.asarray(pos, float))
    segment = torch.zeros(len(points), dtype=torch.int64)
    box = Box.from_cells(torch.as_tensor(np.asarray(cell, float))[None], torch.tensor([list(pbc)]))
    frame = Frame.from_bounds(box, *segment_bounds(box.fractional(points, segment), segment, 1))
    frac, offset = frame.fold(points, segment)
    folded = points - offset
    n = len(points) if n_owned is None else n_owned
    return build_neighbors(folded, frac, segment, frame, n, cutoff), folded, frame


def vectors(edges: NeighborList, folded: torch.Tensor, frame: Frame) -> torch.Tensor:
    index, shifts = edges.coo()
    return folded[index[0]] + shifts.double() @ frame.box.cell[0] - folded[index[1]]


def as_set(receiver, sender, vector) -> list[tuple[float, ...]]:
    rows = np.column_stack([receiver, sender, np.round(vector, 6) + 0.0])
    return sorted(map(tuple, rows))


def assert_equals_ase(pos, cell, pbc, cutoff: float) -> None:
    edges, folded, frame = build(pos, cell, pbc, cutoff)
    index, _ = edges.coo()
    found = as_set(index[1].numpy(), index[0].numpy(), vectors(edges, folded, frame).numpy())
    # ASE wants a volume along open axes too
    full = np.where(np.asarray(pbc)[:, None], cell, frame.box.cell[0].numpy() * 10)
    atoms = ase.Atoms(f"H{len(pos)}", positions=pos, cell=full, pbc=pbc)
    i, j, d = neighbor_list("ijD", atoms, cutoff)
    assert found == as_set(i, j, d)
    assert edges.n_edges == len(i)


HARD = {
    "crystal": (*oracle.fcc(2, 2, 2), (True,) * 3, 2.5),
    "smaller than the cutoff": (*oracle.fcc(1, 1, 1), (True,) * 3, 2.5),
    "triclinic": (*oracle.triclinic(), (True,) * 3, 2.5),
    "left-handed": (oracle.triclinic()[0], oracle.triclinic()[1][[1, 0, 2]], (True,) * 3, 2.5),
    "slab": (*oracle.fcc(2, 2, 2), (True, True, False), 2.5),
    "wire": (*oracle.fcc(2, 2, 2), (False, False, True), 2.5),
    "slab with a zero vector": (
        oracle.fcc(2, 2, 2)[0],
        np.diag([3.2, 3.2, 0.0]),
        (True, True, False),
        2.5,
    ),
    "cluster": (oracle.fcc(2, 2, 2)[0], np.zeros((3, 3)), (False,) * 3, 2.5),
    "unfolded": (
        oracle.fcc(2, 2, 2)[0] + oracle.unfolded_shifts(32) @ oracle.fcc(2, 2, 2)[1],
        oracle.fcc(2, 2, 2)[1],
        (True,) * 3,
        2.5,
    ),
    "a thousand cells away": (
        oracle.fcc(2, 2, 2)[0] + [3200.0, -6400.0, 0],
        oracle.fcc(2, 2, 2)[1],
        (True,) * 3,
        2.5,
    ),
    "on the boundary": (
        np.array([[0.0, 0, 0], [4.0, 0, 0], [2.0, 2, 2], [4, 4, 4]]),
        4 * np.eye(3),
        (True,) * 3,
        3.6,
    ),
    "needle cell": (
        np.array([[0.1, 0, 0.0]]),
        np.array([[1.0, 0, 0], [0.9, 0.2, 0], [0, 0, 9.0]]),
        (True,) * 3,
        1.97,
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_against_ase(name: str) -> None:
    assert_equals_ase(*HARD[name])


@settings(max_examples=60)
@given(st.data())
def test_against_brute_force_in_random_cells(data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n = data.draw(st.integers(1, 12))
    pbc = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    cell = rng.normal(size=(3, 3)) * 3
    while abs(np.linalg.det(cell / np.linalg.norm(cell, axis=1)[:, None])) < 0.05:
        cell = rng.normal(size=(3, 3)) * 3
    pos = rng.normal(size=(n, 3)) * data.draw(st.sampled_from([1.0, 10.0]))
    cutoff = data.draw(st.floats(0.5, 4.0))
    edges, folded, frame = build(pos, cell, pbc, cutoff)
    index, _ = edges.coo()
    full = np.where(np.asarray(pbc)[:, None], cell, frame.box.cell[0].numpy())
    i, j, d = oracle.directed_edges(pos, full, pbc, cutoff)
    found = as_set(index[1].numpy(), index[0].numpy(), vectors(edges, folded, frame).numpy())
    assert found == as_set(i, j, d)


def test_edges_of_parts_add_up() -> None:
    """Split rows in any way: each part lists the edges into its own rows, together the whole list."""
    pos, cell = oracle.fcc(2, 2, 3)
    whole = build(pos, cell, (True,) * 3, 2.5)[0].n_edges
    order = np.random.default_rng(3).permutation(len(pos))
    total = 0
    for part in np.array_split(order, 5):
        rest = np.setdiff1d(order, part)
        edges, _, _ = build(pos[np.concatenate([part, rest])], cell, (True,) * 3, 2.5, len(part))
        assert int(edges.full().receivers.max()) < len(part)
        assert edges.full().n_edges == edges.n_edges
        total += edges.n_edges
    assert total == whole


def test_forms_agree() -> None:
    edges, folded, frame = build(*HARD["triclinic"][:4])
    full = edges.full()
    assert edges.full() is full  # made once
    assert full.form == "full"
    assert full.n_edges == edges.n_edges == full.senders.shape[0]
    matrix, counts = full.matrix()
    pad = full.n_local + full.image_rows.shape[0]
    assert int(counts.sum()) == full.n_edges
    assert int((matrix != pad).sum()) == full.n_edges
    for row in range(full.n_receivers):
        a, b = full.row_splits[row], full.row_splits[row + 1]
        assert set(matrix[row, : counts[row]].tolist()) == set(full.senders[a:b].tolist())
    assert torch.equal(full.receivers, full.receivers.sort()[0])
    assert bool((vectors(edges, folded, frame).norm(dim=1) < 2.5).all())
    points = full.extend(folded, frame.box.cell, torch.zeros(len(folded), dtype=torch.int64))
    by_extension = points[full.senders.long()] - points[full.receivers.long()]
    assert torch.allclose(by_extension, vectors(edges, folded, frame), atol=1e-12)


def test_dropping_unused_rows_keeps_the_edges() -> None:
    pos, cell = oracle.fcc(4, 1, 1)
    edges = build(pos, cell, (False,) * 3, 1.3, n_owned=4)[0]
    keep = edges.used_rows()
    assert not bool(keep.all())
    small = edges.compact(keep)
    before, after = edges.coo()[0], small.coo()[0]
    names = torch.arange(len(pos))[keep]
    assert sorted(map(tuple, names[after].T.tolist())) == sorted(map(tuple, before.T.tolist()))
    assert small.n_local == int(keep.sum())


def test_no_rows_and_no_edges() -> None:
    for n in (0, 1):
        edges, _, _ = build(np.zeros((n, 3)), np.zeros((3, 3)), (False,) * 3, 2.5)
        assert edges.n_edges == 0
        assert edges.coo()[0].shape == (2, 0)
        assert edges.matrix()[0].shape == (n, 0)


@pytest.mark.parametrize("library", ["vesin", "toolkit"])
@pytest.mark.parametrize("n_receivers", [0, 1, 60, 400])
def test_libraries_agree_on_chosen_receivers(library: str, n_receivers: int) -> None:
    """Both backends against brute force, with points of very uneven density."""
    if library == "toolkit":
        pytest.importorskip("nvalchemiops")
    search = {"vesin": pairs.vesin_neighbors, "toolkit": pairs.toolkit_neighbors}[library]
    rng = np.random.default_rng(11)
    pos = np.vstack([rng.random((300, 3)) * 12, rng.random((100, 3)) * 1.5 + 30])
    receivers, senders, splits = search(torch.as_tensor(pos), n_receivers, 1.7)
    i, j, _ = oracle.directed_edges(pos, np.eye(3), (False,) * 3, 1.7)
    right = sorted((a, b) for a, b in zip(i.tolist(), j.tolist(), strict=True) if a < n_receivers)
    assert sorted(zip(receivers.tolist(), senders.tolist(), strict=True)) == right
    assert receivers.dtype == senders.dtype == splits.dtype == torch.int32
    assert torch.equal(splits, pairs.splits_of_receivers(receivers, n_receivers))
    assert torch.equal(receivers, receivers.sort()[0])


@pytest.mark.parametrize(
    ("pbc", "cell"),
    [
        ((False,) * 3, np.zeros((3, 3))),
        ((True, True, False), np.diag([10.0, 10.0, 1.0])),
        ((True,) * 3, np.diag([10.0, 10.0, 2e6])),
        ((True,) * 3, np.array([[3.0, 0, 0], [90, 3, 0], [0, 90, 3]])),
    ],
)
def test_long_thin_extents(pbc, cell) -> None:
    """Few points over a length of a million: libraries divide by zero, the list must not."""
    pos = np.array([[0.0, 0, 0], [1.1, 0, 0], [0, 0, 1e6], [0.3, 0.9, 1e6]])
    edges, folded, frame = build(pos, cell, pbc, 2.5)
    index, _ = edges.coo()
    full = np.where(np.asarray(pbc)[:, None], cell, frame.box.cell[0].numpy())
    if pbc != (True,) * 3 or cell[1, 0] == 0:
        i, j, d = oracle.directed_edges(pos, full, pbc, 2.5)
        found = as_set(index[1].numpy(), index[0].numpy(), vectors(edges, folded, frame).numpy())
        assert found == as_set(i, j, d)
    assert bool((vectors(edges, folded, frame).norm(dim=1) < 2.5).all())


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(
    "extent", [(2000, 2000, 0), (1500, 9000, 3), (4000, 4000, 25), (3e5, 900, 3), (1e7, 1e7, 4), (1e9, 3, 3)]
)
@pytest.mark.parametrize("n", [3, 3000])
def test_wide_thin_extents(n: int, extent: tuple[float, ...], axes: tuple[int, ...]) -> None:
    """vesin has no bins left along a thin axis where there would be too many; pairs are those of a tree."""
    g, span = torch.Generator().manual_seed(n), torch.tensor(extent, dtype=torch.float64)[list(axes)]
    points = torch.rand(n, 3, dtype=torch.float64, generator=g) * span
    points[0], points[1] = 0.0, span
    beside = n // 2
    points[beside + 2 :] = points[2 : n - beside] + (span > 0) * torch.randn(n - beside - 2, 3, generator=g)
    ends = torch.stack(pairs.open_pairs(points, 6.6)).sort(0)[0].T.tolist()
    expected = cKDTree(points.numpy()).query_pairs(6.6)
    assert sorted(map(tuple, ends)) == sorted(expected)
    receivers, senders, _ = pairs.open_neighbors(points, n, 6.6)
    both = {(i, j) for i, j in zip(receivers.tolist(), senders.tolist(), strict=True)}
    assert both == expected | {(j, i) for i, j in expected}


def test_a_long_wire() -> None:
    """More than 1e5 cutoffs without a gap, and not as thin along one axis as along the other."""
    i = torch.arange(110_000, dtype=torch.float64)
    points = torch.stack([i % 2, 6.1 * i, 3.5 * (i % 3)], dim=1)
    ends = torch.stack(pairs.open_pairs(points, 6.6)).sort(0)[0].T.tolist()
    assert sorted(map(tuple, ends)) == sorted(cKDTree(points.numpy()).query_pairs(6.6))


@pytest.mark.parametrize(
    ("n", "n_receivers", "cutoff"), [(900, 60, 2.0), (700, 90, 30.0), (3000, 1100, 1.5), (9, 0, 5.0)]
)
def test_pairs_of_few_receivers(n: int, n_receivers: int, cutoff: float) -> None:
    """The search for receivers in blocks finds what the search among all points does, each pair once."""
    points = 9.0 * torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    found = torch.stack(pairs._block_pairs(points, n_receivers, cutoff)).tolist()
    ends = torch.stack(pairs.open_pairs(points, cutoff)).sort(0)[0].T.tolist()
    assert sorted(zip(*found, strict=True)) == sorted((i, j) for i, j in ends if i < n_receivers)
    assert found[0] == sorted(found[0])


def test_what_is_kept_lives_as_long_as_list_and_user() -> None:
    class User:
        pass

    listed, _, _ = build(*HARD["crystal"])
    first, second = User(), User()
    listed.kept[first], listed.kept[second] = torch.zeros(1), torch.ones(1)
    assert float(listed.kept[second]) == 1.0
    del second
    assert list(listed.kept.keys()) == [first]
    held = weakref.ref(listed.kept[first])
    del listed
    assert held() is None
