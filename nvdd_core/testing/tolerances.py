"""Named tolerances, and the one comparison that every check uses.

Key objects: `Tolerance`, `EXACT`, `TIGHT`, `SLOPE`, `SINGLE`, `compare`. Invariant: a difference that is not a
number never passes. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nvdd_core.testing.failures import ConformanceError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tolerance:
    """How far two results may lie apart.

    Parameters
    ----------
    name : str
    relative : float
        In units of the largest expected component.
    absolute : float
        In eV, eV/Angstrom, eV/Angstrom^3.
    reason : str
        Why it differs from the standard one of that name; required there.
    """

    name: str
    relative: float
    absolute: float
    reason: str = ""

    def limit(self, expected: Array) -> float:
        """Return the largest difference allowed from `expected`."""
        return self.absolute + self.relative * float(np.abs(expected).max(initial=0.0))


EXACT: Final = Tolerance("EXACT", 0.0, 0.0)
"""Bit for bit."""
TIGHT: Final = Tolerance("TIGHT", 1e-10, 1e-10)
"""The same sums in another order, in float64."""
SLOPE: Final = Tolerance("SLOPE", 1e-6, 1e-10)
"""A derivative against a difference quotient in float64."""
SINGLE: Final = Tolerance("SINGLE", 1e-3, 1e-4)
"""float32 against float64."""

STANDARD: Final = {tolerance.name: tolerance for tolerance in (EXACT, TIGHT, SLOPE, SINGLE)}


def chosen(own: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the standard tolerances with an author's own in their places.

    Raises
    ------
    ConformanceError
        When a name is unknown or a changed tolerance has no reason.
    """
    for name, tolerance in own.items():
        if name not in STANDARD:
            raise ConformanceError(
                f"tolerances: there is no tolerance '{name}'; there are {', '.join(STANDARD)}"
            )
        if not tolerance.reason.strip():
            raise ConformanceError(
                f"tolerances: '{name}' has no reason; give Tolerance({name!r}, ..., reason='...')"
            )
    return {**STANDARD, **own}


def compare(what: str, found: Any, expected: Any, tolerance: Tolerance, *, slack: float = 0.0) -> None:
    """Compare two arrays of one shape.

    Parameters
    ----------
    what : str
        What is compared and where, for the message.
    found, expected : array-like
    tolerance : Tolerance
    slack : float
        What rounding of the check itself may add.

    Raises
    ------
    ConformanceError
        With the largest difference, its place and the limit.
    """
    left, right = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if left.shape != right.shape:
        raise ConformanceError(f"{what}: found shape {left.shape}, expected {right.shape}")
    if left.size == 0:
        return
    distance = np.abs(left - right)
    limit = tolerance.limit(right) + slack
    if bool((distance <= limit).all()):  # false for a NaN, too
        return
    worst = np.unravel_index(int(np.argmax(np.where(np.isnan(distance), np.inf, distance))), distance.shape)
    place = f" at index {tuple(int(k) for k in worst)}" if left.ndim else ""
    raise ConformanceError(
        f"{what}: found {left[worst]:.12g}, expected {right[worst]:.12g}{place}; they differ by "
        f"{distance[worst]:.3g}, allowed is {limit:.3g} ({tolerance.name})"
    )
