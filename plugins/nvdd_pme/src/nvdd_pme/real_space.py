"""The real-space part of the Ewald sum over the edges of one rank.

Key objects: `Pairs` (the edges and how each counts), `pair_energy`, `pair_potential`. With the kernel g(r) =
erfc(alpha r) / r the potential at a row is the sum of ``charge * g`` over its edges and the energy half of the sum of
charge times potential. A kernel gives energy and gradients in one pass; where the gradient itself is differentiated it
is made again from torch operations. Layer: plugin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.graph import NeighborList
from nvdd_pme.pair_kernels import pair_sums

TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)


@dataclass(frozen=True)
class Pairs:
    """Edges into owned rows, and how an edge counts for its two ends.

    Attributes
    ----------
    row_splits : Tensor, shape (n_owned + 1,), int32
        Where each owned row's edges begin.
    senders : Tensor, shape (E,), int32
        Extended rows.
    to_receiver, to_sender : Tensor, shape (n_extended,), float64
        By the sender: part of the pair's derivative that goes to the receiver, and to the sender.
    """

    row_splits: torch.Tensor
    senders: torch.Tensor
    to_receiver: torch.Tensor
    to_sender: torch.Tensor

    @classmethod
    def for_energy(cls, neighbors: NeighborList, ids: torch.Tensor) -> Pairs:
        """Return edges for this rank's share of the energy.

        Of a half list these are the pairs of owned rows and, of those with a ghost, which the ghost's owner lists too,
        the ones that are this rank's: gradients of ghosts go home, so that one rank can do all of a pair. A full list
        is too long to be copied; of a pair with a ghost it counts half.

        Parameters
        ----------
        neighbors : NeighborList
            One of `owned_receivers`; so it is for `for_potential`.
        ids : Tensor, shape (n_local,), int64
            Global ids, by which both ranks of a pair agree whose it is.
        """
        mine = neighbors.extended_rows < neighbors.n_owned
        if neighbors.form == "half":
            whole = torch.ones_like(mine, dtype=torch.float64)
            pairs = cls._of(neighbors, whole, whole)
            return pairs if neighbors.n_local == neighbors.n_owned else pairs._shared(neighbors, ids)
        # A full list has both directions of a pair of owned rows, so nothing goes to such a sender. An image is told
        # its part, for it depends on the cell.
        itself = mine.clone()
        itself[neighbors.n_owned :] = False
        part = torch.where(itself, 1.0, 0.5).double()
        return cls._of(neighbors, part, torch.where(itself, 0.0, 0.5).double())

    @classmethod
    def for_potential(cls, neighbors: NeighborList) -> Pairs:
        """Return edges for the potential at owned rows: all of each pair for an owned end, nothing for a ghost."""
        mine = (neighbors.extended_rows < neighbors.n_owned).double()
        back = mine if neighbors.form == "half" else torch.zeros_like(mine)
        return cls._of(neighbors, torch.ones_like(mine), back)

    @classmethod
    def _of(cls, neighbors: NeighborList, to_receiver: torch.Tensor, to_sender: torch.Tensor) -> Pairs:
        splits, senders = neighbors.row_splits, neighbors.senders
        if neighbors.n_receivers > neighbors.n_owned:
            splits = splits[: neighbors.n_owned + 1]
            senders = senders[: int(splits[-1])]
        return cls(splits.contiguous(), senders.contiguous(), to_receiver, to_sender)

    def _shared(self, neighbors: NeighborList, ids: torch.Tensor) -> Pairs:
        """Leave out pairs with a ghost that its owner takes: about every second one, whichever the ids are."""
        rows = neighbors.extended_rows
        cross = (rows >= neighbors.n_owned)[self.senders].nonzero()[:, 0]
        mine, other = ids[neighbors.receivers[cross]], ids[rows[self.senders[cross]]]
        keep = torch.ones_like(self.senders, dtype=torch.bool)
        keep[cross] = (mine < other) == ((mine + other) % 2 == 0)
        before = torch.nn.functional.pad(keep.cumsum(0, dtype=torch.int32), (1, 0))
        return Pairs(before[self.row_splits], self.senders[keep], self.to_receiver, self.to_sender)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order in which operators take them."""
        return self.row_splits, self.senders, self.to_receiver, self.to_sender


def owned_receivers(neighbors: NeighborList) -> NeighborList:
    """Return a list in which each pair is under an owned row; a wide halo's half list may have it under a ghost."""
    return neighbors if neighbors.n_receivers == neighbors.n_owned else neighbors.full()


def pair_energy(
    points: torch.Tensor,
    charges: torch.Tensor,
    system: torch.Tensor,
    pairs: Pairs,
    *,
    n_systems: int,
    alpha: float,
    cutoff: float,
) -> torch.Tensor:
    """Return the energy of this rank's pairs by system.

    Parameters
    ----------
    points : Tensor, shape (n_extended, 3), float64
    charges, system : Tensor, shape (n_extended,), float64 and int64
    pairs : Pairs
        Of `Pairs.for_energy`.
    n_systems : int
    alpha, cutoff : float

    Returns
    -------
    Tensor, shape (S,), float64
        e^2/Angstrom.
    """
    energy: torch.Tensor = _pair_energy(points, charges, system, *pairs.tensors(), n_systems, alpha, cutoff)[
        0
    ]
    return energy


def pair_potential(
    points: torch.Tensor, charges: torch.Tensor, pairs: Pairs, *, alpha: float, cutoff: float
) -> torch.Tensor:
    """Return what the edges of `pairs` (of `Pairs.for_potential`) give each extended row (n_extended,), e/Angstrom."""
    made: torch.Tensor = _pair_potential(points, charges, *pairs.tensors(), alpha, cutoff)
    return made


# -- as torch operations -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Edges:
    """Edges for torch operations; one beyond the cutoff counts for neither end."""

    receivers: torch.Tensor
    senders: torch.Tensor
    to_receiver: torch.Tensor
    to_sender: torch.Tensor

    @classmethod
    def within(cls, points: torch.Tensor, pairs: tuple[torch.Tensor, ...], cutoff: float) -> _Edges:
        row_splits, senders, to_receiver, to_sender = pairs
        rows = torch.arange(row_splits.shape[0] - 1, device=points.device)
        receivers = rows.repeat_interleave(row_splits.diff().long(), output_size=senders.shape[0])
        senders = senders.long()
        with torch.no_grad():  # no mask: its size would have to be waited for
            far = (points[senders] - points[receivers]).square().sum(1) >= cutoff * cutoff
        parts = (part[senders].masked_fill(far, 0.0) for part in (to_receiver, to_sender))
        return cls(receivers, senders, *parts)


def _kernel_and_slope(points: torch.Tensor, edges: _Edges, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g (E,) and its gradient for the sender's place (E, 3), differentiable."""
    vectors = points[edges.senders] - points[edges.receivers]
    r2 = vectors.square().sum(1)
    r = r2.sqrt()
    g = torch.erfc(alpha * r) / r
    steep = (g + TWO_OVER_ROOT_PI * alpha * torch.exp(-alpha * alpha * r2)) / r2
    return g, -steep[:, None] * vectors


def _sums(
    points: torch.Tensor,
    charges: torch.Tensor,
    pairs: tuple[torch.Tensor, ...],
    alpha: float,
    cutoff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pair_sums` as torch operations: potential (n,) and gradient of half of charge times potential (n, 3)."""
    edges = _Edges.within(points, pairs, cutoff)
    g, slope = _kernel_and_slope(points, edges, alpha)
    from_sender = edges.to_receiver * charges[edges.senders]
    from_receiver = edges.to_sender * charges[edges.receivers]
    potential = torch.zeros_like(charges).index_add(0, edges.receivers, from_sender * g)
    potential = potential.index_add(0, edges.senders, from_receiver * g)
    force = slope * charges[edges.receivers, None] * charges[edges.senders, None]
    gradient = torch.zeros_like(points).index_add(0, edges.receivers, -edges.to_receiver[:, None] * force)
    return potential, gradient.index_add(0, edges.senders, edges.to_sender[:, None] * force)


# -- the energy --------------------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd_pme::pair_energy", mutates_args=())
def _pair_energy(
    points: torch.Tensor,
    charges: torch.Tensor,
    system: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    to_receiver: torch.Tensor,
    to_sender: torch.Tensor,
    n_systems: int,
    alpha: float,
    cutoff: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the energy (S,) and its gradients for charges (n,) and points (n, 3)."""
    potential, gradient = pair_sums(
        points, charges, row_splits, senders, to_receiver, to_sender, alpha, cutoff
    )
    rows = 0.5 * charges * potential
    energy = rows.sum()[None] if n_systems == 1 else rows.new_zeros(n_systems).index_add_(0, system, rows)
    return energy, potential, gradient


@_pair_energy.register_fake
def _(
    points: torch.Tensor,
    charges: torch.Tensor,
    system: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    to_receiver: torch.Tensor,
    to_sender: torch.Tensor,
    n_systems: int,
    alpha: float,
    cutoff: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return charges.new_empty(n_systems), torch.empty_like(charges), torch.empty_like(points)


def _save_energy(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    points, charges, system, *pairs, ctx.n_systems, ctx.alpha, ctx.cutoff = inputs
    _, potential, gradient = output
    ctx.mark_non_differentiable(potential, gradient)
    ctx.save_for_backward(points, charges, system, potential, gradient, *pairs)


def _backward_energy(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    points, charges, system, potential, gradient, *pairs = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradient will be differentiated
        potential, gradient = _sums(points, charges, tuple(pairs), ctx.alpha, ctx.cutoff)
    weight = grad if ctx.n_systems == 1 else grad[system]
    return (weight[:, None] * gradient, weight * potential, *(None,) * 8)


_pair_energy.register_autograd(_backward_energy, setup_context=_save_energy)


# -- the potential -----------------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd_pme::pair_potential", mutates_args=())
def _pair_potential(
    points: torch.Tensor,
    charges: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    to_receiver: torch.Tensor,
    to_sender: torch.Tensor,
    alpha: float,
    cutoff: float,
) -> torch.Tensor:
    """Return the potential (n,)."""
    potential, _ = pair_sums(points, charges, row_splits, senders, to_receiver, to_sender, alpha, cutoff)
    return potential


@_pair_potential.register_fake
def _(
    points: torch.Tensor,
    charges: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    to_receiver: torch.Tensor,
    to_sender: torch.Tensor,
    alpha: float,
    cutoff: float,
) -> torch.Tensor:
    return torch.empty_like(charges)


def _save_potential(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    points, charges, *pairs, ctx.alpha, ctx.cutoff = inputs
    ctx.save_for_backward(points, charges, *pairs)


def _backward_potential(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    points, charges, *pairs = ctx.saved_tensors
    edges = _Edges.within(points, tuple(pairs), ctx.cutoff)
    g, slope = _kernel_and_slope(points, edges, ctx.alpha)
    at_receiver = edges.to_receiver * grad[edges.receivers]
    at_sender = edges.to_sender * grad[edges.senders]
    for_charges = torch.zeros_like(charges).index_add(0, edges.senders, at_receiver * g)
    for_charges = for_charges.index_add(0, edges.receivers, at_sender * g)
    pull = slope * (at_receiver * charges[edges.senders] + at_sender * charges[edges.receivers])[:, None]
    for_points = torch.zeros_like(points).index_add(0, edges.senders, pull)
    return (for_points.index_add(0, edges.receivers, -pull), for_charges, *(None,) * 6)


_pair_potential.register_autograd(_backward_potential, setup_context=_save_potential)
