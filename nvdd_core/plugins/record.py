"""What is known of each plugin: where it comes from, its state, and what it declared.

Key objects: `PluginEntry` (one entry point with its distribution's metadata), `PluginRecord`
(entry plus discovery state plus declared rows), `Provided` (one declared row with its own
state). Invariant: records are frozen and complete; a plugin that fails half way leaves a
record with a reason and no rows. Layer: plugins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from nvdd_core.plugins.rows import AdapterDecl, ModelDecl, PluginInfo, SpecDecl

Decl = TypeVar("Decl", ModelDecl, SpecDecl, AdapterDecl)


class PluginStatus(StrEnum):
    """State of discovery; maturity and an adapter's run-time state are kept apart from it."""

    OK = "ok"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    BROKEN = "broken"
    UNAVAILABLE = "unavailable"

    @property
    def is_problem(self) -> bool:
        """Whether someone has to mend something: ``check`` fails and strict mode raises."""
        return self in (PluginStatus.INCOMPATIBLE, PluginStatus.CONFLICT, PluginStatus.BROKEN)


@dataclass(frozen=True)
class PluginEntry:
    """One entry point of the group ``nvdd.plugins`` and the metadata of its distribution.

    Parameters
    ----------
    name
        The plugin's name, the left side of the entry point.
    value
        The light module, the right side of the entry point (``"nvdd_x._plugin"``).
    distribution, version
        The installed distribution that provides it.
    requires
        The distribution's own requirements, as its metadata has them.
    location
        The folder of ``sys.path`` in which the metadata was found.
    editable
        Whether it was installed as editable.
    notes
        Oddities worth telling, for instance a second copy that this one hides.
    plugin
        The plugin object itself when it was handed over in memory; nothing is imported then.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    location: str = ""
    editable: bool = False
    notes: tuple[str, ...] = ()
    plugin: object | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Plugin and distribution in one phrase, for messages."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Provided(Generic[Decl]):
    """One declared row, who declared it, and whether it can be used."""

    decl: Decl
    plugin: str
    distribution: str
    status: PluginStatus = PluginStatus.OK
    reason: str = ""


AnyProvided = Provided[ModelDecl] | Provided[SpecDecl] | Provided[AdapterDecl]


@dataclass(frozen=True)
class PluginRecord:
    """One plugin as discovery found it.

    Parameters
    ----------
    entry
        Where it comes from.
    status, reason
        State of discovery, and one line that says why it isn't ``ok``.
    loaded
        Whether its light module has been imported. A record may be ``ok`` and not loaded: the
        metadata passed, and `heavy` says why listing stopped there.
    heavy
        Imports that a light module may not have, as ``"torch (file.py:3)"``.
    info, models, specs, adapters
        What it declared; empty unless loaded.
    notes
        What loading it changed in this process and had to be put back; the entry has notes of its own.
    traceback
        Text of the error's traceback, for ``nvdd plugins show``.
    error
        The error itself, which lookups chain.
    """

    entry: PluginEntry
    status: PluginStatus = PluginStatus.OK
    reason: str = ""
    loaded: bool = False
    heavy: tuple[str, ...] = ()
    info: PluginInfo | None = None
    models: tuple[Provided[ModelDecl], ...] = ()
    specs: tuple[Provided[SpecDecl], ...] = ()
    adapters: tuple[Provided[AdapterDecl], ...] = ()
    notes: tuple[str, ...] = ()
    traceback: str = ""
    error: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.entry.name

    @property
    def key(self) -> tuple[str, str]:
        """Name and distribution: what records are sorted by and found under."""
        return (self.entry.name, self.entry.distribution)

    @property
    def rows(self) -> tuple[AnyProvided, ...]:
        """Everything that it declared: models, specs and adapters."""
        return (*self.models, *self.specs, *self.adapters)

    def describe(self) -> str:
        """Say in one line which plugin this is and what is wrong with it."""
        tail = f": {self.reason}" if self.reason else ""
        return f"{self.entry.label} is {self.status.value}{tail}"
