"""Which rank owns which row.

- `Bisection` (default): recursive bisection in the rows' own coordinates, equal row counts, so slabs,
  droplets and vacuum balance and no rank is empty while there are enough rows.
- `Grid`: a regular grid of domains.
- `IndexBlocks`: blocks of consecutive row ids, for graph partition.

Each assigns rows from data that the row carries (unit coordinates, segment, id), so ownership doesn't depend on
where the row is now. Invariant: every row gets exactly one owner.
Layer: partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError

_BINS = 256
_KEY_BITS = 62


@dataclass(frozen=True)
class Rows:
    """What a partitioner may know of rows.

    Attributes
    ----------
    unit : Tensor, shape (n, 3), float64
        Coordinates in [0, 1].
    segment, ids : Tensor, shape (n,), int64
    """

    unit: torch.Tensor
    segment: torch.Tensor
    ids: torch.Tensor


class Partitioner(Protocol):
    """Assigns rows to ranks."""

    def fit(self, rows: Rows, lengths: torch.Tensor, mesh: Mesh) -> None:
        """Adapt to the rows of all ranks (collective); `lengths` (S, 3) scale the unit coordinates."""

    def assign(self, rows: Rows) -> torch.Tensor:
        """Return the owner of each row (n,), int64."""

    def refit_above(self) -> float:
        """Return the ratio of largest to mean row count above which `fit` is worth its cost."""


@dataclass
class IndexBlocks:
    """Blocks of consecutive ids, equal to one row."""

    n_rows: int
    n_ranks: int

    def fit(self, rows: Rows, lengths: torch.Tensor, mesh: Mesh) -> None:
        """Do nothing: blocks are fixed."""

    def assign(self, rows: Rows) -> torch.Tensor:
        """Return the block of each row's id."""
        return rows.ids * self.n_ranks // self.n_rows

    def refit_above(self) -> float:
        """Return infinity: there is nothing to adapt."""
        return float("inf")


class Grid:
    """A regular ``a x b x c`` grid of domains in unit coordinates.

    Raises
    ------
    InputError
        If the product of `dims` is not the number of ranks.
    """

    def __init__(self, dims: tuple[int, int, int], n_ranks: int) -> None:
        if len(dims) != 3 or min(dims) < 1 or dims[0] * dims[1] * dims[2] != n_ranks:
            raise InputError(
                f"grid {'x'.join(map(str, dims))} has {_product(dims)} domains, but there are {n_ranks} ranks; "
                "give three positive numbers whose product is the number of ranks"
            )
        self.dims = dims

    def fit(self, rows: Rows, lengths: torch.Tensor, mesh: Mesh) -> None:
        """Do nothing: the grid is fixed."""

    def assign(self, rows: Rows) -> torch.Tensor:
        """Return the domain of each row."""
        dims = torch.tensor(self.dims, device=rows.unit.device)
        index = torch.minimum((rows.unit * dims).long(), dims - 1)
        return (index[:, 0] * self.dims[1] + index[:, 1]) * self.dims[2] + index[:, 2]

    def refit_above(self) -> float:
        """Return infinity: there is nothing to adapt."""
        return float("inf")


def _product(dims: tuple[int, ...]) -> int:
    result = 1
    for d in dims:
        result *= d
    return result


class Bisection:
    """Recursive bisection with exactly equal row counts at the time of `fit`.

    Ranks form a binary tree. Each inner node cuts its rows along the axis where they extend furthest (or
    between segments while it holds several) at the key below which its left ranks' share of the rows lies. A key
    joins segment, coordinate and id in one integer, so keys are unique and a cut through equal coordinates is
    still exact.
    """

    def __init__(self, n_rows: int, n_segments: int, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._id_bits = max(1, (max(n_rows, 1) - 1).bit_length())
        self._segment_bits = max(0, (n_segments - 1).bit_length())
        self._levels: list[_Level] = []

    def refit_above(self) -> float:
        """Return 1.03: new cuts cost less than what 3 % more rows cost until the next rebuild."""
        return 1.03

    def assign(self, rows: Rows) -> torch.Tensor:
        """Return the owner of each row by walking down the tree."""
        first = torch.zeros_like(rows.ids)
        for level in self._levels:
            node = level.index(first.device)[first]
            key = self._key(rows, level.axes(first.device)[node])
            first = torch.where(key >= level.cuts(first.device)[node], level.right(first.device)[node], first)
        return first

    def fit(self, rows: Rows, lengths: torch.Tensor, mesh: Mesh) -> None:
        """Find the cuts for the rows of all ranks (collective)."""
        self._levels = []
        groups = [(0, self.n_ranks)]
        first = torch.zeros_like(rows.ids)
        while any(b - a > 1 for a, b in groups):
            axes = self._axes(rows, first, groups, lengths, mesh)
            where = torch.zeros(self.n_ranks, dtype=torch.int64)
            for g, (a, _) in enumerate(groups):
                where[a] = g
            node = where.to(first.device)[first]
            key = self._key(rows, axes.to(first.device)[node])
            cuts = _select(key, node, groups, mesh)
            right = torch.tensor([a if b - a == 1 else a + (b - a) // 2 for a, b in groups])
            level = _Level(where, axes, cuts, right)
            self._levels.append(level)
            first = torch.where(key >= cuts.to(key.device)[node], right.to(key.device)[node], first)
            groups = [
                part
                for a, b in groups
                for part in ([(a, b)] if b - a == 1 else [(a, a + (b - a) // 2), (a + (b - a) // 2, b)])
            ]

    def _key(self, rows: Rows, axis: torch.Tensor) -> torch.Tensor:
        bits = _KEY_BITS - self._id_bits - self._segment_bits
        if bits < 1:
            raise InputError("too many rows and segments for one partition key: more than 2**61 in all")
        bits = min(bits, 52)
        value = rows.unit.gather(1, axis[:, None])[:, 0]
        step = (value * 2.0**bits).long().clamp_(0, 2**bits - 1)
        return (((rows.segment << bits) | step) << self._id_bits) | rows.ids

    def _axes(
        self,
        rows: Rows,
        first: torch.Tensor,
        groups: list[tuple[int, int]],
        lengths: torch.Tensor,
        mesh: Mesh,
    ) -> torch.Tensor:
        """Return, for each group, the axis along which its rows extend furthest."""
        extent = rows.unit * lengths[rows.segment]
        low = extent.new_full((self.n_ranks, 3), float("inf"))
        high = extent.new_full((self.n_ranks, 3), float("-inf"))
        index = first[:, None].expand_as(extent)
        low = low.scatter_reduce(0, index, extent, "amin")
        high = high.scatter_reduce(0, index, extent, "amax")
        both = mesh.all_reduce_max_(torch.cat([-low, high]).contiguous()).cpu()
        span = both[: self.n_ranks] + both[self.n_ranks :]
        starts = torch.tensor([a for a, _ in groups])
        # equal spans must not be decided by rounding that differs between runs: the first axis wins
        return torch.argmax(torch.round(span[starts] * 1e6), dim=1)


@dataclass(frozen=True)
class _Level:
    where: torch.Tensor
    axis: torch.Tensor
    cut: torch.Tensor
    right_first: torch.Tensor

    def index(self, device: torch.device) -> torch.Tensor:
        return self.where.to(device)

    def axes(self, device: torch.device) -> torch.Tensor:
        return self.axis.to(device)

    def cuts(self, device: torch.device) -> torch.Tensor:
        return self.cut.to(device)

    def right(self, device: torch.device) -> torch.Tensor:
        return self.right_first.to(device)


def _select(
    key: torch.Tensor, group: torch.Tensor, groups: list[tuple[int, int]], mesh: Mesh
) -> torch.Tensor:
    """Return per group the key below which the left ranks' share of its rows lies (collective).

    Each round counts the rows in `_BINS` bins of the bracket that holds the answer; keys are unique, so the
    bracket shrinks to an exact cut in at most ``_KEY_BITS / log2(_BINS)`` rounds, usually in three.
    """
    n = len(groups)
    low = torch.zeros(n, dtype=torch.int64)
    width = torch.full((n,), 2 ** (_KEY_BITS - 8), dtype=torch.int64)  # of one bin
    below = torch.zeros(n, dtype=torch.int64)
    target: torch.Tensor | None = None
    cut = torch.full((n,), 2**_KEY_BITS, dtype=torch.int64)
    done = torch.tensor([b - a == 1 for a, b in groups])
    while not bool(done.all()):
        low_d, width_d = low.to(key.device), width.to(key.device)
        bin_of = torch.div(key - low_d[group], width_d[group], rounding_mode="floor")
        inside = (bin_of >= 0) & (bin_of < _BINS)
        flat = torch.bincount((group * _BINS + bin_of)[inside], minlength=n * _BINS)
        counts = mesh.all_reduce_sum_(flat.cpu()).view(n, _BINS)
        if target is None:
            total = counts.sum(1)
            share = torch.tensor([((b - a) // 2, b - a) for a, b in groups])
            target = torch.div(total * share[:, 0], share[:, 1], rounding_mode="floor")
        upto = below[:, None] + counts.cumsum(1)  # rows below the upper edge of each bin
        exact = upto == target[:, None]
        hit = exact.any(1) | (target == below)
        edge = torch.where(target == below, -1, exact.int().argmax(1))
        cut = torch.where(hit & ~done, low + (edge + 1) * width, cut)
        done = done | hit
        bracket = (upto < target[:, None]).sum(1).clamp_max(_BINS - 1)
        before = torch.where(bracket > 0, upto.gather(1, (bracket - 1).clamp_min(0)[:, None])[:, 0], below)
        low, below = torch.where(done, low, low + bracket * width), torch.where(done, below, before)
        width = torch.where(done, width, torch.div(width, _BINS, rounding_mode="floor").clamp_min(1))
    return cut
