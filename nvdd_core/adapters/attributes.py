"""Adapters of Python attributes: methods, functions, and any attribute of a class or module.

Layer: adapters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from nvdd_core.adapters.base import Adapter, Name, Patch, unwrapped
from nvdd_core.adapters.places import AttributePatch, HolderPatch, Make, Switch, wrapped_entry, wrapper
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.plugins.rows import AdapterKind, Ref


def site_of(given: str, *code: object) -> str:
    """Return the place where an adapter was written: as given, else the module of its code."""
    names = [str(c) for c in code if isinstance(c, Name)]
    return given or (names[0].partition(":")[0] if names else "")


def checked_code(value: object, where: str) -> Name:
    """Return the name of something callable.

    Raises
    ------
    SpecError
        When it isn't callable, or a text names a module instead of code.
    """
    name = Name.of(value, where)
    if (name.live is not None and not callable(name.live)) or (name.live is None and ":" not in name):
        raise SpecError(f"{where}: expected a callable or 'package.module:function', found {value!r}")
    return name


def _checked_attribute(value: object, where: str) -> None:
    if not isinstance(value, str) or not value.isidentifier():
        raise SpecError(f"{where}: expected the name of an attribute, found {value!r}")


def _hold(adapter: Adapter, target: Name, replacement: Name) -> None:
    """Keep target and replacement by name, and where the replacement stands; for ``__post_init__``."""
    object.__setattr__(adapter, "target", target)
    object.__setattr__(adapter, "replacement", replacement)
    object.__setattr__(adapter, "install_site", site_of(adapter.install_site, replacement))


@dataclass(frozen=True)
class MethodAdapter(Adapter):
    """Hands calls of a method to `replacement`, for all instances of a class.

    Attributes
    ----------
    target : class or str
        The class, ``"package.module:Class"``.
    name : str
        The method: a plain, static or class method, or a property (its reading).
    replacement : callable or str
        ``replacement(original, instance, *args, **kwargs)``; for a class method `instance` is the class, for a
        static method it is left out.
    install_site : str
        Where this was written.

    Raises
    ------
    SpecError
        When an argument is malformed.
    """

    kind: ClassVar[str] = AdapterKind.METHOD.value

    target: type | str
    name: str
    replacement: Callable[..., Any] | str
    install_site: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        target = checked_code(self.target, "MethodAdapter.target")
        _checked_attribute(self.name, "MethodAdapter.name")
        replacement = checked_code(self.replacement, "MethodAdapter.replacement")
        _hold(self, target, replacement)

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return f"{self.target}.{self.name}"

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        owner = Name.of(self.target, "target").resolve(str(self))
        replacement = Name.of(self.replacement, "replacement").resolve(str(self))
        if not isinstance(owner, type):
            raise SpecError(
                f"{self}: {self.target} is no class but {owner!r}; use FunctionAdapter or PythonAdapter"
            )
        return AttributePatch(
            owner, self.name, str(self), lambda raw, on: wrapped_entry(str(self), raw, replacement, on)
        )


@dataclass(frozen=True)
class FunctionAdapter(Adapter):
    """Hands calls of a function to `replacement`, in every loaded module that holds the function.

    Attributes
    ----------
    target : callable or str
        The function, ``"package.module:function"``.
    replacement : callable or str
        ``replacement(original, *args, **kwargs)``.
    install_site : str
        Where this was written.

    Raises
    ------
    SpecError
        When an argument is malformed.
    """

    kind: ClassVar[str] = AdapterKind.FUNCTION.value

    target: Callable[..., Any] | str
    replacement: Callable[..., Any] | str
    install_site: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        target = checked_code(self.target, "FunctionAdapter.target")
        if target.live is None and "." in target.partition(":")[2]:
            raise SpecError(f"FunctionAdapter.target: {target} is an attribute of a class; use MethodAdapter")
        replacement = checked_code(self.replacement, "FunctionAdapter.replacement")
        _hold(self, target, replacement)

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return str(self.target)

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        target = Name.of(self.target, "target")
        replacement = Name.of(self.replacement, "replacement").resolve(str(self))

        def make(original: Any, switch: Switch) -> Any:
            if isinstance(original, type) or not callable(original):
                raise AdapterError(
                    f"{self}: a function is expected, found {original!r}; replace a value or a class by PythonAdapter, "
                    "a method of a class by MethodAdapter"
                )
            return wrapper(original, replacement, switch)

        return everywhere(target, str(self), make)


def everywhere(target: Name, what: str, make: Make) -> Patch:
    """Return the patch of what `target` names, wherever a module holds it."""
    original = unwrapped(target.resolve(what))
    module, _, name = target.partition(":")
    return HolderPatch(original, (sys.modules.get(module), name), what, make)


@dataclass(frozen=True)
class PythonAdapter(Adapter):
    """Gives an attribute of a module or class another value.

    Attributes
    ----------
    target : module, class or str
        ``"package.module"`` or ``"package.module:Class"``.
    name : str
        The attribute; it must exist.
    value : object
        Code (or a `Ref` to it) is kept by name, anything else as it is. Two adapters are equal when their values
        are of one type, or one dtype and shape, as well: 1 is neither True nor 1.0.
    install_site : str
        Where this was written.

    Raises
    ------
    SpecError
        When an argument is malformed.
    """

    kind: ClassVar[str] = AdapterKind.PYTHON.value

    target: Any
    name: str
    value: Any = field(compare=False)
    install_site: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        _checked_attribute(self.name, "PythonAdapter.name")
        object.__setattr__(self, "target", Name.of(self.target, "PythonAdapter.target"))
        if isinstance(self.value, Ref) or callable(self.value):
            object.__setattr__(self, "value", Name.of(self.value, "PythonAdapter.value"))
        object.__setattr__(self, "install_site", site_of(self.install_site, self.value))

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return f"{self.target}{'.' if ':' in self.target else ':'}{self.name}"

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        value = self.value.resolve(str(self)) if isinstance(self.value, Name) else self.value
        return AttributePatch(self.target.resolve(str(self)), self.name, str(self), lambda raw, on: value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PythonAdapter):
            return NotImplemented
        names = (self.target, self.name) == (other.target, other.name)
        return names and _same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash((self.target, self.name))  # a value need not have one

    def _written(self, name: str) -> Any:
        value = super()._written(name)
        if name != "value":
            return value
        if isinstance(self.value, Name):
            return {"ref": value}
        if not _is_json(self.value):
            raise SpecError(f"{self}.value: {self.value!r} can't be written to JSON; name it by a Ref")
        return {"value": self.value}

    @classmethod
    def _read(cls, body: dict[str, Any]) -> dict[str, Any]:
        value = body.get("value")
        if "value" not in body:
            return body
        if (
            not isinstance(value, dict)
            or len(value) != 1
            or not isinstance(value.get("ref", ""), str)
            or not value.keys() <= {"ref", "value"}
        ):
            raise SpecError(
                f"PythonAdapter.value: expected {{'ref': name}} or {{'value': data}}, found {value!r}"
            )
        read = checked_code(value["ref"], "PythonAdapter.value") if "ref" in value else value["value"]
        return {**body, "value": read}


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same to whoever reads them, which ``==`` alone does not say."""
    if a is b:
        return True
    kinds = [(type(v), getattr(v, "dtype", None), getattr(v, "shape", None)) for v in (a, b)]
    if kinds[0] != kinds[1]:
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, dict):
        same_keys = {(type(k), k) for k in a} == {(type(k), k) for k in b}
        return same_keys and all(_same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, float):
        a, b = repr(a), repr(b)  # one NaN is like another, and 0.0 is not -0.0
    try:
        equal = a == b
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:  # somebody else's comparison: what can't be told is not the same
        return False


def _is_json(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(type(k) is str and _is_json(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
