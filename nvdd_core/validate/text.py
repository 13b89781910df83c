"""A report in words.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nvdd_core.spec import StrategyKind
from nvdd_core.validate.findings import (
    Cause,
    Difference,
    Divergence,
    OutputCheck,
    Relation,
    ValidationReport,
    View,
)

_RELATIONS = {
    Relation.EQUAL: "equal",
    Relation.STALE: "right on owned rows, stale on ghosts",
    Relation.ADDS_UP: "different on each rank; the ranks' values add up to it",
    Relation.MULTIPLIED: "as many times too large as there are ranks",
    Relation.DIFFERENT: "different",
    Relation.UNKNOWN: "not comparable",
}
_VIEWS = {
    View.LOCAL: "local rows, owned ones compared by id",
    View.OWNED: "owned rows, by id",
    View.EDGES: "edges, summed into each owned receiver",
    View.WHOLE: "no rows, compared whole",
}


def report_text(report: ValidationReport) -> str:
    """Return the report for people."""
    lines = [
        f"model      {report.model} ({report.dtype}, {report.device}, {report.ranks} ranks, {report.strategy})",
        f"structure  {report.n_rows} atoms, {report.n_edges} directed edges",
        f"result     {_headline(report)}",
        "",
        *_outputs(report),
        *_findings(report),
        *_machinery(report),
    ]
    lines += [f"fix        {fix}" for fix in report.fixes]
    lines += [f"warning    {report.warning}"] if report.warning else []
    lines += [f"next       {report.next_action}"]
    return "\n".join(lines) + "\n"


def _headline(report: ValidationReport) -> str:
    if report.passed:
        return "passed"
    cause = "" if report.cause is None else f": {report.cause.value.replace('_', ' ')}"
    return f"failed{cause}{'; a spec that works was found' if report.fixed else ''}"


def _outputs(report: ValidationReport) -> Iterator[str]:
    if not report.outputs:
        return
    yield f"{'output':<14} {'':<4} {'max diff':>10} {'relative':>10} {'allowed':>10} {'gradient':>10}  worst rows"
    for check in report.outputs:
        yield _output(check)
    yield ""


def _output(check: OutputCheck) -> str:
    value, gradient = check.value, check.gradient
    word = "ok" if check.passed else "FAIL"
    derived = "-" if gradient is None else f"{gradient.max_abs:.1e}{'' if gradient.passed else '!'}"
    off = value if gradient is None or value.worst else gradient
    worst = _rows(off) if check.per_row or off is gradient else ""
    return (
        f"{check.name:<14} {word:<4} {value.max_abs:>10.1e} {value.max_rel:>10.1e} {value.tolerance:>10.1e} "
        f"{derived:>10}  {worst}"
    ).rstrip()


def _rows(off: Difference) -> str:
    return ", ".join(map(str, off.worst))


def _findings(report: ValidationReport) -> Iterator[str]:
    if report.error is not None:
        yield f"error      {report.error.type}: {report.error.message}"
    if report.divergence is not None:
        yield from _divergence(report.divergence)
    for missing in report.missing:
        pairs = ", ".join(f"{sender} -> {receiver}" for sender, receiver in missing.pairs)
        yield f"missing    rank {missing.rank} lacks {missing.count} edges: {pairs}, ..."
    for helper in report.helpers:
        yield f"helper     {helper.place.function} ({helper.place}): each rank's result is a share of the whole"
    for script in report.scripted:
        inside = f", with {', '.join(script.scatters)} inside" if script.scatters else ""
        yield f"scripted   {script.name} took a ShardTensor at {script.place} ({script.calls} calls){inside}"


def _divergence(found: Divergence) -> Iterator[str]:
    module = f", module {found.place.module}" if found.place.module else ""
    yield f"first      {found.op} at {found.place} in {found.place.function}{module}, call {found.occurrence + 1}"
    yield f"           {_RELATIONS[found.relation]} ({_VIEWS[found.view]}), by {found.difference.max_abs:.1e}"
    if found.difference.worst and found.view is not View.WHOLE:
        yield f"           rows {_rows(found.difference)}"
    if found.stale is not None:
        yield f"           reads rows written at {found.stale}, whose ghosts are stale"


def _machinery(report: ValidationReport) -> Iterator[str]:
    for handler in report.handlers:
        if handler.handler != "plain":
            yield f"handler    {handler.handler}: {handler.op}, {handler.calls} calls, {handler.bytes} bytes"
    for adapter in report.adapters:
        member = adapter.name.removesuffix(adapter.target).rstrip("/")  # of a composition, else nothing
        where = f"{adapter.target} of {member}" if member and member != adapter.name else adapter.target
        yield f"adapter    {adapter.kind} on {where}: {adapter.state}{_because(adapter.error)}"
    for traffic in report.traffic:
        yield f"sent       {traffic.kind}: {traffic.calls} calls, {traffic.bytes} bytes, all ranks"
    if report.handlers or report.adapters or report.traffic:
        yield ""


def _because(error: str | None) -> str:
    return f" ({error})" if error else ""


def warning(cutoff: float, n_edges: int, lacking: int, n_ranks: int) -> str:
    """Return why a validation says little; `lacking` is the least number of rows that a rank has no copy of."""
    if n_edges == 0:
        return (
            f"no two atoms are within {cutoff:g} A, so hardly anything was compared: take a denser structure"
        )
    if lacking == 0:
        return (
            "a rank has all atoms, as its own or as ghosts, so faults may hide: take a structure that is longer than "
            f"{2 * n_ranks} x {cutoff:g} A in one direction, or fewer ranks"
        )
    return ""


# -- one thing to do -----------------------------------------------------------------------------------------------


def next_action(report: ValidationReport) -> str:
    """Return the one thing to do next."""
    if report.passed:
        return "nothing: the model gives the same on ranks as in one process"
    if report.fixed:
        return "return the spec that was found from distribution_spec (--save writes it), then validate again"
    if report.cause is None:
        return "look at the outputs that fail"
    return _ACTIONS[report.cause](report)


_MORE_LAYERS = (
    "nothing is exchanged under wide-halo, and the model reads further than `layers` times its cutoff: declare one "
    "layer for each time that neighbours read what was computed from neighbours, also in foreign code"
)


def _at(report: ValidationReport) -> str:
    return "" if report.place is None else f" at {report.place}"


def _failing(report: ValidationReport) -> str:
    names = [check.name for check in report.outputs if not check.passed]
    return ", ".join(names) or "an output"


def _stale(report: ValidationReport) -> str:
    if report.strategy == StrategyKind.WIDE_HALO.value:
        return _MORE_LAYERS
    return f"call refresh_neighbors on what is written{_at(report)} before neighbours read it"


def _missing(report: ValidationReport) -> str:
    if report.strategy == StrategyKind.WIDE_HALO.value:
        return _MORE_LAYERS
    if report.reach is not None:
        return (
            f"the model reads rows beyond its declared cutoff (or layers): with {report.reach:g} A ranks agree; "
            "declare the cutoff that it reads"
        )
    return "rows are missing though lists say that they are needed: report this with the structure; it is nvdd's fault"


def _scripted(report: ValidationReport) -> str:
    names = ", ".join(dict.fromkeys(script.name for script in report.scripted))
    return (
        f"hand {names} plain rows (to_local) and call refresh_neighbors on what it returns{_at(report)}, or declare a "
        "JitAdapter for it"
    )


_ACTIONS: dict[Cause, Callable[[ValidationReport], str]] = {
    Cause.STALE_GHOSTS: _stale,
    Cause.WRONG_SCATTER: lambda r: (
        f"look at the scatter{_at(r)}: call scatter_to_owners on its result if it writes to ghosts, else "
        "refresh_neighbors"
    ),
    Cause.PARTIAL_SUM: lambda r: (
        f"use system_sum for the value{_at(r)}, which is made of this rank's rows alone; for a mean, divide by the "
        "number of rows of all ranks"
    ),
    Cause.GHOSTS_COUNTED: lambda r: (
        f"leave ghosts out of the sum{_at(r)}: take x[:batch.n_owned], and system_sum where the model goes on with it"
    ),
    Cause.COUNTED_TWICE: lambda r: (
        f"what is summed over ranks{_at(r)} was summed before: sum once"
        if r.place is not None
        else f"declare Reduce.OWNED_ONLY for what is complete on every rank ({_failing(r)}), or return a share"
    ),
    Cause.OUTPUT_PARTIAL: lambda r: f"declare Reduce.ALL_REDUCE in the OutputSpec of {_failing(r)}",
    Cause.SCRIPTED: _scripted,
    Cause.MISSING_GHOSTS: _missing,
    Cause.GRADIENT: lambda r: (
        "values agree and derivatives don't: look for detach(), .data, .item() or a collective without a gradient; "
        "use system_sum and refresh_neighbors, which have one"
    ),
    Cause.REFERENCE: lambda r: f"the model fails in one process{_at(r)}: mend that first",
    Cause.RAISED: lambda r: (
        f"the model raises on ranks only{_at(r)}; mind that a rank may have no rows or edges"
    ),
    Cause.UNKNOWN: lambda r: f"compare by hand{_at(r)}: the first result that differs is made there",
}
