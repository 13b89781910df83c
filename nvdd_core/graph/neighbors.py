"""Neighbour lists of local rows, for receivers that this rank owns.

Rows are ``[owned | ghost]``; a list refers to *extended rows* ``[owned | ghost | image]``, where an image is a
row moved by a lattice vector. So an edge is two integers, and a model that wants shifts looks them up once an
image instead of carrying them on every edge.

- form ``half``: a pair of owned rows (or of an owned row and an image of one) appears once and acts on both
  ends; a pair with a ghost end appears once and acts on its owned end only.
- form ``full``: every directed edge sender -> receiver, receiver owned.

Invariant: over all ranks, the directed edges of all lists together are exactly those of the whole system, each
once. Lists reach to cutoff + skin; a model applies its own cutoff.
Layer: graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nvdd_core.graph.pairs import open_neighbors, receiver_pairs, splits_of_receivers
from nvdd_core.partition import Frame, apply_by_segment, segment_bounds

_MARGIN = 1e-9
_BLOCK_EDGES = 4_194_304  # edges whose lengths are looked at together


@dataclass(frozen=True)
class Images:
    """Periodic images near the receivers.

    Attributes
    ----------
    rows : Tensor, shape (n_image,), int64
        Local row of each image.
    shifts : Tensor, shape (n_image, 3), int64
        Lattice vector by which it is moved, in whole cells.
    """

    rows: torch.Tensor
    shifts: torch.Tensor


@dataclass(frozen=True)
class NeighborList:
    """Edges into the receivers of one rank.

    Attributes
    ----------
    form : {"half", "full"}
    n_owned, n_local : int
        Owned rows and all local rows.
    n_receivers : int
        Rows (the first ones) that edges may enter: the owned rows, or all local rows for a wide halo.
    receivers : Tensor, shape (E,), int32
        Ascending.
    senders : Tensor, shape (E,), int32
        Extended rows.
    row_splits : Tensor, shape (n_receivers + 1,), int32
        Where each receiver's edges begin.
    images : Images
    """

    form: str
    n_owned: int
    n_local: int
    n_receivers: int
    receivers: torch.Tensor
    senders: torch.Tensor
    row_splits: torch.Tensor
    images: Images
    _cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def image_rows(self) -> torch.Tensor:
        """Local row of each image, (n_image,) int64."""
        return self.images.rows

    @property
    def image_shifts(self) -> torch.Tensor:
        """Shift of each image in whole cells, (n_image, 3) int64."""
        return self.images.shifts

    @cached_property
    def kept(self) -> WeakKeyDictionary[Any, Any]:
        """What a user of the list has made for it, by user: kept for as long as there are both.

        So nothing that a captured evaluation reads is replaced while its list is in use. A value must not refer to the
        list, or both would stay.
        """
        return WeakKeyDictionary()

    @cached_property
    def extended_rows(self) -> torch.Tensor:
        """Local row of each extended row, (n_local + n_image,) int64."""
        own = torch.arange(self.n_local, device=self.image_rows.device)
        return torch.cat([own, self.image_rows])

    @cached_property
    def acts_on_sender(self) -> torch.Tensor:
        """Mask (E,) of half-form pairs that act on both ends."""
        return self.extended_rows[self.senders.long()] < self.n_receivers

    @cached_property
    def n_edges(self) -> int:
        """Directed edges whose receiver this rank owns (a host synchronisation on a GPU)."""
        into_receiver = int(self.row_splits[self.n_owned])
        if self.form == "full":
            return into_receiver
        return into_receiver + int((self.extended_rows[self.senders.long()] < self.n_owned).sum())

    def extend(self, positions: torch.Tensor, cell: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """Return positions of the extended rows.

        Parameters
        ----------
        positions : Tensor, shape (n_local, 3)
        cell : Tensor, shape (S, 3, 3)
        segment : Tensor, shape (n_local,), int64

        Returns
        -------
        Tensor, shape (n_local + n_image, 3)
        """
        if self.image_rows.shape[0] == 0:
            return positions
        shift = self.image_shifts.to(positions.dtype)
        moved = positions.index_select(0, self.image_rows) + apply_by_segment(
            shift, cell, segment.index_select(0, self.image_rows)
        )
        return torch.cat([positions, moved])

    def full(self) -> NeighborList:
        """Return the same edges in full form, made once."""
        return self if self.form == "full" else self._mirrored

    @cached_property
    def _mirrored(self) -> NeighborList:
        both = self.acts_on_sender.nonzero()[:, 0]
        back = self._mirror(both)
        receivers = torch.cat([self.receivers, back[0]])
        senders = torch.cat([self.senders, back[1]])
        images = Images(torch.cat([self.image_rows, back[2]]), torch.cat([self.image_shifts, back[3]]))
        return _sorted_list("full", self.n_owned, self.n_local, self.n_receivers, receivers, senders, images)

    def _mirror(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return receivers and senders of the reversed `pairs`, and the new images that these need."""
        sender, receiver = self.senders[pairs].long(), self.receivers[pairs].long()
        rows = self.extended_rows[sender]
        moved = (sender >= self.n_local).nonzero()[:, 0]
        new_sender = receiver.clone()
        image = sender[moved] - self.n_local
        # one new image for every (row, opposite shift) that occurs
        n_images = max(int(self.image_rows.shape[0]), 1)
        code, inverse = torch.unique(receiver[moved] * n_images + image, return_inverse=True)
        new_rows = torch.div(code, n_images, rounding_mode="floor")
        new_shifts = -self.image_shifts[code % n_images]
        # images of several rows share a shift, so equal (row, shift) can come from different images
        unique, merge = torch.unique(
            torch.cat([new_rows[:, None], new_shifts], 1), dim=0, return_inverse=True
        )
        new_sender[moved] = self.n_local + int(self.image_rows.shape[0]) + merge[inverse]
        return rows.int(), new_sender.int(), unique[:, 0], unique[:, 1:]

    def within(self, points: torch.Tensor, reach: float) -> NeighborList:
        """Return the list of those edges that are no longer than `reach`, with the rows of this one.

        Parameters
        ----------
        points : Tensor, shape (n_local + n_image, 3)
            Positions of the extended rows, as `extend` gives them.
        reach : float
        """
        longest = (reach * (1 + _MARGIN)) ** 2
        near = [
            (points[senders.long()] - points[receivers.long()]).square().sum(1) <= longest
            for senders, receivers in zip(
                self.senders.split(_BLOCK_EDGES), self.receivers.split(_BLOCK_EDGES), strict=True
            )
        ]
        keep = torch.cat(near).nonzero()[:, 0]
        receivers = self.receivers.index_select(0, keep)
        splits = splits_of_receivers(receivers, self.n_receivers)
        senders = self.senders.index_select(0, keep)
        found = dataclasses.replace(self, receivers=receivers, senders=senders, row_splits=splits, _cache={})
        return found.compact(torch.ones(self.n_local, dtype=torch.bool, device=keep.device))

    def used_rows(self) -> torch.Tensor:
        """Return a mask (n_local,) of rows that some edge uses; owned rows always count as used."""
        extended = self._used_extended()
        used = extended[: self.n_local].clone()
        used[self.image_rows[extended[self.n_local :]]] = True
        used[: self.n_receivers] |= self.row_splits.diff() > 0
        used[: self.n_owned] = True
        return used

    def _used_extended(self) -> torch.Tensor:
        """Return a mask of extended rows that send along some edge."""
        return torch.bincount(self.senders, minlength=self.extended_rows.shape[0]) > 0

    def compact(self, keep: torch.Tensor) -> NeighborList:
        """Renumber rows after local rows outside the mask `keep` (n_local,), which no edge uses, are dropped."""
        used = self._used_extended()
        used[: self.n_local] = keep
        new = torch.cumsum(used, 0) - 1
        images = used[self.n_local :]
        n_receivers = int(keep[: self.n_receivers].sum())
        receivers = self.receivers
        if n_receivers < self.n_receivers:
            receivers = new.int().index_select(0, receivers)
        splits = torch.cat(
            [self.row_splits[:1], self.row_splits[1:][keep[: self.n_receivers]]]
        )  # a dropped receiver has no edges
        return NeighborList(
            self.form,
            self.n_owned,
            int(keep.sum()),
            n_receivers,
            receivers,
            new.int().index_select(0, self.senders),
            splits,
            Images(new[self.image_rows[images]], self.image_shifts[images]),
        )

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``edge_index`` (2, E) int64 [sender row, receiver row] and ``shifts`` (E, 3) int64, full form."""
        if "coo" not in self._cache:
            edges = self.full()
            sender = edges.senders.long()
            shifts = torch.zeros(sender.shape[0], 3, dtype=torch.int64, device=sender.device)
            moved = (sender >= edges.n_local).nonzero()[:, 0]
            shifts[moved] = edges.image_shifts[sender[moved] - edges.n_local]
            self._cache["coo"] = (
                torch.stack([edges.extended_rows[sender], edges.receivers.long()]),
                shifts,
            )
        return self._cache["coo"]

    def matrix(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the full form as a matrix.

        Returns
        -------
        senders : Tensor, shape (n_receivers, width), int32
            Extended rows; unused places hold ``n_local + n_image``.
        counts : Tensor, shape (n_receivers,), int32
        """
        if "matrix" not in self._cache:
            edges = self.full()
            counts = edges.row_splits.diff()
            width = int(counts.max()) if counts.numel() else 0
            pad = edges.n_local + int(edges.image_rows.shape[0])
            out = edges.senders.new_full((edges.n_receivers, width), pad)
            place = (
                torch.arange(edges.senders.shape[0], device=out.device)
                - edges.row_splits.long()[edges.receivers.long()]
            )
            out[edges.receivers.long(), place] = edges.senders
            self._cache["matrix"] = (out, counts)
        return self._cache["matrix"]


def _sorted_list(
    form: str,
    n_owned: int,
    n_local: int,
    n_receivers: int,
    receivers: torch.Tensor,
    senders: torch.Tensor,
    images: Images,
) -> NeighborList:
    receivers, order = torch.sort(receivers.int(), stable=True)
    senders = senders.int().index_select(0, order)
    splits = splits_of_receivers(receivers, n_receivers)
    return NeighborList(form, n_owned, n_local, n_receivers, receivers, senders, splits, images)


def build_neighbors(
    positions: torch.Tensor,
    frac: torch.Tensor,
    segment: torch.Tensor,
    frame: Frame,
    n_owned: int,
    cutoff: float,
    n_receivers: int | None = None,
    form: str = "half",
) -> NeighborList:
    """List the neighbours of the first `n_receivers` local rows.

    Parameters
    ----------
    positions : Tensor, shape (n_local, 3), float64
        Folded positions, as `frac` has them.
    frac : Tensor, shape (n_local, 3), float64
    segment : Tensor, shape (n_local,), int64
        Rows of different segments are never neighbours.
    frame : Frame
    n_owned : int
    cutoff : float
        Including the skin.
    n_receivers : int, optional
        Default: the owned rows.
    form : {"half", "full"}

    Returns
    -------
    NeighborList
    """
    n_receivers = n_owned if n_receivers is None else n_receivers
    # On a GPU a full list is searched for at once; mirroring a half one would cost as much again as finding it.
    direct = form == "full" and positions.is_cuda and frame.box.cell.shape[0] == 1
    images = _images(frac, segment, frame, n_receivers, cutoff, both_ways=direct)
    moved = positions[images.rows] + apply_by_segment(
        images.shifts.double(), frame.box.cell, segment[images.rows]
    )
    points = torch.cat([positions, moved])
    if direct:
        found = open_neighbors(points, n_receivers, cutoff)
        receivers, senders, splits = found
        n_local = positions.shape[0]
        return NeighborList("full", n_owned, n_local, n_receivers, receivers, senders, splits, images)
    tag = torch.cat([segment, segment[images.rows]])
    half = _half_list(
        points, tag, frame.box.cell.shape[0], n_owned, positions.shape[0], n_receivers, cutoff, images
    )
    return half if form == "half" else half.full()


def _half_list(
    points: torch.Tensor,
    tag: torch.Tensor,
    n_segments: int,
    n_owned: int,
    n_local: int,
    n_receivers: int,
    cutoff: float,
    images: Images,
) -> NeighborList:
    """List pairs of extended rows `points` of equal `tag` that have a receiver, each once."""
    receivers: list[torch.Tensor] = []
    senders: list[torch.Tensor] = []
    for index in _segments(tag, n_segments):
        if index is None:
            first, second = receiver_pairs(points, n_receivers, cutoff)
        else:  # ascending, so receivers come first here, too
            chosen = int((index < n_receivers).sum())
            first, second = receiver_pairs(points[index], chosen, cutoff)
            first, second = index[first].int(), index[second].int()
        receivers.append(first)
        senders.append(second)
    return _sorted_list(
        "half", n_owned, n_local, n_receivers, torch.cat(receivers), torch.cat(senders), images
    )


def _segments(tag: torch.Tensor, n_segments: int) -> list[torch.Tensor | None]:
    """Return the extended rows of each segment; None stands for all rows."""
    if n_segments == 1:
        return [None]
    order = torch.argsort(tag, stable=True)
    return list(order.split(torch.bincount(tag, minlength=n_segments).cpu().tolist()))


def _images(
    frac: torch.Tensor,
    segment: torch.Tensor,
    frame: Frame,
    n_receivers: int,
    cutoff: float,
    *,
    both_ways: bool = False,
) -> Images:
    """List every image within the cutoff of the receivers' bounding box.

    Of a receiver's own images only those with a lexicographically positive shift are listed, unless `both_ways`:
    the pair with the opposite one is the same pair.
    """
    n_segments = frame.box.cell.shape[0]
    low, high = segment_bounds(frac[:n_receivers], segment[:n_receivers], n_segments)
    reach = cutoff * (1 + _MARGIN) / frame.box.heights
    first = torch.ceil((low - reach)[segment] - frac)
    last = torch.floor((high + reach)[segment] - frac)
    open_axis = ~frame.box.periodic[segment]
    near = (first <= 0) & (last >= 0)
    first = torch.where(open_axis, 0.0, first)
    last = torch.where(open_axis, torch.where(near, 0.0, -1.0), last)
    span = (last - first + 1).clamp_min(0)
    span = torch.where(torch.isfinite(span), span, 0.0).long()
    total = span.prod(1)
    rows = torch.repeat_interleave(torch.arange(frac.shape[0], device=frac.device), total)
    starts = torch.cumsum(total, 0) - total
    place = torch.arange(rows.shape[0], device=frac.device) - starts[rows]
    width = span[rows]
    steps = torch.stack(
        [
            torch.div(place, width[:, 1] * width[:, 2], rounding_mode="floor"),
            torch.div(place, width[:, 2], rounding_mode="floor") % width[:, 1].clamp_min(1),
            place % width[:, 2].clamp_min(1),
        ],
        dim=1,
    )
    shifts = first[rows].long() + steps
    x, y, z = shifts.unbind(1)
    moved = (shifts != 0).any(1)
    positive = (x > 0) | ((x == 0) & ((y > 0) | ((y == 0) & (z > 0))))
    keep = moved if both_ways else moved & (positive | (rows >= n_receivers))
    return Images(rows[keep], shifts[keep])
