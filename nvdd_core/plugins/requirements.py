"""Requirements checked against what is installed, without importing what they name.

Key objects: `core_mismatch` (gate 1), `unmet` (what a row needs), `wanted_by`. Invariant: only
metadata is read. Layer: plugins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nvdd_core.errors import PluginValidationError

CORE = "nvdd-core"
_CORE_LINE = re.compile(r"\s*nvdd[-_.]+core(?![\w.-])", re.IGNORECASE)


def normalized(distribution: str) -> str:
    """Return a distribution's name in the one spelling used for comparing (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def core_mismatch(requires: Iterable[str], core_version: str) -> str | None:
    """Check a distribution's own requirement on the core against the core that runs (gate 1).

    pip checks this once, when it installs; a later upgrade of the core goes unnoticed.

    Parameters
    ----------
    requires
        The ``Requires-Dist`` lines.
    core_version
        Version of the running core.

    Returns
    -------
    str or None
        The reason why they don't fit, or None.
    """
    lines = [line for line in requires if _CORE_LINE.match(line)]
    if not lines:
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # costs 15 ms, rarely needed

    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return f"its metadata has an unreadable requirement {line!r} ({str(error).splitlines()[0]})"
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            return (
                f"requires {CORE}{requirement.specifier}, found {core_version}; "
                f"install versions of the two that fit together"
            )
    return None


def _installed_version(distribution: str) -> str | None:
    from importlib_metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def unmet(requires: Iterable[str]) -> str | None:
    """Say which of the requirements isn't met by what is installed.

    Parameters
    ----------
    requires
        Requirements (PEP 508); those whose marker doesn't apply here are skipped.

    Returns
    -------
    str or None
        The first one that isn't met, what was found, and what to do; None when all are met.

    Raises
    ------
    PluginValidationError
        When one of them can't be read.
    """
    lines = tuple(requires)
    if not lines:
        return None
    from packaging.requirements import InvalidRequirement, Requirement

    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise PluginValidationError(
                f"requires: {line!r} is no requirement ({str(error).splitlines()[0]})"
            ) from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _installed_version(requirement.name)
        needed = f"{requirement.name}{requirement.specifier}"
        if found is None:
            return f"needs {needed}, which is not installed: pip install '{needed}'"
        if not requirement.specifier.contains(found, prereleases=True):
            return f"needs {needed}, found {found}{_who_pins(requirement.name, needed)}"
    return None


def _who_pins(distribution: str, needed: str) -> str:
    """Name the packages that want another version: with them here, pip can only break one or the other."""
    pinning = wanted_by(distribution, needed)
    if not pinning:
        return f": pip install '{needed}'"
    return f" because of {', '.join(pinning)}; use a separate environment for the one or the other"


def wanted_by(distribution: str, needed: str) -> tuple[str, ...]:
    """Return installed distributions whose own requirement on `distribution` rules out what is `needed`.

    A specifier has no intersection that could be asked for, so a pair counts as clashing when
    neither side's own bounds satisfy the other.
    """
    from importlib_metadata import distributions
    from packaging.requirements import InvalidRequirement, Requirement

    wanted = [c for c in Requirement(needed).specifier if c.operator in ("==", ">=", "~=")]
    bounds = [clause.version.removesuffix(".*") for clause in wanted]
    found: set[str] = set()
    for dist in distributions():
        for line in dist.requires or ():
            if normalized(re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0]) != normalized(distribution):
                continue
            try:
                other = Requirement(line)
            except InvalidRequirement:
                continue
            applies = other.marker is None or other.marker.evaluate({"extra": ""})
            if applies and bounds and not any(other.specifier.contains(b, prereleases=True) for b in bounds):
                found.add(dist.name)
    return tuple(sorted(found))
