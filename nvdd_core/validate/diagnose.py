"""Tells the cause of a difference from what was recorded, by rules in a fixed order.

What is certain comes first: edges that are missing, scripted code that hid rows from the handlers, outputs whose raw
values contradict their OutputSpec; then what the first difference was traced to.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nvdd_core.spec import OutputSpec
from nvdd_core.validate.align import Related, align, relate
from nvdd_core.validate.compare import check_outputs, missing_edges
from nvdd_core.validate.findings import (
    Cause,
    Divergence,
    Helper,
    MissingEdges,
    OutputCheck,
    Place,
    RankError,
    Relation,
    Scripted,
    View,
)
from nvdd_core.validate.observe import Observation
from nvdd_core.validate.rules import fitting_rules, follow_from, raw_relations
from nvdd_core.validate.trace import Traced, trace

_DERIVED = ("forces", "stress", "node_virial")


@dataclass(frozen=True)
class Outcome:
    """What a run on ranks gave.

    Attributes
    ----------
    ranks : tuple of Observation
        Empty where a rank failed before it had anything to tell.
    error : RankError or None
    """

    ranks: tuple[Observation, ...]
    error: RankError | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What is known of one run on ranks; fields as in `ValidationReport`.

    Attributes
    ----------
    rules : dict of str to OutputSpec
        Outputs whose rule contradicts their raw values, and the rule that fits.
    progress : tuple of int
        Larger for a run that is nearer to being right.
    """

    passed: bool
    cause: Cause | None
    place: Place | None
    outputs: tuple[OutputCheck, ...]
    divergence: Divergence | None
    missing: tuple[MissingEdges, ...]
    helpers: tuple[Helper, ...]
    scripted: tuple[Scripted, ...]
    rules: dict[str, OutputSpec]
    progress: tuple[int, int, int]


def diagnose(reference: Observation, outcome: Outcome, dtype: torch.dtype) -> Diagnosis:
    """Compare a run with the reference and tell what is wrong with it."""
    ranks, error = outcome.ranks, outcome.error
    if not ranks:
        return Diagnosis(False, Cause.RAISED, None, (), None, (), (), (), {}, (0, 0, 0))
    raw = raw_relations(reference, ranks, dtype)
    outputs = () if error else check_outputs(reference, ranks, dtype, raw)
    missing = missing_edges(reference, ranks)
    n_right = sum(check.value.passed + check.passed for check in outputs)
    if error is None and not missing and all(check.passed for check in outputs):
        return Diagnosis(True, None, None, outputs, None, (), (), (), {}, (1, n_right, 0))
    aligned = align(reference, ranks, dtype)
    culprit = aligned.first(Relation.DIFFERENT, Relation.MULTIPLIED)
    evidence = _Evidence(
        missing=missing,
        swallowed=_swallowed(ranks, culprit),
        rules=fitting_rules(reference, ranks, dtype, raw, outputs, error),
        raw=raw,
        traced=None if culprit is None else trace(aligned, culprit, ranks),
        share=aligned.first(Relation.ADDS_UP),
        helpers=_helpers(reference, ranks, dtype),
        error=error,
        outputs=outputs,
    )
    cause, place = evidence.verdict()
    n_equal = sum(r.relation is Relation.EQUAL for r in aligned.results.values())
    return Diagnosis(
        passed=False,
        cause=cause,
        place=place,
        outputs=outputs,
        divergence=None if culprit is None else _divergence(culprit, evidence.traced),
        missing=missing,
        helpers=evidence.helpers,
        scripted=_scripted(ranks),
        rules=evidence.rules,
        progress=(int(error is None), n_right, n_equal),
    )


@dataclass(frozen=True)
class _Evidence:
    """What speaks for one cause or another."""

    missing: tuple[MissingEdges, ...]
    swallowed: Place | None
    rules: dict[str, OutputSpec]
    raw: dict[str, Relation]
    traced: Traced | None
    share: Related | None
    helpers: tuple[Helper, ...]
    error: RankError | None
    outputs: tuple[OutputCheck, ...]

    def verdict(self) -> tuple[Cause, Place | None]:
        """Return the cause that is most certain, and the line to mend."""
        traced, share = self.traced, self.share
        unknown = traced is None or traced.cause is Cause.UNKNOWN
        at = None if traced is None else traced.place
        by_rule = self._by_rule()
        shared = share is not None and bool(self.helpers or traced is not None)
        found = [
            (bool(self.missing), Cause.MISSING_GHOSTS, at),
            (self.swallowed is not None, Cause.SCRIPTED, self.swallowed),
            (self._rules_explain_everything(), by_rule, None),
            (not unknown, Cause.UNKNOWN if traced is None else traced.cause, at),
            (bool(self.rules), by_rule, None),
            (shared, Cause.PARTIAL_SUM, None if share is None else share.record.place),
            (self.error is not None, Cause.RAISED, None),
            (traced is None and self._values_agree(), Cause.GRADIENT, None),
        ]
        return next(((cause, place) for holds, cause, place in found if holds), (Cause.UNKNOWN, at))

    def _by_rule(self) -> Cause:
        shares = [name for name in self.rules if self.raw[name] is Relation.ADDS_UP]
        return Cause.OUTPUT_PARTIAL if shares else Cause.COUNTED_TWICE

    def _rules_explain_everything(self) -> bool:
        failing = {check.name for check in self.outputs if not check.passed}
        return bool(self.rules) and failing <= follow_from(self.rules)

    def _values_agree(self) -> bool:
        return all(check.value.passed or check.name in _DERIVED for check in self.outputs)


def _divergence(culprit: Related, traced: Traced | None) -> Divergence:
    record, stale = culprit.record, None if traced is None else traced.stale
    return Divergence(
        record.place, record.op, record.occurrence, culprit.view, culprit.relation, culprit.difference, stale
    )


def _scripted(ranks: Sequence[Observation]) -> tuple[Scripted, ...]:
    calls = ranks[0].records.scripts if ranks[0].records else []
    found: dict[tuple[str, str], Scripted] = {}
    for call in calls:
        key = (call.name, str(call.place))
        n = found[key].calls if key in found else 0
        found[key] = Scripted(call.name, call.place, n + 1, call.scatters)
    return tuple(found.values())


def _swallowed(ranks: Sequence[Observation], culprit: Related | None) -> Place | None:
    """Return where scripted code took a ShardTensor before the first difference, scatters first."""
    records = ranks[0].records
    if records is None or not records.scripts:
        return None
    at = next(
        (k for k, r in enumerate(records.ops) if culprit and r.key == culprit.record.key), len(records.ops)
    )
    before = [call for call in records.scripts if call.at <= at]
    before.sort(key=lambda call: not call.scatters)
    return before[0].place if before else None


def _helpers(reference: Observation, ranks: Sequence[Observation], dtype: torch.dtype) -> tuple[Helper, ...]:
    """Return functions whose results are shares that add up, and that no adapter of the spec declares."""
    theirs = [{r.key: r for r in rank.records.helpers} if rank.records else {} for rank in ranks]
    declared = {a.target.rpartition(":")[2] for a in ranks[0].adapters}
    found: dict[Place, int] = {}
    for record in reference.records.helpers if reference.records else ():
        present = [by_key[record.key].summary for by_key in theirs if record.key in by_key]
        if len(present) < len(ranks) or record.place.function in declared:
            continue
        view, relation, _ = relate(reference, ranks, record.summary, present, dtype)
        if view is View.WHOLE and relation is Relation.ADDS_UP:
            found[record.place] = found.get(record.place, 0) + 1
    return tuple(Helper(place, Relation.ADDS_UP, calls) for place, calls in found.items())
