"""The method in plain torch, for derivatives of higher order, which the kernels don't have.

Key objects: `count_gradient_vjp`, `energy_gradient_vjp`. Invariant: differentiable any number of times; the pairs
are taken in pieces, so that memory doesn't grow with their number unless the graph is kept. Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from nvdd_dftd3.kernels import STEEPNESS
from nvdd_dftd3.references import References

_PAIRS = 1 << 17
"""Pairs of one piece."""

Edges = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]
"""Row splits, senders, the local row of each extended row, and whether pairs are listed once."""
Pieces = Iterator[tuple[torch.Tensor, torch.Tensor]]


def count_gradient_vjp(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    points: torch.Tensor,
    radii: torch.Tensor,
    edges: Edges,
    cutoff: float,
) -> Sequence[torch.Tensor]:
    """Differentiate ``gradient . coordination_gradient(weight, points, ...)`` by `weight` and `points`."""

    def total(given: Sequence[torch.Tensor], receivers: torch.Tensor, senders: torch.Tensor) -> torch.Tensor:
        weight, points = given
        homes = edges[2][senders].long()
        r = _lengths(points, receivers, senders)
        count = torch.sigmoid(STEEPNESS * ((radii[receivers] + radii[homes]) / r - 1.0))
        return (count * _shares(weight, receivers, homes, edges[3]))[r <= cutoff].sum()

    return _vjp(total, [gradient], [weight, points], edges)


def energy_gradient_vjp(
    gradients: Sequence[torch.Tensor],
    weight: torch.Tensor,
    points: torch.Tensor,
    cn: torch.Tensor,
    species: torch.Tensor,
    references: References,
    edges: Edges,
    cutoff: float,
) -> Sequence[torch.Tensor]:
    """Differentiate ``gradients . dispersion_gradient(weight, points, cn, ...)`` by `weight`, `points` and `cn`."""
    n, kinds = edges[0].shape[0] - 1, species.long()

    def total(given: Sequence[torch.Tensor], receivers: torch.Tensor, senders: torch.Tensor) -> torch.Tensor:
        weight, points, cn = given
        homes = edges[2][senders].long()
        weights, _ = references.weights(cn, kinds)
        rows = references.c6_rows(weights[:n], kinds[:n])
        c6 = (rows[receivers, kinds[homes]] * weights[homes]).sum(1)
        six, eight, radius6, radius8 = references.pairs[kinds[receivers], kinds[homes]].unbind(1)
        r = _lengths(points, receivers, senders)
        energy = -0.5 * c6 * (six / (r**6 + radius6) + eight / (r**8 + radius8))
        return (energy * _shares(weight, receivers, homes, edges[3]))[r <= cutoff].sum()

    return _vjp(total, gradients, [weight, points, cn], edges)


def _vjp(
    total: Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor],
    gradients: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    edges: Edges,
) -> Sequence[torch.Tensor]:
    """Differentiate ``gradients . d total / d given[1:]`` by all of `given`, a piece of the pairs at a time."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        fresh = [t.view_as(t) if further and t.requires_grad else t.detach().requires_grad_() for t in given]
        found = [torch.zeros_like(t) for t in given]
        for receivers, senders in _pieces(edges):
            slopes = torch.autograd.grad(total(fresh, receivers, senders), fresh[1:], create_graph=True)
            along = torch.stack([(g * s).sum() for g, s in zip(gradients, slopes, strict=True)]).sum()
            parts = torch.autograd.grad(along, fresh, create_graph=further)
            found = [old + part for old, part in zip(found, parts, strict=True)]
    return found


def _pieces(edges: Edges) -> Pieces:
    """Yield receivers and senders of some pairs at a time, int64."""
    splits, senders = edges[0].long(), edges[1]
    rows = torch.arange(splits.shape[0] - 1, device=splits.device)
    receivers = torch.repeat_interleave(rows, splits.diff(), output_size=senders.shape[0])
    for start in range(0, senders.shape[0], _PAIRS):
        yield receivers[start : start + _PAIRS], senders[start : start + _PAIRS].long()


def _lengths(points: torch.Tensor, receivers: torch.Tensor, senders: torch.Tensor) -> torch.Tensor:
    r: torch.Tensor = torch.linalg.vector_norm(points[senders] - points[receivers], dim=1)
    return r


def _shares(weight: torch.Tensor, receivers: torch.Tensor, homes: torch.Tensor, half: bool) -> torch.Tensor:
    """Return how much each pair counts: the weights of the ends that it acts on; rows beyond `weight` have none."""
    n = weight.shape[0]
    padded = torch.cat([weight, weight.new_zeros(1)])
    shares = padded[receivers.clamp(max=n)]
    if half:
        shares = shares + padded[homes.clamp(max=n)]
    return shares
