"""Packages that exist or are planned but may not be installed, and near names for slips of the pen.

Key objects: `KNOWN_MODELS`, `RELEASED` (data for messages only; nothing else in the core knows a
plugin by name), `suggestion`. Invariant: nobody is told to install a package that isn't released,
since its name may be anybody's on an index. Layer: plugins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Model name -> the distribution that has it, or will. Users see it when a model is missing.
KNOWN_MODELS: Final = {
    "lj": "nvdd-lj",
    "mace": "nvdd-mace",
    "ewald": "nvdd-pme",
    "pme": "nvdd-pme",
    "dftd3": "nvdd-dftd3",
    "uma": "nvdd-uma",
}
# Distributions that can be had; the others are planned.
RELEASED: Final = frozenset({"nvdd-lj", "nvdd-mace", "nvdd-dftd3", "nvdd-pme"})


def way_to(distribution: str) -> str:
    """Say in a sentence how a known distribution is installed, or that it can't be yet."""
    if distribution in RELEASED:
        return f"Install it: pip install {distribution}."
    return f"It is planned as {distribution}, which is not released yet."


def not_installed(models: Iterable[str]) -> list[str]:
    """Say of known models that are missing which can be installed and which are planned, a sentence each."""
    released, planned = [], []
    for model in models:
        if KNOWN_MODELS[model] in RELEASED:
            released.append(f"{model} (pip install {KNOWN_MODELS[model]})")
        else:
            planned.append(model)
    sentences = {"Known but not installed": released, "Planned, not released yet": planned}
    return [f"{words}: {', '.join(names)}." for words, names in sentences.items() if names]


def near(name: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Return up to `n` known names that are close to `name`, the closest first."""
    from difflib import get_close_matches  # only for messages

    folded = {candidate.lower(): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(name.lower(), list(folded), n=n)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Phrase a suggestion in brackets when one of the known names is close; else return nothing."""
    matches = near(name, known)
    return f" (did you mean {matches[0]}?)" if matches else ""
