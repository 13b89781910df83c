"""A function whose result can't travel between processes."""

from __future__ import annotations

from collections.abc import Callable


def make() -> Callable[[], None]:
    """Return something that pickle refuses."""
    return lambda: None
