"""Which edges of a list are within a model's cutoff, chosen anew at each evaluation.

A list reaches further than the model by the skin. `NearEdges.of` leaves the pairs of the skin out, so that the model
doesn't work on them. How many remain changes from step to step, and to learn it a GPU has to be waited for. On a
padded domain (`nvdd_core.runtime.padded`) the number is therefore kept: edges between rows that stand for none fill up
what is not needed, and `refresh` tells when it no longer suffices.

Invariant: the edges given between rows of the batch are those within the cutoff, or `refresh` has said that some are
missing.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from nvdd_core.partition import apply_by_segment

Edges = tuple[torch.Tensor, torch.Tensor]
"""``edge_index`` (2, E) int64, sender and receiver, and ``shifts`` (E, 3) int64 of the sender in whole cells."""

# Room for pairs that come closer before the next rebuild: a share of all, and by how much their number wavers. That is
# its root where pairs come and go by themselves; of a small domain more come and go with its rows, which waver by the
# root of those at its faces, the third root of all.
LEAST_SPARE, MOST_SPARE, _WAVERS = 1 / 256, 1 / 8, 4.0


class EdgeList(Protocol):
    """What edges are chosen from: a `NeighborList`, or what stands for one."""

    def coo(self) -> Edges:
        """Return all directed edges."""


@dataclass
class _Choice:
    """One list's edges within one cutoff: all of the list, how many were near, and those that are given by turns."""

    listed: Edges
    count: int
    sized: int = 0  # what the count was when there was room made
    kept: Edges | None = None
    moves: torch.Tensor | None = None  # (E, 3), what the shifts of the listed edges are in Angstrom

    @property
    def size(self) -> int:
        """How many edges there is room for."""
        return 0 if self.kept is None else int(self.kept[1].shape[0])


class NearEdges:
    """The choices made from the lists of one domain.

    Parameters
    ----------
    lists : iterable of EdgeList
        In an order that is the same for every domain of a model.
    """

    def __init__(self, lists: Iterable[EdgeList] = ()) -> None:
        self._lists = list(lists)
        self._choices: dict[tuple[int, float], _Choice] = {}

    def of(
        self,
        neighbors: EdgeList,
        positions: torch.Tensor,
        cell: torch.Tensor,
        system: torch.Tensor,
        cutoff: float,
    ) -> Edges:
        """Return the edges of a list within `cutoff`, and on a padded domain some between rows that stand for none.

        Parameters
        ----------
        neighbors : EdgeList
        positions : Tensor, shape (n_local, 3)
        cell : Tensor, shape (S, 3, 3)
        system : Tensor, shape (n_local,), int64
        cutoff : float
            Angstrom.
        """
        key = (self._number(neighbors), cutoff)
        choice = self._choices.get(key)
        if choice is not None and choice.kept is not None:
            return choice.kept
        listed = neighbors.coo()
        moves = _moves(listed, positions, cell, system)
        near = (~_beyond(listed[0], moves, positions, cutoff)).nonzero()[:, 0]
        self._choices[key] = _Choice(listed, int(near.shape[0]))
        return listed[0].index_select(1, near), listed[1].index_select(0, near)

    def _number(self, neighbors: EdgeList) -> int:
        """Return the place of a list in the order of lists; one that isn't among them comes last."""
        for number, known in enumerate(self._lists):
            if known is neighbors:
                return number
        self._lists.append(neighbors)
        return len(self._lists) - 1

    def count(
        self, like: NearEdges, positions: torch.Tensor, cell: torch.Tensor, system: torch.Tensor
    ) -> None:
        """Choose for the lists and cutoffs of `like` as `of` would, without an evaluation that asks."""
        for number, cutoff in like._choices:
            self.of(self._lists[number], positions, cell, system, cutoff)

    def keep(self, n_rows: int, before: NearEdges | None = None) -> None:
        """From now on give what `refresh` chose last, as many edges as `n_rows` rows have now and some to spare.

        There is room for as many more as have come since `before` was sized. What room `before` had stays, if it
        does and isn't too large: sizes are taken anew where one rank's don't do, and another may have few edges just
        then.
        """
        for key, choice in self._choices.items():
            index, shifts = choice.listed
            earlier = before._choices.get(key) if before is not None else None
            size, choice.sized = _sized(choice.count, n_rows, earlier)
            # without owned rows there are no edges, nor rows for those that fill up
            size = size if index.shape[1] else 0
            choice.kept = (index.new_zeros((2, size)), shifts.new_zeros((size, 3)))

    def fits(self, other: NearEdges) -> bool:
        """Tell whether what is kept here has room for the choices of `other`, which it could then give."""
        if self._choices.keys() != other._choices.keys():
            return False
        return all(_least(other._choices[key].count) <= choice.size for key, choice in self._choices.items())

    def placed(self, place: torch.Tensor, lists: Iterable[EdgeList]) -> NearEdges:
        """Return the same choices for rows renumbered by `place` (n_local,), from `lists` in the order of these."""
        moved = NearEdges(lists)
        for key, choice in self._choices.items():
            index, shifts = choice.listed
            moved._choices[key] = _Choice((place[index], shifts), choice.count)
        return moved

    def adopt(self, other: NearEdges) -> None:
        """Choose from the lists of `other` from now on, into the tensors kept here."""
        for key, choice in self._choices.items():
            choice.listed, choice.count, choice.moves = (
                other._choices[key].listed,
                other._choices[key].count,
                None,
            )

    def refresh(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor,
        system: torch.Tensor,
        spare: tuple[torch.Tensor, int],
    ) -> torch.Tensor:
        """Choose anew, in place.

        Parameters
        ----------
        positions, cell, system : Tensor
            See `of`.
        spare : Tensor, shape (), int64; and int
            The first row that stands for none, and the one after the last; at least two.

        Returns
        -------
        Tensor, shape (), float64
            Above zero where edges didn't find room.
        """
        missing = positions.new_zeros((), dtype=torch.float64)
        for (_, cutoff), choice in self._choices.items():
            if choice.kept is None:
                continue
            (index, shifts), (kept_index, kept_shifts) = choice.listed, choice.kept
            if choice.moves is None:  # the cell stays until the next rebuild
                choice.moves = _moves(choice.listed, positions, cell, system)
            size = kept_shifts.shape[0]
            chosen, n_near = _near_first(_beyond(index, choice.moves, positions, cutoff))
            surplus = torch.arange(size, device=index.device) - n_near
            n = min(size, chosen.shape[0])
            kept_index[:, :n] = index.index_select(1, chosen[:n])
            kept_shifts[:n] = shifts.index_select(0, chosen[:n])
            kept_index.copy_(torch.where(surplus < 0, kept_index, _filling(surplus, *spare)))
            kept_shifts.masked_fill_((surplus >= 0)[:, None], 0)
            missing = missing + (n_near - size).clamp_min(0)
        return missing


def _sized(count: int, n_rows: int, earlier: _Choice | None) -> tuple[int, int]:
    """Return for how many edges of rows there should be room, and how many there were when that was found."""
    grown = 0.0 if earlier is None else count / max(1, earlier.sized) - 1.0
    size = count + _room(count, min(MOST_SPARE, max(LEAST_SPARE, grown)), n_rows)
    if earlier is not None and _least(count) <= earlier.size <= (1.0 + MOST_SPARE) * size:
        return earlier.size, earlier.sized
    return size, count


def _room(count: int, share: float, n_rows: int = 0) -> int:
    """Return how many edges there is room for beside `count`; without `n_rows` rows stay."""
    with_rows = 0.75 * count / n_rows ** (2 / 3) if n_rows else 0.0
    return int(share * count + _WAVERS * max(count**0.5, with_rows)) + 1


def _least(count: int) -> int:
    """Return how many edges there must be room for, for `count` to be served until the next rebuild."""
    return count + _room(count, LEAST_SPARE) // 4


def _moves(edges: Edges, positions: torch.Tensor, cell: torch.Tensor, system: torch.Tensor) -> torch.Tensor:
    """Return by how much each edge's sender is moved, (E, 3), Angstrom."""
    (sender, _), shifts = edges
    return apply_by_segment(shifts.to(positions.dtype), cell, system.index_select(0, sender))


def _beyond(
    edge_index: torch.Tensor, moves: torch.Tensor, positions: torch.Tensor, cutoff: float
) -> torch.Tensor:
    """Return a mask (E,) of edges that are not shorter than the cutoff."""
    sender, receiver = edge_index
    vectors = positions.index_select(0, sender).add_(moves).sub_(positions.index_select(0, receiver))
    return vectors.square_().sum(1) >= cutoff**2


def _near_first(beyond: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of a mask (E,), those where it is False first, and how many these are, both in order."""
    every = torch.arange(beyond.shape[0], device=beyond.device)
    before = torch.cumsum(~beyond, 0)  # near ones up to here
    n_near = before[-1:].sum()
    place = torch.where(beyond, n_near + every - before, before - 1)
    return torch.empty_like(every).scatter_(0, place, every), n_near


def _filling(number: torch.Tensor, first: torch.Tensor, end: int) -> torch.Tensor:
    """Return edges (2, n) from each of the rows `first` to `end` to the next, around."""
    rows = end - first
    return torch.stack([first + number % rows, first + (number + 1) % rows])
