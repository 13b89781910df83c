"""Finds plugins by the metadata of installed distributions; imports none of them.

Key objects: `find_entries` (what is installed) and `examine` (switches, conflicts, gate 1).
Our own loop, because pluggy's stops at the first broken plugin, drops a duplicate without a
word and keeps the order of the file system. Invariant: one record an entry point, sorted by
(name, distribution), so that every rank sees the same list. Layer: plugins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvdd_core.plugins.hookspecs import GROUP
from nvdd_core.plugins.record import PluginEntry, PluginRecord, PluginStatus
from nvdd_core.plugins.requirements import core_mismatch, normalized
from nvdd_core.plugins.rows import PLUGIN_NAME
from nvdd_core.plugins.switches import DENY, Switches

if TYPE_CHECKING:
    from importlib_metadata import IDistribution


def find_entries() -> list[PluginEntry]:
    """Read the entry points of group ``nvdd.plugins`` from ``sys.path``.

    Of several copies of one distribution (an egg-info beside an editable source, the same wheel
    in two folders) the first on the path counts, as it does for imports; the rest become notes.

    Returns
    -------
    list of PluginEntry
        In the order of ``sys.path``; a distribution whose metadata can't be read is left to
        `examine`, under the name ``(unreadable)``.
    """
    from importlib_metadata import distributions

    copies: dict[str, list[_Copy]] = {}
    unreadable: list[PluginEntry] = []
    for dist in distributions():
        try:
            text = dist.read_text("entry_points.txt")
            if text is not None and GROUP in text:
                copy = _Copy.read(dist)
                copies.setdefault(normalized(copy.name), []).append(copy)
        except Exception as error:
            unreadable.append(_unreadable(dist, error))
    found: list[PluginEntry] = []
    for same_name in copies.values():
        try:
            found.extend(_entries_of(same_name))
        except Exception as error:
            unreadable.append(_unreadable(same_name[0].dist, error))
    return found + unreadable


@dataclass(frozen=True)
class _Copy:
    """One installed copy of a distribution, its metadata parsed once (each access parses it anew)."""

    dist: IDistribution
    name: str
    version: str
    requires: tuple[str, ...]
    location: str

    @classmethod
    def read(cls, dist: IDistribution) -> _Copy:
        metadata = dist.metadata
        # An egg-info keeps its requirements in a file of their own, which `requires` knows how to read.
        requires = metadata.get_all("Requires-Dist") or dist.requires or ()
        return cls(dist, str(metadata["Name"]), str(metadata["Version"]), tuple(requires), _location(dist))


def _unreadable(dist: IDistribution, error: Exception) -> PluginEntry:
    note = f"its metadata can't be read ({type(error).__name__}: {error})"
    return PluginEntry("(unreadable)", "", "(unreadable)", "?", location=_location(dist), notes=(note,))


def _location(dist: IDistribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))


def _entries_of(copies: Sequence[_Copy]) -> list[PluginEntry]:
    """Turn the copies of one distribution, in path order, into the entries of the one that counts."""
    chosen, hidden = _choose(copies)
    if _dropped_upstream(chosen):
        return []
    notes = tuple(
        f"hides another copy, {other.name} {other.version} in {other.location}"
        for other in hidden
        if (other.location, other.version) != (chosen.location, chosen.version)
    )
    points = {(point.name, point.value) for point in chosen.dist.entry_points if point.group == GROUP}
    return [
        PluginEntry(
            name=name,
            value=value,
            distribution=chosen.name,
            version=chosen.version,
            requires=chosen.requires,
            location=chosen.location,
            editable=_is_editable(chosen.dist),
            notes=notes,
        )
        for name, value in sorted(points)
    ]


def _choose(copies: Sequence[_Copy]) -> tuple[_Copy, list[_Copy]]:
    """Take the copy in the first folder; of several in that folder (a torn upgrade) the newest."""
    if len(copies) == 1:
        return copies[0], []
    from packaging.version import InvalidVersion, Version

    def age(copy: _Copy) -> Version:
        try:
            return Version(copy.version)
        except InvalidVersion:
            return Version("0.dev0")

    chosen = max((copy for copy in copies if copy.location == copies[0].location), key=age)
    return chosen, [copy for copy in copies if copy is not chosen]


def _dropped_upstream(copy: _Copy) -> bool:
    """Whether a copy earlier on the path, without the entry point, is the one that would be imported."""
    from importlib_metadata import distribution

    first = distribution(copy.name)
    return _location(first) != copy.location and GROUP not in (first.read_text("entry_points.txt") or "")


def _is_editable(dist: IDistribution) -> bool:
    text = dist.read_text("direct_url.json")
    if text is None:
        return False
    try:
        return bool(json.loads(text).get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return False


def examine(entries: Iterable[PluginEntry], switches: Switches, core_version: str) -> list[PluginRecord]:
    """Judge entries by what their metadata says, before anything is imported.

    In order: is it switched off, is its name well formed and unique, does its distribution fit
    this core (gate 1).

    Parameters
    ----------
    entries
        What was found.
    switches
        The user's choice.
    core_version
        Version of the running core.

    Returns
    -------
    list of PluginRecord
        Sorted by (name, distribution); those that passed are ``ok`` and not loaded.
    """
    ordered = sorted(entries, key=lambda entry: (entry.name, entry.distribution, entry.value))
    refusals = [switches.refusal(entry) for entry in ordered]
    let_in = [entry for entry, refusal in zip(ordered, refusals, strict=True) if refusal is None]
    records: list[PluginRecord] = []
    for entry, refusal in zip(ordered, refusals, strict=True):
        record = PluginRecord(entry)
        if refusal is not None:
            records.append(replace(record, status=PluginStatus.DISABLED, reason=refusal))
        elif not PLUGIN_NAME.fullmatch(entry.name):
            why = "; ".join(entry.notes) or f"a plugin's name must match {PLUGIN_NAME.pattern}"
            records.append(replace(record, status=PluginStatus.BROKEN, reason=why))
        elif rivals := [other for other in let_in if other.name == entry.name and other is not entry]:
            reason = _conflict_reason(entry, rivals)
            records.append(replace(record, status=PluginStatus.CONFLICT, reason=reason))
        elif mismatch := core_mismatch(entry.requires, core_version):
            records.append(replace(record, status=PluginStatus.INCOMPATIBLE, reason=mismatch))
        else:
            records.append(record)
    return records


def _conflict_reason(entry: PluginEntry, rivals: Sequence[PluginEntry]) -> str:
    others = sorted({rival.distribution for rival in rivals} - {entry.distribution})
    if not others:
        values = ", ".join(sorted({entry.value, *(rival.value for rival in rivals)}))
        return f"{entry.distribution} claims the name '{entry.name}' more than once: {values}"
    return (
        f"the name '{entry.name}' is also claimed by {', '.join(others)}; uninstall one, "
        f"or switch one off: {DENY}=dist:{others[0]}"
    )
