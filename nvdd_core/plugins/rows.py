"""What a plugin may declare: small frozen rows, checked when they are built.

Key objects: `Ref` (a target named by a string, imported on first use), `PluginInfo`,
`ModelDecl`, `SpecDecl`, `AdapterDecl`. Invariant: building a row imports nothing and
does nothing; a row that exists is well formed. Layer: plugins.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from nvdd_core.errors import PluginValidationError

PLUGIN_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MODEL_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_SPEC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_REQUIRES = 100
_ADAPTER_NAME = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Maturity(StrEnum):
    """How far its author vouches for a plugin, a model or an adapter."""

    EXPERIMENTAL = "experimental"
    STABLE = "stable"
    DEPRECATED = "deprecated"


class AdapterKind(StrEnum):
    """Which sort of foreign code an adapter changes."""

    OP = "op"
    METHOD = "method"
    FUNCTION = "function"
    PYTHON = "python"
    JIT = "jit"
    MODULE = "module"


@dataclass(frozen=True)
class Ref:
    """A target named as ``"package.module:attribute"``, imported on first use only.

    Parameters
    ----------
    target
        Module path, a colon, and an attribute path (``"a.b:C.d"``).

    Raises
    ------
    PluginValidationError
        When the text has another form. Whether the target exists shows in `resolve`.
    """

    target: str

    def __post_init__(self) -> None:
        text: object = self.target
        module, colon, attribute = str(text).partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not isinstance(text, str) or not colon or not all(part.isidentifier() for part in parts):
            raise PluginValidationError(
                f"a Ref names its target as 'package.module:attribute', found {text!r}"
            )

    @property
    def module(self) -> str:
        """The module path before the colon."""
        return self.target.partition(":")[0]

    def resolve(self) -> object:
        """Import the module and return the attribute; errors are those of the import."""
        return pkgutil.resolve_name(self.target)

    def __str__(self) -> str:
        return self.target


def _check_name(row: str, name: object, pattern: re.Pattern[str]) -> None:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise PluginValidationError(f"{row}: the name must match {pattern.pattern}, found {name!r}")


def _check_ref(row: str, ref: object) -> None:
    if not isinstance(ref, Ref):
        raise PluginValidationError(
            f"{row}: ref must be a Ref such as Ref('package.module:attribute'), found {ref!r}"
        )


def _check_maturity(row: str, maturity: object) -> None:
    known = [m.value for m in Maturity]
    if maturity not in known:
        raise PluginValidationError(f"{row}: maturity must be one of {', '.join(known)}; found {maturity!r}")


def _check_texts(row: str, **texts: object) -> None:
    for field, text in texts.items():
        if not isinstance(text, str):
            raise PluginValidationError(f"{row}: {field} must be a str, found {text!r}")


def _frozen_names(row: str, field: str, names: object) -> tuple[str, ...]:
    """Return names of options as a tuple; a bare string is the usual slip and is refused."""
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise PluginValidationError(
            f"{row}: {field} must be a tuple of names of options such as ('checkpoint',), found {names!r}"
        )
    return tuple(names)


def _frozen_requires(row: str, requires: object) -> tuple[str, ...]:
    """Return `requires` as a tuple; a bare string is the usual slip and is refused."""
    if isinstance(requires, str) or not isinstance(requires, Iterable):
        raise PluginValidationError(
            f"{row}: requires must be a tuple of requirements such as ('package>=1.0',), found {requires!r}"
        )
    items = tuple(islice(requires, _MAX_REQUIRES + 1))
    if len(items) > _MAX_REQUIRES:
        raise PluginValidationError(
            f"{row}: requires holds more than {_MAX_REQUIRES} requirements; does it end?"
        )
    for item in items:
        if not isinstance(item, str):
            raise PluginValidationError(f"{row}: requires holds strings only, found {item!r}")
    return items


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin says of itself.

    Parameters
    ----------
    api
        The version of the plugin contract it was written for: an int inside the window that the
        core accepts. Anything else makes the plugin ``incompatible``, so it isn't checked here.
    title, description, homepage
        For people.
    maturity
        ``"experimental"``, ``"stable"`` or ``"deprecated"``.
    requires
        Requirements (PEP 508) of the whole plugin beyond those of its distribution; while one isn't
        met the plugin is ``unavailable``.
    """

    api: int | None = None
    title: str = ""
    maturity: str = "stable"
    homepage: str = ""
    description: str = ""
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_texts("PluginInfo", title=self.title, homepage=self.homepage, description=self.description)
        _check_maturity("PluginInfo", self.maturity)
        object.__setattr__(self, "requires", _frozen_requires("PluginInfo", self.requires))


@dataclass(frozen=True)
class SpecDecl:
    """A distribution spec under a name.

    Parameters
    ----------
    name
        An identifier, by custom ``SPEC_<MODEL>_<STRATEGY>``.
    ref
        Where the spec object lives.
    title
        For people.
    """

    name: str
    ref: Ref
    title: str = ""

    def __post_init__(self) -> None:
        row = f"SpecDecl {self.name!r}"
        _check_name(row, self.name, _SPEC_NAME)
        _check_ref(row, self.ref)
        _check_texts(row, title=self.title)


@dataclass(frozen=True)
class ModelDecl:
    """A model that users select by name.

    Parameters
    ----------
    name
        What users write after ``--model``; lower case letters, digits, ``_ . -``.
    ref
        The loader: ``load(*, dtype, device, **options) -> model``.
    spec
        Name of the default spec, declared by the same plugin or preset by the core.
    title, maturity
        For people.
    requires
        Requirements (PEP 508) of this model alone; while one isn't met the model is ``unavailable``.
    paths
        Names of the loader's options that are paths. A relative one counts from the folder where the user wrote it,
        and the loader gets it absolute.
    """

    name: str
    ref: Ref
    spec: str | None = None
    title: str = ""
    maturity: str = "stable"
    requires: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        row = f"ModelDecl {self.name!r}"
        _check_name(row, self.name, _MODEL_NAME)
        _check_ref(row, self.ref)
        if self.spec is not None:
            _check_name(f"{row}, spec", self.spec, _SPEC_NAME)
        _check_texts(row, title=self.title)
        _check_maturity(row, self.maturity)
        object.__setattr__(self, "requires", _frozen_requires(row, self.requires))
        object.__setattr__(self, "paths", _frozen_names(row, "paths", self.paths))


@dataclass(frozen=True)
class AdapterDecl:
    """A reversible change to foreign code.

    Parameters
    ----------
    name
        Qualified with the plugin's name: ``"<plugin>/<adapter>"``.
    kind
        ``"op"``, ``"method"``, ``"function"``, ``"python"``, ``"jit"`` or ``"module"``.
    target
        The foreign thing that is changed, as text; never imported for listing.
    ref
        Where the adapter object lives.
    title, maturity
        For people.
    requires
        Requirements (PEP 508) of this adapter alone; while one isn't met it is ``unavailable``.
    """

    name: str
    kind: str
    target: str
    ref: Ref
    title: str = ""
    maturity: str = "stable"
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        row = f"AdapterDecl {self.name!r}"
        _check_name(row, self.name, _ADAPTER_NAME)
        kinds = [k.value for k in AdapterKind]
        if self.kind not in kinds:
            raise PluginValidationError(f"{row}: kind must be one of {', '.join(kinds)}; found {self.kind!r}")
        _check_ref(row, self.ref)
        _check_texts(row, target=self.target, title=self.title)
        _check_maturity(row, self.maturity)
        object.__setattr__(self, "requires", _frozen_requires(row, self.requires))
