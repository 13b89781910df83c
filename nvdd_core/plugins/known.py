"""Packages that exist but may not be installed, and near names for slips of the pen.

Key objects: `KNOWN_MODELS` (data for one message only; nothing else in the core knows a
plugin by name), `suggestion`. Layer: plugins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Model name -> the distribution to install. Users see it when a model is missing.
KNOWN_MODELS: Final = {
    "lj": "nvdd-lj",
    "mace": "nvdd-mace",
    "ewald": "nvdd-pme",
    "pme": "nvdd-pme",
    "dftd3": "nvdd-dftd3",
    "uma": "nvdd-uma",
}


def near(name: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Return up to `n` known names that are close to `name`, the closest first."""
    from difflib import get_close_matches  # only for messages

    folded = {candidate.lower(): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(name.lower(), list(folded), n=n)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Phrase a suggestion in brackets when one of the known names is close; else return nothing."""
    matches = near(name, known)
    return f" (did you mean {matches[0]}?)" if matches else ""
