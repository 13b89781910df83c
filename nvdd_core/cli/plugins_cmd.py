"""The command `nvdd plugins`: list, show and check what is installed.

Key objects: `plugins` (the click group). Invariant: `list` and `show` exit with 0 whatever is broken,
unless strict mode asks for more; `check` exits with 1 when something has to be mended; standard output
holds nothing but the answer. Layer: cli.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from nvdd_core.cli.streams import stdout_kept
from nvdd_core.environment import child_environment, interpreter_command, search_path
from nvdd_core.errors import PluginUnusableError
from nvdd_core.plugins import PluginManager, PluginRecord, PluginStatus, default_manager, report

_CHECK_TIMEOUT_S: Final = 300.0
_PROBLEMS: Final = tuple(status.value for status in PluginStatus if status.is_problem)

_JSON: Final = "nvdd.json"


def _json_anywhere(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Let ``nvdd plugins --json show lj`` mean what ``nvdd plugins show lj --json`` means."""
    ctx.meta[_JSON] = value or ctx.meta.get(_JSON, False)
    return bool(ctx.meta[_JSON])


json_flag = click.option(
    "--json", "as_json", is_flag=True, callback=_json_anywhere, help="Write JSON (schema 1)."
)


@contextlib.contextmanager
def listing(as_json: bool) -> Iterator[PluginManager]:
    """Yield the manager; what a plugin prints while it is imported doesn't get among the answer."""
    with stdout_kept(only=as_json):
        yield default_manager()


def emit(document: report.Json, as_json: bool, text: str, notes: Iterable[str] = ()) -> None:
    """Write the answer, as JSON or as text with its notes on standard error."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(text)
    for note in notes:
        click.echo(f"note: {report.ascii_text(' '.join(note.split()))}", err=True)


@click.group("plugins", invoke_without_command=True, short_help="List, show and check installed plugins.")
@json_flag
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List, show and check installed plugins; without a subcommand, list them."""
    if ctx.invoked_subcommand is None:
        _list(as_json)


@plugins.command("list")
@json_flag
def list_(as_json: bool) -> None:
    """List installed plugins, the unusable ones with the reason.

    Imports the plugins' own light modules, neither torch nor the models. Exits with 0 whatever is
    broken, unless NVDD_STRICT_PLUGINS=1.
    """
    _list(as_json)


def _list(as_json: bool) -> None:
    with listing(as_json) as manager:
        document = report.plugins_document(manager, manager.records())
    emit(document, as_json, report.plugins_table(document["plugins"]), document["notes"])
    manager.require_healthy()


@plugins.command("show")
@click.argument("name")
@json_flag
def show(name: str, as_json: bool) -> None:
    """Tell everything about the plugin NAME: origin, state, reason, traceback and what it declares."""
    with listing(as_json) as manager:
        records = manager.named(name)
        document = report.plugins_document(manager, records)
    for row, record in zip(document["plugins"], records, strict=True):
        row["heavy"] = list(record.heavy)
        row["traceback"] = record.traceback
    emit(document, as_json, "\n\n".join(report.plugin_page(record) for record in records))


@plugins.command("check")
@click.argument("names", nargs=-1)
@click.option("--isolated", is_flag=True, help="One process a plugin, so that even a crash is told.")
@click.option(
    "--refs/--no-refs", default=True, help="Import what the plugins declare, torch too.  [default: refs]"
)
@json_flag
def check(names: tuple[str, ...], isolated: bool, refs: bool, as_json: bool) -> None:
    """Check the plugins NAMES, or all, by importing everything that they declare.

    Exits with 1 when one is broken, incompatible or in conflict; disabled and unavailable ones are no
    fault.
    """
    with listing(as_json) as manager:
        examined = [
            record for record in manager.records(load_plugins=False) if not names or record.name in names
        ]
        for name in names:
            if name not in {record.name for record in examined}:
                manager.named(name)  # raises, with near names
        if isolated:
            rows = [_check_apart(record, refs) for record in examined]
        else:
            rows = [_check_here(manager, record, refs) for record in examined]
        document = {**report.plugins_document(manager, ()), "plugins": rows}
    emit(document, as_json, report.plugins_table(rows), document["notes"])
    bad = [row["name"] for row in rows if row["status"] in _PROBLEMS]
    if bad:
        raise PluginCheckError(
            f"{len(bad)} of {len(rows)} plugins need mending: {', '.join(dict.fromkeys(bad))}"
        )


class PluginCheckError(PluginUnusableError):
    """A check found something to mend; that is a result (exit code 1), not a mistake in the input."""

    exit_code = 1


def _check_here(manager: PluginManager, record: PluginRecord, refs: bool) -> report.Json:
    """Load one plugin in this process and import what it declares."""
    loaded = next(found for found in manager.named(record.name) if found.entry is record.entry)
    row = report.plugin_row(loaded)
    if loaded.status is PluginStatus.OK and loaded.heavy:
        row["reason"] = f"not a light module: it imports {', '.join(loaded.heavy)}"
    if loaded.status is PluginStatus.OK and refs:
        for item in loaded.rows:
            if item.status is not PluginStatus.OK:
                continue
            try:
                manager.resolve(item.decl.ref, loaded.name)
            except PluginUnusableError as error:
                reason = str(error).removeprefix(f"{loaded.entry.label}: ")
                row |= {"status": PluginStatus.BROKEN.value, "reason": f"'{item.decl.name}': {reason}"}
                break
    return row


def _check_apart(record: PluginRecord, refs: bool) -> report.Json:
    """Check one plugin in a process of its own and say how that process ended."""
    row = report.plugin_row(record)
    if record.status is not PluginStatus.OK:
        return row
    command = interpreter_command("-m", "nvdd_core.cli.main", "plugins", "check", record.name, "--json")
    if not refs:
        command.append("--no-refs")
    try:
        done = subprocess.run(
            command,
            env=child_environment(PYTHONPATH=os.pathsep.join(search_path())),
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"importing it took longer than {_CHECK_TIMEOUT_S:.0f} s"
        return row | {"status": PluginStatus.BROKEN.value, "reason": reason}
    answer = _answer(done.stdout)
    if answer is not None:
        return answer
    reason = f"importing it ended the process: {ending(done.returncode)}"
    return row | {"status": PluginStatus.BROKEN.value, "reason": reason}


def _answer(output: str) -> report.Json | None:
    """Return the plugin's row that a check in another process wrote, or None if it wrote none."""
    try:
        document: Any = json.loads(output)
    except ValueError:
        return None
    rows = document["plugins"]
    return dict(rows[0]) if rows else None


def ending(code: int) -> str:
    """Say how a process ended, from its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
