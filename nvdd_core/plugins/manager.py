"""The plugins of one process: found once, loaded on demand, looked up by name.

Key objects: `PluginManager`, `default_manager`, `use_manager`. Invariant: a manager holds no
global state, so tests and notebooks can make fresh ones; each plugin is loaded at most once.
Layer: plugins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import nvdd_core
from nvdd_core.errors import PluginNotFoundError, PluginUnusableError
from nvdd_core.plugins import agreement, messages
from nvdd_core.plugins.discovery import examine, find_entries
from nvdd_core.plugins.foreign import error_text, surroundings_kept
from nvdd_core.plugins.loading import CORE_SPECS, load
from nvdd_core.plugins.record import PluginEntry, PluginRecord, PluginStatus, Provided
from nvdd_core.plugins.rows import AdapterDecl, ModelDecl, Ref, SpecDecl
from nvdd_core.plugins.switches import ALLOW, DENY, Switches

_LOG = logging.getLogger("nvdd.plugins")
_CORE_SPEC_MODULE: Final = "nvdd_core.runtime"


class PluginManager:
    """Finds, loads and looks up plugins.

    Parameters
    ----------
    entries
        The plugins to consider; default those installed.
    allow, deny, strict
        See `Switches.read`; default from the environment.
    environ
        Where the switches are read; default the process environment.
    core_version
        Version that gate 1 compares with; default the running core's.

    Notes
    -----
    Making a manager reads metadata only. A look-up imports the light module of the plugin that
    carries the model's name, and of the others only when that one doesn't provide it.
    """

    def __init__(
        self,
        entries: Iterable[PluginEntry] | None = None,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        strict: bool | None = None,
        environ: Mapping[str, str] | None = None,
        core_version: str | None = None,
    ) -> None:
        self.switches = Switches.read(environ, allow=allow, deny=deny, strict=strict)
        self._core_version = nvdd_core.__version__ if core_version is None else core_version
        self._entries = list(find_entries() if entries is None else entries)
        self._lock = threading.RLock()
        self._loading: set[tuple[str, str, str]] = set()
        self._told: set[str] = set()
        self._records: list[PluginRecord] = examine(self._entries, self.switches, self._core_version)

    # -- the set of plugins ------------------------------------------------------------------

    def register(
        self, plugin: object, *, name: str, distribution: str = "(in memory)", version: str = "0"
    ) -> PluginRecord:
        """Add a plugin object that no installed distribution provides (tests, notebooks).

        Returns
        -------
        PluginRecord
            Its record, loaded; look at `status`, since a bad plugin raises nothing here.
        """
        entry = PluginEntry(name, "(in memory)", distribution, version, plugin=plugin)
        with self._lock:
            self._entries.append(entry)
            self._examine_again()
            return self._load_at(next(i for i, r in enumerate(self._records) if r.entry is entry))

    def unregister(self, name: str) -> None:
        """Forget the plugins of that name, for this manager only."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.name != name]
            self._examine_again()

    def _examine_again(self) -> None:
        """Judge a changed set anew, keeping what is loaded and hasn't changed its state."""
        before = {id(record.entry): record for record in self._records}
        fresh = examine(self._entries, self.switches, self._core_version)
        self._records = [
            before.get(id(record.entry), record) if record.status is PluginStatus.OK else record
            for record in fresh
        ]

    def records(self, *, load_plugins: bool = True, import_heavy: bool = False) -> tuple[PluginRecord, ...]:
        """Return all plugins, sorted by (name, distribution).

        Parameters
        ----------
        load_plugins
            Whether to load them first; if not, `status` says what the metadata alone tells.
        import_heavy
            Whether to load those, too, whose module isn't light.
        """
        with self._lock:
            if load_plugins:
                for index in range(len(self._records)):
                    self._load_at(index, import_heavy=import_heavy)
            return tuple(self._records)

    def named(self, name: str) -> tuple[PluginRecord, ...]:
        """Return the loaded records of that name: one, or several in conflict.

        Raises
        ------
        PluginNotFoundError
            When no installed plugin has that name.
        """
        with self._lock:
            found = [i for i, record in enumerate(self._records) if record.name == name]
            if not found:
                raise PluginNotFoundError(messages.no_plugin(name, [record.name for record in self._records]))
            return tuple(self._load_at(i) for i in found)

    def plugin(self, name: str) -> PluginRecord:
        """Return the record of a plugin that can be used.

        Raises
        ------
        PluginNotFoundError
            When no installed plugin has that name.
        PluginUnusableError
            When it is broken, disabled, incompatible, in conflict or unavailable; chains the
            original error.
        """
        records = self.named(name)
        usable = [record for record in records if record.status is PluginStatus.OK]
        if usable:
            return usable[0]
        # One that was switched off on purpose explains less than one that someone has to mend.
        worst = min(records, key=lambda record: record.status is PluginStatus.DISABLED)
        raise messages.unusable(worst) from worst.error

    @property
    def slips(self) -> tuple[str, ...]:
        """Switches that match no installed plugin."""
        return tuple(
            f"'{item}' in {ALLOW} or {DENY} matches no installed plugin"
            for item in dict.fromkeys(self.switches.unknown(self._entries))
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Oddities for people: slips, and copies of a distribution that hide one another."""
        ordered = sorted(self._entries, key=lambda entry: (entry.name, entry.distribution))
        told = [(entry, entry.notes) for entry in ordered]
        told += [(record.entry, record.notes) for record in self._records]
        return (*self.slips, *(f"{entry.label} {note}" for entry, notes in told for note in notes))

    def _load_at(self, index: int, *, import_heavy: bool = True) -> PluginRecord:
        record = self._records[index]
        key = (*record.key, record.entry.value)
        # A plugin that asks for plugins while it is being imported sees itself as not loaded yet.
        if key in self._loading:
            return record
        self._loading.add(key)
        try:
            loaded = load(record, import_heavy=import_heavy)
        finally:
            self._loading.discard(key)
        # By entry, not by index: the plugin's own code may have registered another one meanwhile.
        self._records = [loaded if known.entry is record.entry else known for known in self._records]
        return loaded

    def _tell(self, lines: Iterable[str]) -> None:
        """Log each line once, on one rank: the others have the same plugins, or the digest says so."""
        level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                _LOG.log(level, "%s", line)

    def require_healthy(self) -> None:
        """In strict mode, raise at the first plugin that has a problem; otherwise do nothing.

        Raises
        ------
        PluginUnusableError
            Naming the plugin and chaining the original error.
        """
        if not self.switches.strict:
            return
        for record in self.records():
            if record.status.is_problem:
                raise messages.unusable(record) from record.error

    # -- look-up -----------------------------------------------------------------------------

    def models(self) -> tuple[Provided[ModelDecl], ...]:
        """Return the models of all usable plugins, sorted by name."""
        rows = [row for record in self._usable() for row in record.models]
        return tuple(sorted(self._judged(rows), key=lambda row: (row.decl.name, row.plugin)))

    def specs(self) -> tuple[Provided[SpecDecl], ...]:
        """Return the specs of all usable plugins, sorted by name."""
        rows = [row for record in self._usable() for row in record.specs]
        return tuple(sorted(rows, key=lambda row: (row.decl.name, row.plugin)))

    def adapters(self, plugin: str | None = None) -> tuple[Provided[AdapterDecl], ...]:
        """Return the adapters of all usable plugins, or of one, in the order of declaration."""
        records = self._usable() if plugin is None else [self.plugin(plugin)]
        return tuple(row for record in records for row in record.adapters)

    def model(self, name: str) -> ModelDecl:
        """Return the declaration of a model that can be used.

        Parameters
        ----------
        name
            The model's name, or ``"plugin/model"`` where two plugins use one name.

        Raises
        ------
        PluginNotFoundError
            When no installed plugin provides it; suggests near names and what to install.
        PluginUnusableError
            When it is there but can't be used; chains the original error.
        """
        return self.provided_model(name).decl

    def provided_model(self, name: str) -> Provided[ModelDecl]:
        """Like `model`, with the plugin and the distribution that provide it."""
        self.require_healthy()
        self._tell(self.slips)
        owner, slash, bare = name.partition("/")
        with self._lock:
            # The plugin that carries the name is asked first, and alone: no other is imported for it.
            if slash or any(record.name == owner for record in self._records):
                record = self.plugin(owner)
                rows = [row for row in record.models if row.decl.name == (bare if slash else owner)]
                if slash and not rows:
                    have = ", ".join(row.decl.name for row in record.models) or "none"
                    raise PluginNotFoundError(f"{record.entry.label} has no model '{bare}'; it has: {have}")
                if rows:
                    return messages.checked(rows[0])
            for import_heavy in (False, True):
                records = self.records(import_heavy=import_heavy)
                self._tell(record.describe() for record in records if record.status.is_problem)
                rows = [row for row in self.models() if row.decl.name == name]
                if rows:
                    return messages.checked(messages.only(rows))
            names = [row.decl.name for row in self.models()]
            raise PluginNotFoundError(messages.no_model(name, names, self._records))

    def loader(self, name: str) -> Callable[..., Any]:
        """Import and return a model's loader, ``load(*, dtype, device, **options) -> model``.

        Raises
        ------
        PluginNotFoundError, PluginUnusableError
            As `model`; the latter also when the loader can't be imported.
        """
        row = self.provided_model(name)
        target = self.resolve(row.decl.ref, row.plugin)
        if not callable(target):
            raise PluginUnusableError(
                f"plugin '{row.plugin}' ({row.distribution}): {row.decl.ref} is no loader but {target!r}"
            )
        return target

    def load_model(self, name: str, **options: Any) -> Any:
        """Load a model: find its loader and call it with ``dtype``, ``device`` and its own options.

        Raises
        ------
        PluginNotFoundError, PluginUnusableError
            As `loader`; errors of the loader itself pass through.
        """
        return self.loader(name)(**options)

    def spec(self, name: str) -> SpecDecl:
        """Return the declaration of a spec, by its name or as ``"plugin/SPEC"``.

        Raises
        ------
        PluginNotFoundError, PluginUnusableError
            When there is none, or more than one.
        """
        if name in CORE_SPECS:
            return SpecDecl(name, Ref(f"{_CORE_SPEC_MODULE}:{name}"), title="preset of the core")
        owner, slash, bare = name.partition("/")
        rows = self.plugin(owner).specs if slash else self.specs()
        rows = tuple(row for row in rows if row.decl.name == (bare if slash else name))
        if not rows:
            known = [*CORE_SPECS, *(row.decl.name for row in self.specs())]
            raise PluginNotFoundError(
                f"no installed plugin declares the spec '{name}'.{messages.did_you_mean(name, known)} "
                f"Known: {', '.join(sorted(known))}"
            )
        return messages.only(rows).decl

    def resolve(self, ref: Ref, plugin: str) -> object:
        """Import what a declaration names; an error is told in the plugin's name.

        Raises
        ------
        PluginUnusableError
            Chains the original error.
        """
        notes: list[str] = []
        try:
            with surroundings_kept() as notes:
                return ref.resolve()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code raises what it likes, not only an Exception
            labels = [record.entry.label for record in self._records if record.name == plugin]
            told = f"{type(error).__name__}: {error_text(error)}"
            raise PluginUnusableError(
                f"{labels[0] if labels else plugin}: {ref} can't be imported: {told}"
            ) from error
        finally:
            self._note(plugin, [f"while {ref} was imported it {note}" for note in notes])

    def _note(self, plugin: str, notes: list[str]) -> None:
        """Add what a plugin did to this process to its record, once."""
        if not notes:
            return
        with self._lock:
            self._records = [
                replace(r, notes=tuple(dict.fromkeys((*r.notes, *notes)))) if r.name == plugin else r
                for r in self._records
            ]

    def _usable(self) -> list[PluginRecord]:
        # An unavailable plugin's rows are shown with the reason; `_checked` refuses to hand them out.
        shown = (PluginStatus.OK, PluginStatus.UNAVAILABLE)
        return [record for record in self.records() if record.status in shown]

    def _judged(self, rows: list[Provided[ModelDecl]]) -> list[Provided[ModelDecl]]:
        """Mark models whose bare name is another's: the plugin of that name owns it, else nobody does."""
        plugins = {record.name for record in self._records}
        claims: dict[str, set[str]] = {}
        for row in rows:
            claims.setdefault(row.decl.name, set()).add(row.plugin)
        judged: list[Provided[ModelDecl]] = []
        for row in rows:
            name = row.decl.name
            rivals = sorted(claims[name] - {row.plugin})
            if row.plugin != name and name in plugins and name not in rivals:
                rivals = [name]
            if row.plugin != name and rivals:
                owner = [name] if name in plugins else rivals
                reason = f"the name is also used by plugin {', '.join(owner)}; ask for '{row.plugin}/{name}'"
                judged.append(replace(row, status=PluginStatus.CONFLICT, reason=reason))
            else:
                judged.append(row)
        return judged

    # -- agreement between ranks -------------------------------------------------------------

    def fingerprint(self, plugins: Iterable[str] = ()) -> tuple[str, ...]:
        """Describe this process's plugins in lines that are equal on ranks with equal plugins.

        Parameters
        ----------
        plugins
            Names whose declared rows go in as well: those that a run uses. The rest count with
            what their metadata says, so the answer doesn't depend on what happens to be loaded.

        Returns
        -------
        tuple of str
            To be gathered and given to `check_agreement`.
        """
        used = [record for name in sorted(set(plugins)) for record in self.named(name)]
        examined = examine(self._entries, self.switches, self._core_version)
        return agreement.fingerprint(examined, used, self._core_version)

    def digest(self, plugins: Iterable[str] = ()) -> str:
        """Return 16 hexadecimal digits that stand for `fingerprint`."""
        return agreement.digest(self.fingerprint(plugins))


_default: PluginManager | None = None
_default_lock = threading.Lock()


def default_manager() -> PluginManager:
    """Return the manager of this process, made at the first call from what is installed then."""
    global _default  # noqa: PLW0603 - the one process-wide default, swapped only by use_manager
    with _default_lock:
        if _default is None:
            _default = PluginManager()
        return _default


@contextmanager
def use_manager(manager: PluginManager) -> Iterator[PluginManager]:
    """Make `manager` the default within a ``with`` block (tests, notebooks); restores the former."""
    global _default  # noqa: PLW0603
    with _default_lock:
        former, _default = _default, manager
    try:
        yield manager
    finally:
        with _default_lock:
            _default = former
