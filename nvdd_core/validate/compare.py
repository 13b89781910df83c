"""Compares what ranks observed with what one process observed: outputs, gradients, edges.

Layer: validate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from nvdd_core.validate.findings import Difference, MissingEdges, OutputCheck, Relation
from nvdd_core.validate.observe import Observation

# (energy an atom, node energies), everything else, gradients; times the largest value where that is above one.
_TOLERANCES = {torch.float64: (1e-11, 1e-9, 1e-8), torch.float32: (1e-6, 1e-4, 1e-3)}
_NAMED = 5
"""Rows that are named."""


def difference(found: torch.Tensor, right: torch.Tensor, tolerance: float) -> Difference:
    """Return how far `found` is from `right`, both (entries, ...); two NaN in one place are equal."""
    if found.shape != right.shape:
        return Difference(float("inf"), float("inf"), tolerance)
    if right.numel() == 0:
        return Difference(0.0, 0.0, tolerance)
    found, right = torch.atleast_1d(found.double()), torch.atleast_1d(right.double())
    same = (found == right) | (found.isnan() & right.isnan())
    off = torch.where(same, 0.0, (found - right).abs()).reshape(right.shape[0], -1)
    off = torch.where(off.isnan(), float("inf"), off).amax(1)
    scale = float(right[right.isfinite()].abs().max()) if bool(right.isfinite().any()) else 0.0
    largest = float(off.max())
    allowed = tolerance * max(1.0, scale)
    order = torch.argsort(off, descending=True)[:_NAMED]
    worst = tuple(int(i) for i in order if float(off[i]) > allowed)
    return Difference(largest, largest / scale if scale else largest, allowed, worst)


def assemble(ranks: Sequence[Observation], rows: Callable[[Observation], torch.Tensor]) -> torch.Tensor:
    """Return rows of all ranks in the order of global ids; ids that nobody owns are NaN."""
    parts = [rows(rank) for rank in ranks]
    out = torch.full((ranks[0].n_global, *parts[0].shape[1:]), float("nan"), dtype=torch.float64)
    for rank, part in zip(ranks, parts, strict=True):
        out[rank.owned_ids] = part.double()
    return out


def check_outputs(
    reference: Observation,
    ranks: Sequence[Observation],
    dtype: torch.dtype,
    raw: Mapping[str, Relation],
) -> tuple[OutputCheck, ...]:
    """Compare all outputs and gradients of the reference with those of the ranks."""
    energy, other, gradient = _TOLERANCES[dtype]
    checks = []
    for name in [*reference.whole, *reference.rows]:
        if name in reference.rows:
            tolerance = energy if name == "node_energy" else other
            rows = _rows_of(name)
            value = difference(assemble(ranks, rows), assemble([reference], rows), tolerance)
        else:
            right, tolerance = reference.whole[name], other
            found = [rank.whole[name] for rank in ranks]
            if name == "energy":  # may be off by so much for each atom of its system
                share, tolerance = 1.0 / reference.n_rows.clamp(min=1).double(), energy
                right, found = right * share, [each * share for each in found]
            value = _worst([difference(each, right, tolerance) for each in found])
        derived = _gradient(name, reference, ranks, gradient)
        checks.append(
            OutputCheck(name, name in reference.rows, value, derived, raw.get(name, Relation.UNKNOWN))
        )
    return tuple(checks)


def _rows_of(name: str) -> Callable[[Observation], torch.Tensor]:
    return lambda observation: observation.rows[name]


def _gradient(
    name: str, reference: Observation, ranks: Sequence[Observation], tolerance: float
) -> Difference | None:
    right = reference.gradients.get(name)
    if right is None:
        return None
    if any(rank.gradients.get(name) is None for rank in ranks):
        return Difference(float("inf"), float("inf"), tolerance)
    found = assemble(ranks, lambda o: _given(o.gradients[name]))
    return difference(found, assemble([reference], lambda o: _given(o.gradients[name])), tolerance)


def _given(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        raise ValueError("a gradient that is missing can't be compared")
    return gradient


def _worst(found: Sequence[Difference]) -> Difference:
    return max(found, key=lambda d: d.max_abs)


def missing_edges(reference: Observation, ranks: Sequence[Observation]) -> tuple[MissingEdges, ...]:
    """Return the edges of the reference into each rank's owned rows that the rank lacks."""
    senders, receivers = reference.edges
    found = []
    for number, rank in enumerate(ranks):
        owned = torch.zeros(reference.n_global, dtype=torch.bool)
        owned[rank.owned_ids] = True
        mine = owned[receivers]
        lacking = _pairs(torch.stack([senders[mine], receivers[mine]])) - _pairs(rank.edges)
        if lacking:
            found.append(MissingEdges(number, lacking.total(), tuple(sorted(lacking))[:_NAMED]))
    return tuple(found)


def _pairs(edges: torch.Tensor) -> Counter[tuple[int, int]]:
    """Count edges by sender and receiver; several images of a sender are several edges."""
    unique, counts = torch.unique(edges, dim=1, return_counts=True)
    return Counter({(s, r): n for (s, r), n in zip(unique.T.tolist(), counts.tolist(), strict=True)})
