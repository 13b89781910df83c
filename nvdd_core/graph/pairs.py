"""Pair search among points in open space, by field libraries.

`open_pairs` returns each pair closer than the cutoff once, `receiver_pairs` those of them that have one of the first
points as an end; `open_neighbors` returns every point near each of the first ones. Periodicity never reaches a
library: `neighbors` lists periodic images as points of their own, so cells that are tiny, huge, skewed, left-handed or
singular along an open axis are all the same case here.

vesin is the default. On a GPU nvalchemi-toolkit-ops takes its place for many points, where it is installed: it
searches for chosen points only and is several times faster at a million.

Layer: graph.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache

import torch
from vesin import NeighborList as VesinNeighborList

from nvdd_core.errors import InputError

_OPEN_BOX = torch.zeros(3, 3, dtype=torch.float64)
_MANY_POINTS = 50_000
_SMALL_BLOCK, _LARGE_BLOCK = 32, 1024
_FEW = 4
"""Points for each receiver above which most pairs of all points would be found for nothing."""
_LONG = 1e3
"""Extent in cutoffs above which gaps are looked for."""
_VESIN_BINS = 1e5
"""Bins that vesin makes at most, each a cutoff wide or wider."""


def open_pairs(points: torch.Tensor, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every pair of points closer than `cutoff`, once, in no particular order.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
    cutoff : float

    Returns
    -------
    first, second : Tensor, shape (pairs,), int32
    """
    return _vesin(_without_gaps(points, cutoff), cutoff, full=False)


def receiver_pairs(
    points: torch.Tensor, n_receivers: int, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every pair closer than `cutoff` that has one of the first points as an end, once.

    Where the cutoff is long against the extent of the receivers, nearly all points are images and ghosts, and so are
    both ends of nearly all pairs; then receivers are searched for themselves, a block at a time.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
    n_receivers : int
    cutoff : float

    Returns
    -------
    first, second : Tensor, shape (pairs,), int32
        The first end is the lower one, so it is a receiver.
    """
    if not points.is_cuda and points.shape[0] > _FEW * n_receivers:
        return _block_pairs(points, n_receivers, cutoff)
    first, second = open_pairs(points, cutoff)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    keep = (low < n_receivers).nonzero()[:, 0]
    return low.index_select(0, keep), high.index_select(0, keep)


def _block_pairs(points: torch.Tensor, n_receivers: int, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `receiver_pairs` by comparing small blocks of receivers with all points near their bounding box.

    Those are looked for among the points near a large block, so that not every small one goes through all points.
    """
    columns, limit = points.t().contiguous(), cutoff * cutoff
    none = torch.zeros(0, dtype=torch.int32, device=points.device)
    first, second = [none], [none]
    for large_start in range(0, n_receivers, _LARGE_BLOCK):
        large_stop = min(large_start + _LARGE_BLOCK, n_receivers)
        around = _near(columns, columns[:, large_start:large_stop], limit)
        theirs = columns[:, around]
        for start in range(large_start, large_stop, _SMALL_BLOCK):
            block = columns[:, start : min(start + _SMALL_BLOCK, large_stop)]
            later = int(torch.searchsorted(around, start, right=True))  # each pair once
            chosen = later + _near(theirs[:, later:], block, limit)
            near = around[chosen]
            squared = points.new_zeros(block.shape[1], near.shape[0])
            for here, there in zip(block, theirs[:, chosen], strict=True):
                apart = there - here[:, None]
                squared.addcmul_(apart, apart)
            rows = torch.arange(start, start + block.shape[1], device=points.device)
            i, j = ((squared < limit) & (near > rows[:, None])).nonzero().unbind(1)
            first.append(rows[i].int())
            second.append(near[j].int())
    return torch.cat(first), torch.cat(second)


def _near(columns: torch.Tensor, block: torch.Tensor, limit: float) -> torch.Tensor:
    """Return which columns (3, n) lie within the square root of `limit` of the bounding box of `block` (3, m)."""
    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    outside = (low - columns).clamp_min_(0.0).add_((columns - high).clamp_min_(0.0))
    return (outside.square_().sum(0) < limit * (1.0 + 1e-12)).nonzero()[:, 0]


def open_neighbors(
    points: torch.Tensor, n_receivers: int, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each of the first `n_receivers` points, every other point closer than `cutoff`.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
    n_receivers : int
    cutoff : float

    Returns
    -------
    receivers, senders : Tensor, shape (edges,), int32
        Receivers ascending.
    row_splits : Tensor, shape (n_receivers + 1,), int32
        Where each receiver's edges begin.
    """
    points = _without_gaps(points, cutoff)
    if n_receivers and points.is_cuda and points.shape[0] >= _MANY_POINTS and has_toolkit_ops():
        return toolkit_neighbors(points, n_receivers, cutoff)
    return vesin_neighbors(points, n_receivers, cutoff)


def vesin_neighbors(
    points: torch.Tensor, n_receivers: int, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `open_neighbors` with vesin's full list, of which receivers are picked."""
    first, second = _vesin(points, cutoff, full=True)
    wanted = (first < n_receivers).nonzero()[:, 0]
    receivers, order = torch.sort(first.index_select(0, wanted), stable=True)
    senders = second.index_select(0, wanted).index_select(0, order)
    return receivers, senders, splits_of_receivers(receivers, n_receivers)


def toolkit_neighbors(
    points: torch.Tensor, n_receivers: int, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `open_neighbors` with nvalchemi-toolkit-ops, which fills a matrix of fixed width.

    The library says nothing when a row overflows, so its counts are checked and the width doubled until all fit.
    """
    from nvalchemiops.torch.neighbors import cell_list

    n = points.shape[0]
    low = points.amin(0)
    extent = points.amax(0) - low + 2.0 * cutoff
    # Points on the border of the box would all land in its outermost bins.
    shifted = points - low + cutoff
    targets = torch.arange(n_receivers, dtype=torch.int32, device=points.device)
    width = _expected_neighbors(n, extent, cutoff)
    while True:
        matrix, counts, *_ = cell_list(
            shifted,
            cutoff,
            torch.diag(extent)[None],
            torch.zeros(1, 3, dtype=torch.bool, device=points.device),
            max_neighbors=width,
            fill_value=n,
            target_indices=targets,
        )
        most = int(counts.max()) if n_receivers else 0
        if most <= width:
            break
        width = max(2 * width, most)
    places = torch.arange(width, device=points.device)
    senders = matrix[places < counts[:, None]].int()
    splits = _splits_of_counts(counts)
    return torch.repeat_interleave(targets, counts.long(), output_size=senders.shape[0]), senders, splits


def _without_gaps(points: torch.Tensor, cutoff: float) -> torch.Tensor:
    """Return points with the same pairs, and empty stretches wider than two cutoffs cut down to two.

    Few points over a long extent make libraries fail: vesin divides by zero above some 1e5 cutoffs along one axis.
    """
    if points.shape[0] < 2 or cutoff <= 0:
        return points
    extent = points.amax(0) - points.amin(0)
    if not bool((extent > _LONG * cutoff).any()):
        return points
    moved = []
    for column in points.unbind(1):
        ordered, order = torch.sort(column)
        surplus = (ordered.diff() - 2.0 * cutoff).clamp_min(0.0)
        squeezed = torch.empty_like(column)
        squeezed[order[1:]] = ordered[1:] - torch.cumsum(surplus, 0)
        squeezed[order[:1]] = ordered[:1]
        moved.append(squeezed)
    return torch.stack(moved, dim=1)


@cache
def has_toolkit_ops() -> bool:
    """Tell whether nvalchemi-toolkit-ops can be imported."""
    return importlib.util.find_spec("nvalchemiops") is not None


def splits_of_receivers(receivers: torch.Tensor, n_receivers: int) -> torch.Tensor:
    """Return where each receiver's edges begin (n_receivers + 1,), int32."""
    return _splits_of_counts(torch.bincount(receivers, minlength=n_receivers))


def _splits_of_counts(counts: torch.Tensor) -> torch.Tensor:
    splits = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=splits[1:])
    if int(splits[-1]) > torch.iinfo(torch.int32).max:
        raise InputError(f"{int(splits[-1])} edges on one rank are more than 2**31 - 1: use more ranks")
    return splits.int()


def _expected_neighbors(n: int, extent: torch.Tensor, cutoff: float) -> int:
    """Return a guess of the largest number of neighbours: half above the mean density, in steps of 8."""
    density = n / float(extent.prod().clamp_min(1e-30))
    expected = min(1.5 * density * 4.19 * cutoff**3, float(n)) + 16
    return int(expected // 8 + 1) * 8


def _with_depth(points: torch.Tensor, cutoff: float) -> torch.Tensor:
    """Add a point far from all others where they are so wide and thin that vesin would divide by zero.

    If there were too many bins it makes them wider by one factor along all axes, and along a thin one none is left. It
    rounds down the bins of one axis, then those of the next by their ratio, so a few have to be left of each.
    """
    low, high = points.aminmax(dim=0)
    bins = [max(1.0, n) for n in ((high - low) / cutoff).floor().tolist()]
    if not 0.5 * _VESIN_BINS < math.prod(bins) < math.inf:
        return points
    needed, least = bins, 1.0
    while min(needed) * (_VESIN_BINS / math.prod(needed)) ** (1 / 3) < 4.0:
        least *= 2.0
        needed = [max(n, least) for n in bins]
    if needed == bins:
        return points
    depth = [(b + 2.0) * cutoff if b > a else 0.0 for a, b in zip(bins, needed, strict=True)]
    return torch.cat([points, (low - points.new_tensor(depth))[None]])


def _vesin(points: torch.Tensor, cutoff: float, *, full: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if points.shape[0] < 2:
        none = torch.zeros(0, dtype=torch.int32, device=points.device)
        return none, none
    points = _with_depth(points, cutoff)
    search = VesinNeighborList(cutoff=cutoff, full_list=full, n_threads=torch.get_num_threads())
    # views of memory that the search owns; the conversion copies them
    first, second = search.compute(points, _OPEN_BOX.to(points.device), False, "ij", copy=False)
    return first.view(torch.int64).int(), second.view(torch.int64).int()
