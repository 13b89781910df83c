"""What a model can't do, said by its author with a reason.

Key objects: `CAPABILITIES`, `no`, `only`, `Reduced`. Invariant: everything is expected of a model unless a
`Reduced` with a reason says otherwise, and a report shows each one. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nvdd_core.plugins.known import suggestion
from nvdd_core.testing.failures import ConformanceError, NotApplicable

CAPABILITIES: Final = {
    "stress": "gives a stress",
    "differentiable": "its forces and stress are derivatives of its energy",
    "translation_invariant": "only differences of positions matter",
    "rotation_invariant": "the energy doesn't change when everything is rotated",
    "extensive": "a replica of a periodic system has that many times its energy",
    "local": "an atom is influenced by others within layers x cutoff only",
    "open_boundaries": "systems without periodic directions can be evaluated",
    "batch": "several systems can be evaluated together",
    "float32": "runs in float32 as well as in float64",
    "copyable": "can be pickled and deep-copied",
    "deterministic": "the same input gives the same bits on a CPU",
    "strategies": "runs under every strategy that distribution_spec doesn't refuse",
}


@dataclass(frozen=True)
class Reduced:
    """A capability that a model lacks, or has in part.

    Parameters
    ----------
    reason : str
        Why; shown in reports.
    values : tuple of str
        What is left of it; empty for nothing.
    """

    reason: str
    values: tuple[str, ...] = ()


def no(reason: str) -> Reduced:
    """Say that a capability is missing, and why."""
    return Reduced(reason)


def only(*values: str, reason: str) -> Reduced:
    """Say that a capability holds for these values alone (``only("halo", reason=...)``), and why."""
    return Reduced(reason, values)


def check_reasons(capabilities: Mapping[str, object]) -> None:
    """Check names, and that whatever is reduced has a reason.

    Raises
    ------
    ConformanceError
        Naming the first one at fault.
    """
    for name, value in capabilities.items():
        if name not in CAPABILITIES:
            raise ConformanceError(
                f"capabilities: there is no '{name}'{suggestion(name, list(CAPABILITIES))}; there are "
                f"{', '.join(CAPABILITIES)}"
            )
        if value is True:
            continue
        if not isinstance(value, Reduced) or not value.reason.strip():
            raise ConformanceError(
                f"capabilities: '{name}' is {value!r} without a reason; write {{{name!r}: no('why')}}"
            )


def need(capabilities: Mapping[str, object], *names: str) -> None:
    """Skip a check that makes no sense without the capabilities `names`.

    Raises
    ------
    NotApplicable
        With the author's reason.
    """
    for name in names:
        value = capabilities.get(name, True)
        if isinstance(value, Reduced) and not value.values:
            raise NotApplicable(f"{name}: no, {value.reason}")
