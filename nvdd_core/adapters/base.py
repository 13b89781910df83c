"""What every adapter is: frozen data that names a target, and a `Patch` that changes the target and changes it back.

An `Adapter` says what to change; it can be compared, hashed, merged, pickled and written as JSON, and does nothing
by itself. `Adapter.resolve` finds the live target and returns a `Patch`, which can be applied and undone any number
of times and looks things up once. `Name` is how an adapter holds code: by importable name where there is one.

Invariants: resolving changes nothing; after `undo` the target is the very object that it was before `apply`.
Layer: adapters.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

import torch

from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.plugins.rows import AdapterKind, Ref

VERSION = 1
"""Version of the JSON form of an adapter; raised when the meaning of a key changes."""

ORIGINAL = "__nvdd_original__"
"""Attribute of our wrappers that leads to what they wrap."""

A = TypeVar("A", bound="Adapter")

_OPTIONAL = frozenset({"before", "after", "original"})
_TEXTS = _OPTIONAL | {"target", "name", "replacement", "install_site"}

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


class AdapterState(StrEnum):
    """Where an adapter of a registry stands."""

    PENDING = "pending"
    INSTALLED = "installed"
    RESTORED = "restored"
    FAILED = "failed"


@dataclass(frozen=True)
class AdapterStatus:
    """One adapter, for people and reports.

    Attributes
    ----------
    name : str
        As the plugin declares it, otherwise the target.
    kind, target, install_site : str
        What sort of change, of what, and where it was written; an empty site is unknown.
    state : AdapterState
    error : str or None
        Why it failed.
    plugin : str or None
        The plugin that declares it.
    """

    name: str
    kind: str
    target: str
    install_site: str
    state: AdapterState
    error: str | None = None
    plugin: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON-ready data."""
        return {**dataclasses.asdict(self), "state": self.state.value}


class Name(str):
    """The name of a live object, ``"package.module:attribute"`` or ``"package.module"``.

    An object that can't be found by a name, such as a lambda, is carried along: it works in this process, is equal
    to itself alone, and can't be written to JSON.
    """

    live: Any = None

    @classmethod
    def of(cls, value: object, where: str) -> Name:
        """Return the name of `value`, which may be an object, a `Ref` or a name already.

        Raises
        ------
        SpecError
            When a text is no name.
        """
        if isinstance(value, Name):
            return value
        if isinstance(value, str | Ref):
            if not _NAME.fullmatch(str(value)):
                raise SpecError(
                    f"{where}: expected 'package.module:attribute' or the object itself, found {value!r}"
                )
            return cls(str(value))
        module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, type(sys)):
            return cls(value.__name__)
        if module is not None and qualname is not None and same(_found(module, qualname), value):
            return cls(f"{module}:{qualname}")
        name = cls(
            f"{module or type(value).__module__}:{qualname or type(value).__qualname__}@{id(value):#x}"
        )
        name.live = value
        return name

    def resolve(self, what: str) -> Any:
        """Import the module and return the object.

        Raises
        ------
        AdapterError
            When it isn't there.
        """
        if self.live is not None:
            return self.live
        try:
            return pkgutil.resolve_name(self)
        except Exception as exc:
            raise AdapterError(
                f"{what}: {str(self)!r} can't be found ({type(exc).__name__}: {exc}); is the package installed, in a "
                "version that has it?"
            ) from exc

    def encoded(self, where: str) -> str:
        """Return the name for JSON.

        Raises
        ------
        SpecError
            When there is none.
        """
        if self.live is not None:
            raise SpecError(
                f"{where}: {self.live!r} can't be found by a name, so it can't be written; move it to module level"
            )
        return str(self)


def _found(module: str, qualname: str) -> object:
    """Return what a loaded module holds under a dotted name, None when nothing."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def unwrapped(value: Any) -> Any:
    """Return what our wrappers, if there are any, were put around."""
    while (inner := getattr(value, "__dict__", {}).get(ORIGINAL)) is not None:
        value = inner
    return value


def same(found: object, value: object) -> bool:
    """Whether both are one object, apart from wrappers of ours."""
    return value is not None and unwrapped(found) is unwrapped(value)


class Patch(ABC):
    """A change to a live target that can be made and taken back again and again; see `Adapter.resolve`."""

    @abstractmethod
    def keys(self) -> tuple[Hashable, ...]:
        """Return what stands for the target in the table of installed targets; live objects stand by their id."""

    def sources(self) -> tuple[Hashable, ...]:
        """Return the keys of other targets that this one shows while it has no entry of its own."""
        return ()

    @abstractmethod
    def apply(self) -> None:
        """Change the target, all of it or, when this raises, nothing."""

    @abstractmethod
    def undo(self) -> None:
        """Put back what was there before `apply`.

        Raises
        ------
        AdapterError
            When somebody else changed the target meanwhile; his change stays, the rest is put back.
        """


class Adapter(ABC):
    """Base of the adapters: frozen dataclasses with an ``install_site`` field and a ``target`` text."""

    kind: ClassVar[str]
    """One of the words of `AdapterKind`."""
    stacks: ClassVar[bool] = False
    """Whether one owner may put several different adapters on one target."""
    install_site: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        AdapterKind(cls.kind)

    @property
    @abstractmethod
    def full_target(self) -> str:
        """The target in full, as text."""

    @abstractmethod
    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target and return the change to it, without making it.

        Parameters
        ----------
        root : Module, optional
            The live model, for adapters of its submodules.

        Raises
        ------
        AdapterError
            When the target or the replacement isn't there.
        """

    def install(self) -> Patch:
        """Change the target at once, past any registry; returns what `restore` needs.

        Raises
        ------
        AdapterError
        """
        patch = self.resolve()
        patch.apply()
        return patch

    def restore(self, memento: Patch) -> None:
        """Take back what `install` did.

        Raises
        ------
        AdapterError
            When somebody else changed the target meanwhile.
        """
        memento.undo()

    def describe(
        self, state: AdapterState | str = AdapterState.PENDING, error: str | None = None
    ) -> AdapterStatus:
        """Return a status of this adapter."""
        return AdapterStatus(
            self.full_target, str(self.kind), self.full_target, self.install_site, AdapterState(state), error
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the adapter as JSON-ready data, without its kind.

        Raises
        ------
        SpecError
            When it holds code that has no importable name.
        """
        body = {f.name: self._written(f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"version": VERSION, **body}

    def _written(self, name: str) -> Any:
        value = getattr(self, name)
        if isinstance(value, Name):
            return value.encoded(f"{self}.{name}")
        return list(value) if isinstance(value, tuple) else value

    @classmethod
    def from_dict(cls: type[A], d: Mapping[str, Any]) -> A:
        """Return the adapter that `to_dict` described.

        Raises
        ------
        SpecError
            When the version is missing or unknown, a key is unknown or missing, or a value is malformed.
        """
        body = dict(d)
        version = body.pop("version", None)
        if type(version) is not int or version != VERSION:  # True and 1.0 equal 1
            raise SpecError(
                f"{cls.__name__}: version {version!r} found, this nvdd reads {VERSION}; update nvdd or the file"
            )
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(body.keys() - set(known))
        if unknown:
            raise SpecError(f"{cls.__name__}: unknown key {unknown[0]!r}; known keys are {', '.join(known)}")
        try:
            found = cls(**cls._read(body))
        except TypeError as exc:  # a key is missing
            raise SpecError(f"{cls.__name__}: {exc}") from exc
        # In a file code is named; any other value would have been taken for a live object.
        for name in _TEXTS & body.keys():
            if not isinstance(body[name], str) and not (body[name] is None and name in _OPTIONAL):
                raise SpecError(f"{cls.__name__}.{name}: expected a str, found {body[name]!r}")
        return found

    @classmethod
    def _read(cls, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.full_target})"
