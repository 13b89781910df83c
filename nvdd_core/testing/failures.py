"""How a check ends: passed, failed with a link to its documentation, or not applicable.

Key objects: `ConformanceError`, `NotApplicable`, `PartlyChecked`, `check`. Invariant: every failure of a check is a
`ConformanceError` whose message ends with the link of that check. Layer: testing.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

DOCS_URL: Final = "docs/conformance.md"
_PREFIXES: Final = ("test_", "assert_")

P = ParamSpec("P")
R = TypeVar("R")


class ConformanceError(AssertionError):
    """A check failed.

    Parameters
    ----------
    message : str
        What, where, found against expected, and what to do.
    anchor : str, optional
        The check's heading on the documentation page; `check` fills it in.
    """

    def __init__(self, message: str, anchor: str | None = None) -> None:
        self.message, self.anchor = message, anchor
        super().__init__(message if anchor is None else f"{message}\nSee {link(anchor)}")

    def at(self, anchor: str) -> ConformanceError:
        """Return this error with a link, the one that it has already or `anchor`."""
        if self.anchor is None:
            self.anchor = anchor
            self.args = (f"{self.message}\nSee {link(anchor)}",)
        return self


class NotApplicable(unittest.SkipTest):
    """The check says nothing about this subject; pytest and unittest show the message, which says why."""


class PartlyChecked(UserWarning):
    """A check passed, but left something out; pytest shows it among the warnings, a report as the reason."""


def link(anchor: str) -> str:
    """Return where a check is documented."""
    return f"{DOCS_URL}#{anchor}"


def anchor_of(name: str) -> str:
    """Return the anchor that belongs to a check's name (``test_global_state`` -> ``global-state``)."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("_", "-")


def check(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as a check: whatever goes wrong inside ends as a `ConformanceError` with its link."""
    anchor = anchor_of(function.__name__)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except unittest.SkipTest:
            raise
        except ConformanceError as error:
            raise error.at(anchor)  # noqa: B904 - the same error, with its link
        except Exception as error:
            raise ConformanceError(f"it raised {type(error).__name__}: {error}", anchor) from error

    return checked
