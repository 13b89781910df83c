"""Runs the suites without pytest, for an installed plugin, and tells the results as a table or as JSON.

Key objects: `run`, `CheckResult`, ``python -m nvdd_core.testing``. Invariant: every check of every suite has one
row, with the reason where it was not passed. Layer: testing.
"""

from __future__ import annotations

import importlib.util
import json
import time
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any

import click

import nvdd_core
from nvdd_core.errors import InputError, NvddError
from nvdd_core.plugins import PluginStatus, default_manager
from nvdd_core.plugins.options import parse_options
from nvdd_core.plugins.report import table
from nvdd_core.testing.base import Conformance, override_reasons, standard_tests
from nvdd_core.testing.capabilities import Reduced
from nvdd_core.testing.failures import ConformanceError, PartlyChecked, anchor_of, link
from nvdd_core.testing.suites import (
    SUITES,
    AdapterSuite,
    DistributedSuite,
    ModelSuite,
    PluginSuite,
    SpecSuite,
)

SCHEMA = 1
_QUICK_RANKS = (1, 2)
_OPTION_HELP = "Option of the model's loader; VALUE is read as TOML where it is that, else as text."


@dataclass(frozen=True)
class CheckResult:
    """How one check of one suite ended.

    Attributes
    ----------
    subject : str
        Plugin, or plugin and model.
    suite, check : str
    outcome : str
        ``ok``, ``failed`` or ``skipped``.
    reason : str
    link : str
        Where the check is documented.
    seconds : float
    """

    subject: str
    suite: str
    check: str
    outcome: str
    reason: str
    link: str
    seconds: float


def run(
    subject: type[Conformance], suites: Iterable[type[Conformance]] = SUITES, *, name: str = ""
) -> Iterator[CheckResult]:
    """Run suites on a subject and yield one result a check, as they end.

    Parameters
    ----------
    subject : class
        An author's class derived from `Conformance`.
    suites : iterable of class
    name : str
        What the subject is called in results.
    """
    done: set[str] = set()
    for suite in suites:
        kind: Any = type(suite.__name__, (subject, suite), {})
        try:
            for test in standard_tests(kind):
                if test in done and test in vars(Conformance):
                    continue  # what concerns the subject itself is told once
                done.add(test)
                yield _run_one(kind, suite.__name__, test, name)
        finally:
            kind.teardown_class()


def _run_one(kind: type[Conformance], suite: str, test: str, name: str) -> CheckResult:
    start = time.perf_counter()
    outcome, reason, where = "ok", override_reasons(kind).get(test, ""), link(anchor_of(test))
    try:
        method: Callable[[], Any] = getattr(kind(), test)
        with _noted() as notes:
            method()
        reason = "; ".join([*([reason] if reason else []), *notes])
    except unittest.SkipTest as error:
        outcome, reason = "skipped", str(error)
    except ConformanceError as error:
        outcome, reason = "failed", error.message
        where = link(error.anchor or anchor_of(test))
    except Exception as error:  # from an author's own override, which has no @check
        outcome, reason = "failed", f"it raised {type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - start, 3)
    return CheckResult(name, suite, test.removeprefix("test_"), outcome, reason, where, seconds)


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Collect what checks say that they left out; other warnings go their way."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", PartlyChecked)
        yield notes
    for warning in seen:
        if issubclass(warning.category, PartlyChecked):
            notes.append(str(warning.message))
        else:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


def reductions(subject: type[Conformance]) -> dict[str, str]:
    """Return what an author declared as reduced or changed, with the reasons, for a report."""
    values = dict(subject.capabilities)
    found = {f"capability {n}": _reduced(v) for n, v in values.items() if isinstance(v, Reduced)}
    found |= {f"tolerance {n}": f"{t.relative:g} relative: {t.reason}" for n, t in subject.tolerances.items()}
    return found


def _reduced(value: Reduced) -> str:
    return f"{'only ' + ', '.join(value.values) if value.values else 'no'}: {value.reason}"


def subjects(
    plugin: str, models: tuple[str, ...], attributes: dict[str, Any]
) -> dict[str, type[Conformance]]:
    """Return one subject for each of the plugin's usable models, by name.

    Raises
    ------
    NvddError
        When there is no such plugin, or it has no such model.
    """
    (record, *_) = default_manager().named(plugin)
    names = [row.decl.name for row in record.models]
    if unknown := [name for name in models if name not in names]:
        raise InputError(
            f"plugin '{plugin}' has no model '{unknown[0]}'; its models: {', '.join(names) or 'none'}"
        )
    rows = [row for row in record.models if not models or row.decl.name in models]
    found: dict[str, type[Conformance]] = {}
    for row in rows:
        if row.status is not PluginStatus.UNAVAILABLE:
            own = {**attributes, "plugin": plugin, "model": f"{plugin}/{row.decl.name}"}
            found[f"{plugin}/{row.decl.name}"] = type("Subject", (Conformance,), own)
    return found


def own_profile(plugin: str) -> str | None:
    """Return ``package.conformance:Profile`` where the plugin's package has such a module, else None.

    Raises
    ------
    NvddError
        When there is no such plugin.
    """
    (record, *_) = default_manager().named(plugin)
    package = record.entry.value.partition(":")[0].partition(".")[0]
    where = f"{package}.conformance"
    found = importlib.util.find_spec(package) and importlib.util.find_spec(where)
    return f"{where}:Profile" if found else None


@click.command("python -m nvdd_core.testing")
@click.argument("name")
@click.option("--quick", is_flag=True, help="Leave out 4 ranks.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (schema 1).")
@click.option("--model", "models", multiple=True, help="Only this model of the plugin; may be repeated.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=_OPTION_HELP)
@click.option("--symbol", default="Ar", show_default=True, help="Element of the default structures.")
@click.option(
    "--profile",
    metavar="MODULE:CLASS",
    help="A class derived from Conformance that says the rest; default PACKAGE.conformance:Profile, if there is one.",
)
def main(
    name: str,
    quick: bool,
    as_json: bool,
    models: tuple[str, ...],
    options: tuple[str, ...],
    symbol: str,
    profile: str | None,
) -> None:
    """Run every suite on the installed plugin NAME. Exits with 1 when a check failed."""
    attributes: dict[str, Any] = {"ranks": _QUICK_RANKS} if quick else {}
    try:
        if profile is None and not models and not options:
            profile = own_profile(name)
        if profile is not None:
            author = resolve_name(profile)
            chosen = {profile: type("Subject", (author,), {"plugin": name, **attributes})}
        else:
            given = {**attributes, "options": parse_options(options), "symbol": symbol}
            chosen = subjects(name, models, given)
    except NvddError as error:
        raise click.ClickException(str(error)) from error
    results = list(_all(name, chosen))
    emit(name, chosen, results, as_json)
    if any(result.outcome == "failed" for result in results):
        raise SystemExit(1)


def _all(plugin: str, chosen: dict[str, type[Conformance]]) -> Iterator[CheckResult]:
    package = type("Subject", (Conformance,), {"plugin": plugin})
    yield from run(package, [PluginSuite], name=plugin)
    if not chosen:
        yield from run(package, [SpecSuite, AdapterSuite], name=plugin)
    for name, subject in chosen.items():
        yield from run(subject, [SpecSuite, AdapterSuite, ModelSuite, DistributedSuite], name=name)


def emit(
    plugin: str, chosen: dict[str, type[Conformance]], results: list[CheckResult], as_json: bool
) -> None:
    """Write results to standard output."""
    notes = {name: reductions(subject) for name, subject in chosen.items()}
    if as_json:
        document = {
            "schema": SCHEMA,
            "core": nvdd_core.__version__,
            "plugin": plugin,
            "reductions": notes,
            "checks": [asdict(result) for result in results],
        }
        click.echo(json.dumps(document, indent=2))
        return
    rows = [
        (
            r.subject,
            r.suite,
            r.check,
            r.outcome,
            f"{r.seconds:.1f}",
            r.reason,
            r.link if r.outcome == "failed" else "",
        )
        for r in results
    ]
    click.echo(table(("SUBJECT", "SUITE", "CHECK", "RESULT", "S", "REASON", "SEE"), _one_line(rows)))
    for name, found in notes.items():
        for what, why in found.items():
            click.echo(f"{name}: {what}: {why}")
    failed = sum(result.outcome == "failed" for result in results)
    click.echo(f"{len(results)} checks, {failed} failed")


def _one_line(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(" ".join(cell.split()) for cell in row) for row in rows]
