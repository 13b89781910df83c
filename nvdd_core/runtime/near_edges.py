"""Which edges of a list are within a model's cutoff, chosen anew at each evaluation.

A list reaches further than the model by the skin. `NearEdges.of` leaves the pairs of the skin out, so that the model
doesn't work on them. How many remain changes from step to step, and to learn it a GPU has to be waited for. In steady
steps (`nvdd_core.runtime.steady`) the number is therefore kept: a few longer edges fill up what is not needed, and
`refresh` tells when it no longer suffices.

Invariant: every edge within the cutoff is among those given, or `refresh` has said that one is missing.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nvdd_core.graph import NeighborList

# Room for pairs that come closer before the next rebuild.
_SPARE_SHARE, _SPARE = 64, 256


@dataclass
class _Choice:
    """One list's edges within one cutoff."""

    neighbors: NeighborList
    cutoff: float
    count: int
    index: torch.Tensor | None = None


class NearEdges:
    """The choices made from the lists of one domain."""

    def __init__(self) -> None:
        # keyed by the list's identity: a choice holds on to its list, so no other can take its place
        self._choices: dict[tuple[int, float], _Choice] = {}

    def of(
        self,
        neighbors: NeighborList,
        positions: torch.Tensor,
        cell: torch.Tensor,
        system: torch.Tensor,
        cutoff: float,
    ) -> torch.Tensor:
        """Return which edges of a full list to use, (n,) int64: all within `cutoff`, and perhaps a few longer ones.

        Parameters
        ----------
        neighbors : NeighborList
            In full form.
        positions : Tensor, shape (n_local, 3)
        cell : Tensor, shape (S, 3, 3)
        system : Tensor, shape (n_local,), int64
        cutoff : float
            Angstrom.
        """
        key = (id(neighbors), cutoff)
        choice = self._choices.get(key)
        if choice is not None and choice.index is not None:
            return choice.index
        found = (~_beyond(neighbors, positions, cell, system, cutoff)).nonzero()[:, 0]
        self._choices[key] = _Choice(neighbors, cutoff, int(found.shape[0]))
        return found

    def keep(self) -> None:
        """From now on give what `refresh` chose last, as many edges as there are now and some to spare."""
        for choice in self._choices.values():
            listed = int(choice.neighbors.senders.shape[0])
            size = min(listed, choice.count + choice.count // _SPARE_SHARE + _SPARE)
            choice.index = torch.zeros(size, dtype=torch.int64, device=choice.neighbors.senders.device)

    def refresh(
        self, positions: torch.Tensor, cell: torch.Tensor, system: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Choose anew, in place; yields for each list a number (), above zero where edges didn't find room."""
        for choice in self._choices.values():
            if choice.index is None:
                continue
            beyond = _beyond(choice.neighbors, positions, cell, system, choice.cutoff)
            size = choice.index.shape[0]
            choice.index.copy_(torch.sort(beyond.byte(), stable=True).indices[:size])
            yield ((~beyond).sum() - size).clamp_min(0).double()


@torch.no_grad()
def _beyond(
    neighbors: NeighborList,
    positions: torch.Tensor,
    cell: torch.Tensor,
    system: torch.Tensor,
    cutoff: float,
) -> torch.Tensor:
    """Return a mask (E,) of edges that are not shorter than the cutoff."""
    points = neighbors.extend(positions, cell, system)
    vectors = points.index_select(0, neighbors.senders) - points.index_select(0, neighbors.receivers)
    return vectors.square_().sum(1) >= cutoff**2
