"""Aligns what was recorded on ranks with what was recorded in one process, and tells how each result relates.

Results are the same if line, operation and occurrence are. What dim 0 counts follows from all runs together: of the
views that fit everywhere, rows come before edges, and edges before the whole.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nvdd_core.validate.compare import assemble, difference
from nvdd_core.validate.findings import Difference, Relation, View
from nvdd_core.validate.observe import Observation
from nvdd_core.validate.record import Key, Record
from nvdd_core.validate.views import Summary

_ORDER = (View.LOCAL, View.OWNED, View.EDGES, View.WHOLE)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_FLOOR = 1e-3
"""Values below this are compared absolutely: differences of nearly equal numbers keep no digits."""

_NOTHING = Difference(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Related:
    """A result of the reference and how the ranks' results relate to it.

    Attributes
    ----------
    record : Record
        Of the reference.
    view : View
    relation : Relation
    difference : Difference
    """

    record: Record
    view: View
    relation: Relation
    difference: Difference = _NOTHING


@dataclass(frozen=True)
class Aligned:
    """Every operation of the reference that ranks made as well, in order.

    Attributes
    ----------
    results : dict of Key to Related
    numbers : dict of int to Key
        Numbers of the reference's records, as in `Record.inputs`.
    """

    results: dict[Key, Related]
    numbers: dict[int, Key]

    def inputs(self, related: Related) -> list[Related]:
        """Return the results that an operation took."""
        keys = [self.numbers.get(number) for number in related.record.inputs]
        return [self.results[key] for key in keys if key is not None and key in self.results]

    def first(self, *relations: Relation) -> Related | None:
        """Return the first result with one of these relations."""
        return next((r for r in self.results.values() if r.relation in relations), None)


def align(reference: Observation, ranks: Sequence[Observation], dtype: torch.dtype) -> Aligned:
    """Relate every operation that was recorded in all runs."""
    theirs = [{r.key: r for r in rank.records.ops} if rank.records else {} for rank in ranks]
    results: dict[Key, Related] = {}
    numbers: dict[int, Key] = {}
    for number, record in enumerate(reference.records.ops if reference.records else ()):
        numbers[number] = record.key
        found = [by_key.get(record.key) for by_key in theirs]
        present = [r.summary for r in found if r is not None]
        if len(present) == len(found):
            view, relation, off = relate(reference, ranks, record.summary, present, dtype)
            results[record.key] = Related(record, view, relation, off)
    return Aligned(results, numbers)


def relate(
    reference: Observation,
    ranks: Sequence[Observation],
    right: Summary,
    found: Sequence[Summary],
    dtype: torch.dtype,
) -> tuple[View, Relation, Difference]:
    """Return what dim 0 of a result counts, how the ranks' results relate to the reference and how far they are."""
    view = _common_view(right, found)
    if view is None:
        return View.WHOLE, Relation.UNKNOWN, _NOTHING
    if view is View.WHOLE:
        return view, *_relate_whole(right, found, dtype)
    values = {id(o): s.views[view] for o, s in [*zip(ranks, found, strict=True), (reference, right)]}
    expected = assemble([reference], lambda o: values[id(o)][: o.n_owned])
    off = _difference(assemble(ranks, lambda o: values[id(o)][: o.n_owned]), expected, dtype)
    if not off.passed:
        return view, Relation.DIFFERENT, off
    if view is View.LOCAL:
        for rank in ranks:
            stale = _difference(values[id(rank)], expected[rank.ids], dtype)
            if not stale.passed:
                worst = tuple(int(rank.ids[k]) for k in stale.worst)
                return view, Relation.STALE, Difference(stale.max_abs, stale.max_rel, stale.tolerance, worst)
    return view, Relation.EQUAL, off


def folds(
    reference: Observation,
    ranks: Sequence[Observation],
    right: Summary,
    found: Sequence[Summary],
    dtype: torch.dtype,
) -> bool:
    """Tell whether local rows of all ranks, added by global id, are the reference's rows."""
    if _common_view(right, found) is not View.LOCAL:
        return False
    total = torch.zeros(reference.n_global, dtype=torch.float64)
    for rank, summary in zip(ranks, found, strict=True):
        total.index_add_(0, rank.ids, summary.views[View.LOCAL])
    expected = assemble([reference], lambda o: right.views[View.LOCAL])
    return _difference(total, expected, dtype).passed


def _common_view(right: Summary, found: Sequence[Summary]) -> View | None:
    for view in _ORDER:
        if all(view in summary.views for summary in (right, *found)):
            start = 0 if view is View.WHOLE else 1
            if all(summary.shape[start:] == right.shape[start:] for summary in found):
                return view
    return None


def _relate_whole(
    right: Summary, found: Sequence[Summary], dtype: torch.dtype
) -> tuple[Relation, Difference]:
    expected = right.views[View.WHOLE]
    values = [summary.views[View.WHOLE] for summary in found]
    off = max((_difference(value, expected, dtype) for value in values), key=lambda d: d.max_abs)
    if off.passed:
        return Relation.EQUAL, off
    total = torch.stack(values).sum(0)
    if _difference(total, expected, dtype).passed:
        return Relation.ADDS_UP, off
    if len(found) > 1 and all(_difference(value, expected * len(found), dtype).passed for value in values):
        return Relation.MULTIPLIED, off
    return Relation.DIFFERENT, off


def _difference(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> Difference:
    scale = float(right[right.isfinite()].abs().max()) if bool(right.isfinite().any()) else 0.0
    off = difference(found, right, 0.0)
    allowed = _TOLERANCE[dtype] * max(scale, _FLOOR)
    return Difference(off.max_abs, off.max_rel, allowed, off.worst if off.max_abs > allowed else ())
