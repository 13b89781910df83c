"""The command `nvdd adapters`: list what plugins declare, and try it in a scratch process.

Key objects: `adapters` (the click command), `Scratch`. Invariant: a listing imports the plugins' light modules
and nothing else; whatever foreign code does when it is tried, even if it ends the process, is told and stays
with its adapter. Layer: cli.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from nvdd_core.cli.plugins_cmd import emit, ending, json_flag, listing
from nvdd_core.environment import child_environment, interpreter_command, search_path
from nvdd_core.errors import AdapterError, InputError, PluginUnusableError
from nvdd_core.plugins import PluginManager, PluginStatus, report
from nvdd_core.plugins.composition import read_model, shared_out
from nvdd_core.plugins.options import parse_options

_TIMEOUT_S: Final = 300.0
_FINISHED: Final = "finished"


@click.command("adapters", short_help="List adapters and try them.")
@click.option("--plugin", metavar="NAME", help="Only those of this plugin.")
@click.option("--model", metavar="NAME", help="Only those of the plugin that provides this model.")
@click.option(
    "--live",
    metavar="MODEL",
    help="Install and restore the adapters of this model, or of each of NAME+NAME, in a scratch process.",
)
@click.option(
    "--option",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --live: option of the model, for adapters that need the model itself.",
)
@json_flag
def adapters(
    plugin: str | None, model: str | None, live: str | None, pairs: tuple[str, ...], as_json: bool
) -> None:
    """List the adapters of installed plugins: reversible changes to foreign code that models run.

    A listing imports neither torch nor the adapters, and exits with 0 whatever is broken. With --live the
    adapters that the model's plugin declares and those in its spec are imported, installed and restored one
    after the other, in a process of its own; RUNTIME ("runtime" in JSON) says what became of each: restored
    (it was installed and put back), failed, unused (the model with these options runs without it), or pending
    (it needs the model, which could not be loaded).
    DISCOVERY ("status" in JSON) says only whether the declaration can be used; it is the same with --live and
    without. Exits with 1 when one failed.
    """
    if sum(choice is not None for choice in (plugin, model, live)) > 1:
        raise InputError("--plugin, --model and --live exclude one another; give one of them")
    if pairs and live is None:
        raise InputError("--option is for the model of --live MODEL, which is not given")
    with listing(as_json) as manager:
        if live is not None:
            document = _tried(manager, live, parse_options(pairs))
        else:
            document = report.adapters_document(manager, _chosen(manager, plugin, model))
    emit(document, as_json, report.adapters_table(document["adapters"]), document["notes"])
    failed = [row["name"] for row in document["adapters"] if row["runtime"] == "failed"]
    if failed:
        raise AdapterError(
            f"{len(failed)} of {len(document['adapters'])} adapters failed: {', '.join(failed)}"
        )
    manager.require_healthy()


def _chosen(manager: PluginManager, plugin: str | None, model: str | None) -> set[str] | None:
    """Return the names of the plugins that are listed, or None for all of them."""
    if plugin is not None:
        manager.named(plugin)  # raises, with near names
        return {plugin}
    if model is None:
        return None
    return set().union(*(_providers(manager, term.model) for term in read_model(model)))


def _providers(manager: PluginManager, model: str) -> set[str]:
    """Return the plugins that provide a model, whether it can be used or not."""
    rows = [row for row in manager.models() if model in (row.decl.name, f"{row.plugin}/{row.decl.name}")]
    owners = {row.plugin for row in rows if row.status is not PluginStatus.CONFLICT}
    if rows:
        return owners or {row.plugin for row in rows}
    try:
        return {manager.provided_model(model).plugin}
    except PluginUnusableError:
        return {model.partition("/")[0]}


def _tried(manager: PluginManager, model: str, options: Mapping[str, Any]) -> report.Json:
    """Try a model's adapters and return the document with what became of them."""
    terms = read_model(model)
    plugins = {manager.provided_model(term.model).plugin for term in terms}  # raises unless they can be used
    document = report.adapters_document(manager, plugins)
    loaders = {term.name: manager.loader(term.model) for term in terms} if len(terms) > 1 and options else {}
    own = shared_out(terms, options, loaders)
    document["adapters"] = []
    for term in terms:  # each by itself, as it runs: its hooks look into its own module
        scratch = Scratch(term.model, own[term.name])
        scratch.run()
        document["adapters"] += scratch.rows
        document["notes"] += scratch.notes
    return document


class Scratch:
    """Processes that try the adapters of one model; a new one goes on where the last one was ended.

    Parameters
    ----------
    model
        As for `PluginManager.provided_model`.
    options
        For the model's loader.

    Attributes
    ----------
    rows
        The adapters, as `report.adapter_row` has them.
    notes
        What else went wrong.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._order = {"model": model, "options": dict(options)}
        # The last line that the journals have of each step, in the order in which the steps began.
        self._steps: dict[str, dict[str, Any]] = {}

    @property
    def rows(self) -> list[report.Json]:
        """See the class."""
        return [line["row"] for line in self._steps.values() if line["row"] is not None]

    @property
    def notes(self) -> list[str]:
        """See the class."""
        return [line["note"] for line in self._steps.values() if line["note"]]

    def run(self) -> None:
        """Start processes until one reaches the end.

        Raises
        ------
        AdapterError
            When a process ends outside any step.
        """
        while True:
            with tempfile.TemporaryDirectory(prefix="nvdd-adapters-") as folder:
                how, said = self._once(Path(folder))
            if _FINISHED in self._steps:
                return
            click.echo(said, err=True)  # often the only trace of the reason
            begun = [line for line in self._steps.values() if not line["over"]]
            if not begun:
                raise AdapterError(f"the process that tries adapters ended outside any of them: {how}")
            for line in begun:
                _close(line, how)

    def _once(self, folder: Path) -> tuple[str, str]:
        """Run one process; return how it ended and what it printed."""
        order, journal = folder / "order.json", folder / "journal.jsonl"
        done = {step: _outcome(line) for step, line in self._steps.items()}
        order.write_text(json.dumps({**self._order, "done": done}), encoding="utf-8")
        journal.touch()
        command = interpreter_command("-X", "faulthandler", "-m", "nvdd_core.cli.adapters_live")
        try:
            ended = subprocess.run(
                [*command, str(order), str(journal)],
                env=child_environment(PYTHONPATH=os.pathsep.join(search_path())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
            how, said = ending(ended.returncode), ended.stdout
        except subprocess.TimeoutExpired as late:
            said = (
                late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
            )
            how = f"not within {_TIMEOUT_S:.0f} s"
        for text in journal.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            self._steps[line["step"]] = line
        return how, said


def _outcome(line: Mapping[str, Any]) -> str | None:
    """What a later process has to know of a step: what became of the adapter, or that it's no use to repeat it."""
    if line["row"] is not None:
        return None if line["row"]["runtime"] is None else str(line["row"]["runtime"])
    return "failed" if line["note"] else None


def _close(line: dict[str, Any], how: str) -> None:
    """Complete a step that ended its process."""
    line["over"] = True
    if line["row"] is None:
        line["note"] = f"{line['step']} ended the process: {how}"
    else:
        line["row"]["error"] = f"it ended the process: {how}"
