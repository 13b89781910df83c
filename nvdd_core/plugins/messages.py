"""What a user is told when a plugin or a model can't be had.

Every message names what was asked for, what there is instead, and the next command to type.
Layer: plugins.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvdd_core.errors import PluginUnusableError
from nvdd_core.plugins.known import KNOWN_MODELS, near, not_installed, way_to
from nvdd_core.plugins.record import Decl, PluginRecord, PluginStatus, Provided


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Phrase a suggestion as a sentence with a leading blank, or return nothing."""
    matches = near(name, known)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def no_model(name: str, names: Iterable[str], records: Iterable[PluginRecord]) -> str:
    """Say that no installed plugin provides the model `name`, and what could be done.

    Parameters
    ----------
    name
        What was asked for.
    names
        Models of installed plugins.
    records
        All plugins.
    """
    installed = sorted(set(names))
    missing = {model: dist for model, dist in KNOWN_MODELS.items() if model not in installed}
    if "+" in name or "*" in name:
        hint = " Several models are put together by nvdd_core.runtime.PipelineModel, of models loaded one by one."
    elif name in missing:
        hint = f" {way_to(missing[name])}"
    else:
        hint = did_you_mean(name, [*installed, *missing])
    text = (
        f"no installed plugin provides the model '{name}'.{hint} Installed: {', '.join(installed) or 'none'}."
    )
    for sentence in not_installed(model for model in missing if model != name):
        text += f" {sentence}"
    unusable = [f"{r.name} ({r.status.value})" for r in records if r.status is not PluginStatus.OK]
    if unusable:
        text += f" Can't be used: {', '.join(unusable)}; run 'nvdd plugins' to see why."
    return text


def no_plugin(name: str, names: Iterable[str]) -> str:
    """Say that no plugin `name` is installed."""
    installed = sorted(set(names))
    package = KNOWN_MODELS.get(name)
    install = f" {way_to(package)}" if package else ""
    return (
        f"no plugin named '{name}' is installed.{install}{did_you_mean(name, installed)} "
        f"Installed: {', '.join(installed) or 'none'}."
    )


def unusable(record: PluginRecord) -> PluginUnusableError:
    """Make the error for a plugin that is there but can't be used; the caller chains `record.error`."""
    return PluginUnusableError(f"{record.describe()}; run 'nvdd plugins show {record.name}'")


def only(rows: Iterable[Provided[Decl]]) -> Provided[Decl]:
    """Return the one row that may go by a bare name.

    Raises
    ------
    PluginUnusableError
        When several plugins declare it and none owns the name.
    """
    found = list(rows)
    owners = [row for row in found if row.status is not PluginStatus.CONFLICT]
    if len(owners) == 1:
        return owners[0]
    if len(found) == 1:
        return found[0]
    ways = " or ".join(f"'{row.plugin}/{row.decl.name}'" for row in found)
    raise PluginUnusableError(f"'{found[0].decl.name}' is provided by several plugins; ask for {ways}")


def checked(row: Provided[Decl]) -> Provided[Decl]:
    """Return a row that can be used.

    Raises
    ------
    PluginUnusableError
        Saying why it can't.
    """
    if row.status is not PluginStatus.OK:
        raise PluginUnusableError(
            f"'{row.decl.name}' of plugin '{row.plugin}' ({row.distribution}) is "
            f"{row.status.value}: {row.reason}"
        )
    return row
