"""Traces the first result that differs back through what it was made of.

To rows whose ghosts are stale, to a value that is this rank's share only, to a sum that counts ghosts, to a scatter
that is followed by the wrong exchange.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvdd_core.validate.align import Aligned, Related
from nvdd_core.validate.findings import Cause, Place, Relation, View
from nvdd_core.validate.observe import Observation

_SCATTERS = ("scatter", "index_add", "index_put", "index_reduce")
_RIGHT = (Relation.EQUAL, Relation.STALE)


@dataclass(frozen=True)
class Traced:
    """Where a difference comes from.

    Attributes
    ----------
    cause : Cause
    place : Place
        The line to mend.
    stale : Place or None
        Where the rows that are read, and whose ghosts are stale, were written.
    """

    cause: Cause
    place: Place
    stale: Place | None = None


def trace(aligned: Aligned, culprit: Related, ranks: Sequence[Observation]) -> Traced:
    """Return where the first result that differs gets it from."""
    place = culprit.record.place
    inputs = aligned.inputs(culprit)
    if culprit.relation is Relation.MULTIPLIED:
        return Traced(Cause.COUNTED_TWICE, place)
    share = next((r for r in inputs if r.view is View.WHOLE and r.relation is Relation.ADDS_UP), None)
    if share is not None:
        return Traced(Cause.PARTIAL_SUM, _origin(aligned, share).record.place)
    if culprit.view is View.WHOLE:
        return Traced(_of_a_reduction(inputs, ranks), place)
    if any(word in culprit.record.op for word in _SCATTERS):
        right = bool(inputs) and all(r.relation in _RIGHT for r in inputs)
        return Traced(Cause.WRONG_SCATTER if right else Cause.UNKNOWN, place)
    stale = next((r.record.place for r in inputs if r.relation is Relation.STALE), None)
    return Traced(Cause.UNKNOWN, place) if stale is None else Traced(Cause.STALE_GHOSTS, stale, stale)


def _of_a_reduction(inputs: Sequence[Related], ranks: Sequence[Observation]) -> Cause:
    """Return what is wrong with a value without rows that was made of `inputs`."""
    rows = [r for r in inputs if r.view is not View.WHOLE and r.relation in _RIGHT]
    if not rows:
        return Cause.UNKNOWN
    with_ghosts = any(r.view is View.LOCAL for r in rows) and any(len(o.ids) > o.n_owned for o in ranks)
    return Cause.GHOSTS_COUNTED if with_ghosts else Cause.PARTIAL_SUM


def _origin(aligned: Aligned, related: Related) -> Related:
    """Follow a share back to the operation that made it of rows."""
    while True:
        before = [
            r for r in aligned.inputs(related) if r.view is View.WHOLE and r.relation is related.relation
        ]
        if not before:
            return related
        related = before[0]
