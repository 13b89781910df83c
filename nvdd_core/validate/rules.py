"""Outputs as the model returned them, and the rules by which the ranks' values of an output should become one.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nvdd_core.spec import OutputKind, OutputSpec, Reduce
from nvdd_core.validate.align import folds, relate
from nvdd_core.validate.findings import OutputCheck, RankError, Relation
from nvdd_core.validate.observe import Observation


def raw_relations(
    reference: Observation, ranks: Sequence[Observation], dtype: torch.dtype
) -> dict[str, Relation]:
    """Relate what forward returned under each name, before the framework combined it."""
    found = {}
    for name, right in (reference.records.outputs if reference.records else {}).items():
        given = [rank.records.outputs.get(name) if rank.records else None for rank in ranks]
        present = [summary for summary in given if summary is not None]
        if len(present) == len(ranks):
            _, relation, _ = relate(reference, ranks, right, present, dtype)
            if relation is Relation.DIFFERENT and folds(reference, ranks, right, present, dtype):
                relation = Relation.ADDS_UP
            found[name] = relation
    return found


def fitting_rules(
    reference: Observation,
    ranks: Sequence[Observation],
    dtype: torch.dtype,
    raw: dict[str, Relation],
    outputs: Sequence[OutputCheck],
    error: RankError | None,
) -> dict[str, OutputSpec]:
    """Return, for each failing output whose raw values contradict its rule, the rule that fits them."""
    spec = ranks[0].spec
    failing = {check.name for check in outputs if not check.value.passed}
    found = {}
    for name, relation in raw.items():
        if not (error or name in failing or (name == "node_energy" and "energy" in failing)):
            continue
        per_node = name in reference.rows or spec.per_row(name)
        now = spec.output(name).combined
        if relation is Relation.ADDS_UP and now is not Reduce.ALL_REDUCE:
            rule = Reduce.ALL_REDUCE
        elif relation in (Relation.EQUAL, Relation.STALE) and now is Reduce.ALL_REDUCE:
            rule = Reduce.OWNED_ONLY
        else:
            continue
        found[name] = OutputSpec(OutputKind.PER_NODE if per_node else OutputKind.PER_GRAPH, rule)
    return found


def follow_from(rules: Iterable[str]) -> set[str]:
    """Return the outputs that are wrong where those of `rules` are."""
    names = set(rules)
    return names | {"energy", "forces", "stress"} if names & {"energy", "node_energy"} else names
