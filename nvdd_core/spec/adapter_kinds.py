"""How a spec carries adapters without knowing them: a small protocol and a table of readers by kind.

Adapters live in a higher layer, which registers a reader for each kind. A spec that names a kind for which no
reader is registered is refused, never read in part.

Layer: spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from nvdd_core.errors import SpecError


@runtime_checkable
class AdapterData(Protocol):
    """An adapter as a spec sees it: something with a kind that can be written as JSON-ready data."""

    @property
    def kind(self) -> str:
        """Word that selects the reader, such as ``"op"``."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the adapter as JSON-ready data without the key ``kind``."""
        ...


Reader = Callable[[Mapping[str, Any]], AdapterData]

_READERS: dict[str, Reader] = {}


def register_adapter_kind(kind: str, reader: Reader) -> None:
    """Make adapters of `kind` readable from JSON.

    Raises
    ------
    ValueError
        When the kind has another reader already.
    """
    if _READERS.setdefault(kind, reader) != reader:
        raise ValueError(f"adapter kind {kind!r} has a reader already")


def is_adapter(value: object) -> TypeGuard[AdapterData]:
    """Whether `value` can be carried by a spec as an adapter."""
    return isinstance(value, AdapterData)


def encode_adapter(adapter: AdapterData) -> dict[str, Any]:
    """Return the adapter's data with its kind."""
    return {"kind": adapter.kind, **adapter.to_dict()}


def decode_adapter(value: Any, where: str) -> AdapterData:
    """Read an adapter.

    Raises
    ------
    SpecError
        When the kind is missing or has no reader.
    """
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: expected an adapter object, found {value!r}")
    body = dict(value)
    kind = body.pop("kind", None)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(map(repr, sorted(_READERS))) or "none; import the package that defines them first"
        raise SpecError(f"{where}.kind: adapter kind {kind!r} is not known (known: {known})")
    return reader(body)
