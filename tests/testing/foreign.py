"""Foreign code as adapters find it, and adapters that leave traces."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from nvdd_core.adapters import MethodAdapter, PythonAdapter

VALUE = [1, 2]
OTHER = [3]


class Thing:
    """A foreign class."""

    def answer(self) -> int:
        return 42


def louder(original: Any, instance: Any) -> int:
    return int(original(instance)) + 1


class _Leaving:
    """A patch that does something else than it should."""

    def __init__(self, inner: Any, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def keys(self) -> tuple[Hashable, ...]:
        return tuple(self.inner.keys())

    def sources(self) -> tuple[Hashable, ...]:
        return tuple(self.inner.sources())

    def apply(self) -> None:
        if self.fault != "idle":
            self.inner.apply()

    def undo(self) -> None:
        match self.fault:
            case "stays":
                return
            case "copy":
                self.inner.undo()
                globals()["VALUE"] = list(VALUE)
            case "trace":
                self.inner.undo()
                Thing.trace = 1  # type: ignore[attr-defined]
            case "idle":
                return
            case _:
                self.inner.undo()


class Leaving(PythonAdapter):
    """Changes VALUE; how it fails is said in ``install_site``."""

    def resolve(self, root: Any = None) -> Any:
        return _Leaving(super().resolve(root), self.install_site)


def good() -> list[Any]:
    """Adapters that do what they should."""
    return [
        MethodAdapter("tests.testing.foreign:Thing", "answer", "tests.testing.foreign:louder"),
        PythonAdapter("tests.testing.foreign", "VALUE", "tests.testing.foreign:louder"),
    ]


def leaving(fault: str) -> Leaving:
    """An adapter with one fault."""
    return Leaving("tests.testing.foreign", "VALUE", "tests.testing.foreign:louder", install_site=fault)
