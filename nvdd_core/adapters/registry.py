"""`AdapterRegistry`: installs adapters together and puts everything back, also after errors and from several threads.

A table of the process says who changed which target; what a class inherits is its base's target as well. The same
owner may install an equal adapter again (two models of one plugin, nested use): the change is made once and taken
back when the last of them restores. Anything else on a target that is taken is a conflict.

Invariants: adapters are installed all or none; they are restored in reverse order, each of them whatever became of
the others; registries and the table are locked, the registry's lock first.
Layer: adapters.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch

from nvdd_core.adapters.base import Adapter, AdapterState, AdapterStatus, Patch
from nvdd_core.errors import AdapterConflictError, AdapterError, SpecError


@dataclass
class _Claim:
    """An installed adapter in the table, with the number of registries that share it."""

    owner: str
    adapter: Adapter
    patch: Patch
    keys: tuple[Hashable, ...]
    sources: tuple[Hashable, ...]
    users: int = 1


class _Table:
    """Installed targets of this process."""

    def __init__(self) -> None:
        self._claims: dict[Hashable, list[_Claim]] = {}
        self._lock = threading.RLock()

    def acquire(self, owner: str, adapter: Adapter, patch: Patch) -> _Claim:
        """Apply `patch`, or share what is applied already.

        Raises
        ------
        AdapterConflictError
            When another adapter or owner has a target.
        """
        with self._lock:
            keys, sources = patch.keys(), patch.sources()
            for key in (*keys, *sources):
                for claim in self._claims.get(key, ()):
                    if key not in keys and key not in claim.keys:
                        continue  # two classes that inherit from one
                    same = claim.owner == owner and claim.adapter == adapter
                    if same and set(keys) <= set(claim.keys):
                        claim.users += 1
                        return claim
                    # An equal adapter that has other targets as well can neither be shared nor made twice.
                    if same or claim.owner != owner or not (adapter.stacks and claim.adapter.stacks):
                        raise _conflict(owner, adapter, claim)
            patch.apply()
            claim = _Claim(owner, adapter, patch, keys, sources)
            for key in (*keys, *sources):
                self._claims.setdefault(key, []).append(claim)
            return claim

    def release(self, claim: _Claim) -> None:
        """Undo the patch of `claim` when nobody else shares it; the target is free afterwards in any case."""
        with self._lock:
            claim.users -= 1
            if claim.users:
                return
            for key in (*claim.keys, *claim.sources):
                self._claims[key].remove(claim)
                if not self._claims[key]:
                    del self._claims[key]
            claim.patch.undo()


def _conflict(owner: str, adapter: Adapter, claim: _Claim) -> AdapterConflictError:
    sites = "; ".join(
        f"{who!r} by {a!r}{f' ({a.install_site})' if a.install_site else ''}"
        for who, a in ((claim.owner, claim.adapter), (owner, adapter))
    )
    return AdapterConflictError(
        f"{adapter.full_target}: {owner!r} wants to adapt what {claim.owner!r} has adapted ({sites}). Use one of the "
        "two at a time, or leave one out: NVDD_PLUGINS can disable a plugin, a spec can be replaced"
    )


_TABLE = _Table()


@dataclass
class _Entry:
    """An adapter of a registry, the patch it resolved to, and where it stands."""

    adapter: Adapter
    name: str | None
    plugin: str | None
    patch: Patch | None = None
    claim: _Claim | None = None
    state: AdapterState = AdapterState.PENDING
    error: str | None = None


class AdapterRegistry:
    """Adapters that are installed and restored together; a context manager.

    It may be entered again while it is installed, also from other threads; the last exit restores.

    Parameters
    ----------
    adapters : iterable of adapters
        In the order of installation.
    owner : str
        Who asks, for conflicts: a plugin's name, or ``"application"``.
    root : Module, optional
        The live model, for adapters of its submodules.
    """

    def __init__(
        self,
        adapters: Iterable[Adapter] = (),
        *,
        owner: str = "application",
        root: torch.nn.Module | None = None,
    ) -> None:
        self.owner = owner
        self._root = root
        self._entries: list[_Entry] = []
        self._depth = 0
        self._lock = threading.RLock()
        for adapter in adapters:
            self.add(adapter)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, adapter: Adapter, *, name: str | None = None, plugin: str | None = None) -> None:
        """Add an adapter, under the name and plugin that reports show.

        Raises
        ------
        SpecError
            When it is no adapter.
        AdapterError
            When the registry is installed.
        """
        if not isinstance(adapter, Adapter):
            raise SpecError(f"AdapterRegistry: expected an adapter such as MethodAdapter, found {adapter!r}")
        with self._lock:
            if self._depth:
                raise AdapterError(
                    f"{adapter}: can't be added while the registry is installed; restore first"
                )
            self._entries.append(_Entry(adapter, name, plugin))

    def install(self) -> None:
        """Install all adapters in order, or none.

        Raises
        ------
        AdapterConflictError
            When another owner, or another adapter of this one, has a target.
        AdapterError
            When a target isn't there or can't be changed.
        """
        with self._lock:
            if self._depth == 0:
                self._install()
            self._depth += 1

    def _install(self) -> None:
        for entry in self._entries:
            entry.state, entry.error = AdapterState.PENDING, None
        for entry in self._entries:
            try:
                if entry.patch is None:
                    entry.patch = entry.adapter.resolve(self._root)
                entry.claim = _TABLE.acquire(self.owner, entry.adapter, entry.patch)
                entry.state = AdapterState.INSTALLED
            except BaseException as exc:
                entry.state, entry.error = AdapterState.FAILED, str(exc)
                entry.patch = None  # resolved, maybe, to what another adapter has put there for now
                for failed in self._restore():
                    exc.add_note(f"while the adapters before it were restored: {failed}")
                raise

    def restore(self) -> None:
        """Undo one `install`; the last one puts everything back. Without an install, nothing happens.

        Raises
        ------
        AdapterError
            When somebody else changed a target meanwhile; everything else is put back all the same.
        """
        with self._lock:
            if self._depth == 0:
                return
            self._depth -= 1
            failed = self._restore() if self._depth == 0 else []
        if failed:
            raise AdapterError("; ".join(failed))

    def _restore(self) -> list[str]:
        """Restore what is installed, in reverse order; returns what went wrong."""
        failed = []
        for entry in reversed(self._entries):
            claim, entry.claim = entry.claim, None
            if claim is None:
                continue
            try:
                _TABLE.release(claim)
                entry.state = AdapterState.RESTORED
            except Exception as exc:
                entry.state, entry.error = AdapterState.FAILED, str(exc)
                failed.append(str(exc))
        return failed

    def __enter__(self) -> AdapterRegistry:
        self.install()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.restore()
        except AdapterError as exc:
            if error is None:
                raise
            error.add_note(f"afterwards: {exc}")  # the error of the body goes first

    def status(self) -> tuple[AdapterStatus, ...]:
        """Return where each adapter stands, in the order of installation."""
        with self._lock:
            return tuple(
                dataclasses.replace(
                    status, name=entry.name if entry.name is not None else status.name, plugin=entry.plugin
                )
                for entry in self._entries
                for status in [entry.adapter.describe(entry.state, entry.error)]
            )
