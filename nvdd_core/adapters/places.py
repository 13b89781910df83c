"""The two ways to put one object in the place of another: at one attribute, or wherever a module holds it.

Invariants: what is put back is the raw entry that was taken out (a descriptor as such, an inherited attribute by
deletion); what somebody else put there meanwhile is left alone and reported. A wrapper that somebody kept passes
straight through once its patch is undone. From the second time on, applying and undoing is a few dictionary accesses.
Layer: adapters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from nvdd_core.adapters.base import ORIGINAL, Patch
from nvdd_core.errors import AdapterError


class Switch:
    """Whether a patch is applied; its wrappers ask, since they may be kept where no undoing reaches them."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


Make = Callable[[Any, Switch], Any]
"""(raw entry, as found; the switch of the patch) -> what takes its place."""

_MISSING: Any = object()
_OWN = "nvdd_core.adapters"


def wrapper(original: Any, replacement: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Return a function that hands `original` and its arguments to `replacement` while `switch` is on."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if switch.on else original(*args, **kwargs)

    setattr(call, ORIGINAL, original)
    return call


def wrapped_entry(what: str, raw: Any, replacement: Callable[..., Any], switch: Switch) -> Any:
    """Return the entry of a class that hands calls of the method `raw` to `replacement`; see `wrapper`.

    Raises
    ------
    AdapterError
        When `raw` is no method.
    """
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(wrapper(raw.__func__, replacement, switch))
    if isinstance(raw, property):
        return property(wrapper(raw.fget, replacement, switch), raw.fset, raw.fdel, raw.__doc__)
    if not callable(raw):
        raise AdapterError(
            f"{what}: a method is expected, found {raw!r}; replace other attributes by PythonAdapter"
        )
    call = wrapper(raw, replacement, switch)
    return call if hasattr(type(raw), "__get__") else staticmethod(call)


class AttributePatch(Patch):
    """Replaces one attribute of a class or module by what `make` makes of it.

    Parameters
    ----------
    owner : class or module
    name : str
    what : str
        The target for messages.
    make : callable
        Called again only when the attribute has changed.
    """

    def __init__(self, owner: Any, name: str, what: str, make: Make) -> None:
        self._owner, self._name, self._what, self._make = owner, name, what, make
        self._raw = self._seen = self._new = _MISSING
        self._switch = Switch()

    def keys(self) -> tuple[Hashable, ...]:
        """Return what stands for the target; see `Patch.keys`."""
        return (("attribute", id(self._owner), self._name),)

    def sources(self) -> tuple[Hashable, ...]:
        """Return what stands for the classes that the attribute is inherited from; see `Patch.sources`."""
        found: list[Hashable] = []
        for base in getattr(self._owner, "__mro__", ()):
            if base is not self._owner:
                found.append(("attribute", id(base), self._name))
            if self._name in vars(base):
                break
        return tuple(found)

    def apply(self) -> None:
        """Make the change; see `Patch.apply`."""
        raw = vars(self._owner).get(self._name, _MISSING)
        seen = self._inherited() if raw is _MISSING else raw
        if seen is not self._seen:
            self._new, self._seen = self._make(seen, self._switch), seen
        try:
            setattr(self._owner, self._name, self._new)
        except (AttributeError, TypeError) as exc:
            raise AdapterError(f"{self._what}: can't be set ({exc})") from exc
        self._raw = raw
        self._switch.on = True

    def undo(self) -> None:
        """Take the change back; see `Patch.undo`."""
        self._switch.on = False
        found = vars(self._owner).get(self._name, _MISSING)
        if found is not self._new:
            raise _taken(self._what, "it is gone" if found is _MISSING else f"found {found!r}")
        if self._raw is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._raw)

    def _inherited(self) -> Any:
        """Return the entry that a class inherits or a module makes up on demand."""
        for base in getattr(self._owner, "__mro__", ()):
            if self._name in vars(base):
                return vars(base)[self._name]
        try:
            return getattr(self._owner, self._name)
        except AttributeError as exc:
            raise AdapterError(
                f"{self._what}: there is no such attribute ({exc}); is this the right version?"
            ) from exc


class HolderPatch(Patch):
    """Replaces an object in every loaded module that holds it, under whatever name.

    A module may take the original between two uses, or the replacement while the patch is applied: both are found,
    by a search that is made only when a module was loaded or there are more references than before. Classes, closures
    and containers are not searched.

    Parameters
    ----------
    original : object
    home : (module or None, name)
        Where its name says that it is.
    what : str
        The target for messages.
    make : callable
        Called at once.
    """

    def __init__(self, original: Any, home: tuple[Any, str], what: str, make: Make) -> None:
        self._original, self._home, self._what = original, home, what
        self._switch = Switch()
        self._new = make(original, self._switch)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._loaded: tuple[int, str] | None = None
        self._known = [0, sys.getrefcount(self._new)]  # references to the original and to the replacement

    def keys(self) -> tuple[Hashable, ...]:
        """Return what stands for the target; see `Patch.keys`."""
        module, name = self._home
        home = [] if module is None else [("attribute", id(module), name)]
        return (("object", id(self._original)), *home)

    def apply(self) -> None:
        """Make the change; see `Patch.apply`."""
        loaded, places = _loaded(), self._places
        referred = sys.getrefcount(self._original)
        if (
            loaded != self._loaded
            or referred > self._known[0]
            or any(names.get(name) is not self._original for names, name in places)
        ):
            places = _holders(self._original)
            if not places:
                raise AdapterError(
                    f"{self._what}: no loaded module holds {self._original!r}; somebody replaced it, or it is reached "
                    "in another way (use MethodAdapter or PythonAdapter for an attribute of a class)"
                )
            self._places, self._loaded, self._known[0] = places, loaded, referred
        for names, name in places:
            names[name] = self._new
        self._switch.on = True

    def undo(self) -> None:
        """Take the change back; see `Patch.undo`."""
        self._switch.on = False
        taken = []
        for names, name in self._places:
            if names.get(name) is self._new:
                names[name] = self._original
            else:
                taken.append(f"{names.get('__name__')}.{name} is {names.get(name)!r}")
        if _loaded() != self._loaded or sys.getrefcount(self._new) > self._known[1]:
            for names, name in _holders(self._new):
                names[name] = self._original
                self._places.append((names, name))
            self._known[1] = max(self._known[1], sys.getrefcount(self._new))
        if taken:
            raise _taken(self._what, "; ".join(taken))


def _taken(what: str, found: str) -> AdapterError:
    return AdapterError(
        f"{what}: somebody else changed it while the adapter was installed ({found}), and that change is left in "
        "place; undo patches in the reverse order of their making"
    )


def _loaded() -> tuple[int, str]:
    """Return what changes when a module is loaded."""
    return len(sys.modules), next(reversed(sys.modules))


def _holders(value: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the namespace and the name of each place in a module that holds `value`."""
    namespaces = {
        id(vars(module)): vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not f"{name}.".startswith(f"{_OWN}.")
    }
    return [
        (names, name) for names in namespaces.values() for name, held in list(names.items()) if held is value
    ]


def home_of(value: Any) -> str | None:
    """Return ``"module:name"`` of a module that holds `value`, None when none does."""
    for names, name in _holders(value):
        return f"{names['__name__']}:{name}"
    return None
