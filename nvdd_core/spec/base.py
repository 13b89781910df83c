"""`SpecData`: what every spec class can do - merge, replace, travel as JSON, be saved and loaded.

A spec is a frozen dataclass whose fields are enums, plain values, other specs, named maps of specs or tuples of
adapters. Each instance remembers which fields its author named. ``a | b`` takes from `b` what was named there
and from `a` everything else, field by field and inside nested specs, so merging drops nothing and can also set
a field back to its default. JSON keeps that memory, so a spec means the same before and after travelling.

Invariants: ``from_dict(to_dict(s)) == s``; an unknown key, a missing version or a value of the wrong type is a
`SpecError` that names the place.
Layer: spec.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nvdd_core.errors import SpecError
from nvdd_core.spec.adapter_kinds import encode_adapter, is_adapter
from nvdd_core.spec.frozen import FrozenMap

VERSION = 1
"""Version of the JSON form; raised when the meaning of a key changes."""

S = TypeVar("S", bound="SpecData")
E = TypeVar("E", bound=StrEnum)
Decode = Callable[[Any, str], Any]
"""(JSON value, place) -> field value."""

_GIVEN = "given"


@dataclasses.dataclass(frozen=True)
class SpecData:
    """Base of the spec classes; see the module for what it gives them."""

    VARIANT: ClassVar[str | None] = None
    """Written as ``type`` where several classes can stand in one place."""
    READERS: ClassVar[Mapping[str, Decode]] = {}
    """How each field is read from JSON."""
    _given: ClassVar[frozenset[str]]  # set on each instance, outside the dataclass fields

    def __new__(cls: type[S], *args: Any, **kwargs: Any) -> S:
        """Note which fields are named; the dataclass does the rest."""
        self = object.__new__(cls)
        names = [f.name for f in dataclasses.fields(cls)][: len(args)]
        object.__setattr__(self, "_given", frozenset(names) | kwargs.keys())
        return self

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that the author of this spec named."""
        return self._given

    def replace(self: S, **changes: Any) -> S:
        """Return this spec with other values in the named fields, and every other field as it is.

        Raises
        ------
        SpecError
            When a name is not a field.
        """
        names = _names(type(self))
        unknown = sorted(changes.keys() - names)
        if unknown:
            raise SpecError(
                f"{type(self).__name__} has no field {unknown[0]!r}; its fields are {', '.join(names)}"
            )
        return _build(
            type(self), {n: getattr(self, n) for n in names} | changes, self._given | changes.keys()
        )

    def __or__(self: S, other: object) -> S:
        if type(other) is not type(self):
            return NotImplemented
        right = other
        values = {
            n: _merge(getattr(self, n), getattr(right, n)) if n in right._given else getattr(self, n)
            for n in _names(type(self))
        }
        return _build(type(self), values, self._given | right._given)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON-ready data with a version."""
        return {"version": VERSION, **self._body()}

    @classmethod
    def from_dict(cls: type[S], data: Mapping[str, Any]) -> S:
        """Return the spec that `to_dict` described.

        Raises
        ------
        SpecError
            When the version is missing or unknown, a key is unknown, or a value has the wrong type.
        """
        name = cls.__name__
        body = dict(_mapping(data, name))
        if "version" not in body:
            raise SpecError(
                f"{name}: no 'version' found, expected {VERSION}; was this written by to_dict or save?"
            )
        version = body.pop("version")
        if type(version) is not int or version != VERSION:  # True and 1.0 equal 1
            raise SpecError(
                f"{name}: version {version!r} found, this nvdd reads {VERSION}; update nvdd or the file"
            )
        return cls._from_body(body, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the spec to a JSON file, aside first and then renamed, so that the file is always whole.

        Raises
        ------
        SpecError
            When the file can't be written, or the spec holds code that has no importable name.
        """
        target = Path(path)
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            _write_whole(target, text)
        except OSError as exc:
            raise SpecError(f"{path}: the spec can't be written: {exc.strerror or exc}") from exc

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str]) -> S:
        """Read a spec that `save` wrote.

        Raises
        ------
        SpecError
            When the file can't be read, is no JSON or is no spec of this class; the message names the file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_dict(data)
        except OSError as exc:
            raise SpecError(f"{path}: can't be read as a spec: {exc.strerror or exc}") from exc
        except SpecError as exc:
            raise SpecError(f"{path}: {exc}") from exc
        except (ValueError, RecursionError) as exc:  # malformed JSON or text that is no UTF-8
            raise SpecError(f"{path}: not a JSON file: {exc}") from exc

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {} if self.VARIANT is None else {"type": self.VARIANT}
        names = _names(type(self))
        body.update({n: _encode(getattr(self, n)) for n in names})
        if self._given != frozenset(names):
            body[_GIVEN] = sorted(self._given)
        return body

    @classmethod
    def _from_body(cls: type[S], data: Any, where: str) -> S:
        body = dict(_mapping(data, where))
        if cls.VARIANT is not None:
            body.pop("type", None)
        decoders = cls.READERS
        given = body.pop(_GIVEN, sorted(body.keys() & decoders.keys()))
        unknown = sorted(body.keys() - decoders.keys())
        if unknown:
            raise SpecError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(decoders)}")
        if not isinstance(given, list) or not all(isinstance(n, str) and n in decoders for n in given):
            raise SpecError(f"{where}.{_GIVEN}: expected a list of field names, found {given!r}")
        if absent := sorted(set(given) - body.keys()):
            raise SpecError(f"{where}.{_GIVEN}: names {absent[0]!r}, for which there is no value")
        values = {n: decoders[n](v, f"{where}.{n}") for n, v in body.items()}
        return _build(cls, values, frozenset(given))

    def _note_given(self, names: frozenset[str]) -> None:
        object.__setattr__(self, "_given", names)

    def _set_enum(self, name: str, kind: type[E]) -> None:
        """Let a field that holds an enum be given by its word as well; for ``__post_init__``."""
        value = decode_enum(kind)(getattr(self, name), f"{type(self).__name__}.{name}")
        object.__setattr__(self, name, value)

    def _require(self, name: str, kind: type | tuple[type, ...]) -> None:
        """Raise when a field holds something else than `kind`; for ``__post_init__``."""
        value = getattr(self, name)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise SpecError(f"{type(self).__name__}.{name}: expected {expected}, found {value!r}")


def decode_enum(kind: type[E]) -> Callable[[Any, str], E]:
    """Return a reader of the words of an enum."""

    def decode(value: Any, where: str) -> E:
        try:
            return kind(value)
        except ValueError:
            words = ", ".join(repr(str(m.value)) for m in kind)
            raise SpecError(f"{where}: expected one of {words}, found {value!r}") from None

    return decode


def decode_value(*kinds: type) -> Decode:
    """Return a reader of plain values of the given types; a bool is no number."""

    def decode(value: Any, where: str) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise SpecError(f"{where}: expected {' or '.join(k.__name__ for k in kinds)}, found {value!r}")
        return value

    return decode


def decode_spec(cls: type[S]) -> Callable[[Any, str], S]:
    """Return a reader of nested specs of one class."""
    return cls._from_body


def decode_variant(*classes: type[SpecData]) -> Decode:
    """Return a reader of a nested spec that may be of several classes, told apart by ``type``."""
    by_name = {c.VARIANT: c for c in classes}

    def decode(value: Any, where: str) -> SpecData:
        kind = _mapping(value, where).get("type")
        if not isinstance(kind, str) or kind not in by_name:
            raise SpecError(f"{where}.type: expected one of {', '.join(map(repr, by_name))}, found {kind!r}")
        return by_name[kind]._from_body(value, where)

    return decode


def decode_map(item: Decode) -> Callable[[Any, str], FrozenMap[Any]]:
    """Return a reader of a named map whose values `item` reads."""

    def decode(value: Any, where: str) -> FrozenMap[Any]:
        return FrozenMap({k: item(v, f"{where}[{k!r}]") for k, v in _mapping(value, where).items()})

    return decode


def decode_tuple(item: Decode) -> Callable[[Any, str], tuple[Any, ...]]:
    """Return a reader of a list whose entries `item` reads."""

    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise SpecError(f"{where}: expected a list, found {value!r}")
        return tuple(item(v, f"{where}[{i}]") for i, v in enumerate(value))

    return decode


def _write_whole(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _names(cls: type[SpecData]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _build(cls: type[S], values: Mapping[str, Any], given: frozenset[str]) -> S:
    out = cls(**values)
    out._note_given(given)
    return out


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise SpecError(f"{where}: expected an object with named keys, found {value!r}")
    return value


def _merge(left: Any, right: Any) -> Any:
    if isinstance(left, SpecData) and type(left) is type(right):
        return left | right
    if isinstance(left, FrozenMap) and isinstance(right, FrozenMap):
        both = {k: _merge(left[k], v) if k in left else v for k, v in right.items()}
        return FrozenMap({**left, **both})
    if isinstance(left, tuple) and isinstance(right, tuple):
        return (*left, *(item for item in right if item not in left))
    return right


def _encode(value: Any) -> Any:
    if isinstance(value, SpecData):
        return value._body()
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if is_adapter(value):
        return encode_adapter(value)
    return value
