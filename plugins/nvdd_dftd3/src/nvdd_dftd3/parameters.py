"""Options to damping parameters and cutoffs.

Key objects: `Parameters`, `parse_options`, `functional_names`. Invariant: lengths of the damping function are in
Bohr, as the literature gives them; cutoffs in Angstrom, as nvdd does. Layer: plugin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from ase.units import Bohr

from nvdd_core.errors import InputError

CUTOFF = 60.0 * Bohr
"""Reach of pair energies in s-dftd3, Angstrom."""
CN_CUTOFF = 40.0 * Bohr
"""Reach of coordination numbers in s-dftd3, Angstrom."""
_NUMBERS = ("s6", "s8", "a1", "a2", "cutoff", "cn_cutoff")


@dataclass(frozen=True)
class Parameters:
    """Damping and cutoffs.

    Attributes
    ----------
    s6, s8 : float
        Weights of the terms in r**-6 and r**-8.
    a1, a2 : float
        Slope, and offset in Bohr, of the damping radius.
    cutoff, cn_cutoff : float
        Reach of pair energies and of coordination numbers, Angstrom.
    """

    s6: float
    s8: float
    a1: float
    a2: float
    cutoff: float = CUTOFF
    cn_cutoff: float = CN_CUTOFF

    @property
    def reach(self) -> float:
        """Length of the longest edge that is read, Angstrom."""
        return max(self.cutoff, self.cn_cutoff)


def parse_options(options: Mapping[str, object]) -> Parameters:
    """Read the options of a model.

    Parameters
    ----------
    options : mapping
        ``functional`` (a name), or ``s8``, ``a1`` and ``a2`` (``s6`` is 1 then); what is given beside a functional
        replaces its parameter. ``cutoff`` and ``cn_cutoff`` in Angstrom.

    Raises
    ------
    InputError
        An unknown functional, with near names; a value that makes no sense; or too few parameters.
    """
    given = {name: _number(name, options[name]) for name in _NUMBERS if name in options}
    for name in ("cutoff", "cn_cutoff"):
        if not given.get(name, 1.0) > 0.0:
            raise InputError(f"dftd3: option {name} = {options[name]!r}: give a length above 0 Angstrom")
    functional = options.get("functional")
    named = {"s6": 1.0} if functional is None else _functional(functional)
    damping = {**named, **given}
    missing = [name for name in ("s8", "a1", "a2") if name not in damping]
    if missing:
        raise InputError(
            f"dftd3: no {', '.join(missing)}: give the functional that dispersion is added to, "
            "--option functional=NAME (pbe, b3lyp, revpbe, ...), or all of s8, a1 and a2"
        )
    return Parameters(**damping)


def functional_names() -> list[str]:
    """Return every name of a functional that is understood."""
    known = _known()
    return sorted([*known["functionals"], *known["aliases"]])


def _functional(name: object) -> dict[str, float]:
    """Return the damping parameters of a functional; case and hyphens of its name don't count."""
    known = _known()
    functionals, aliases = known["functionals"], known["aliases"]
    plain = str(name).lower().replace("-", "")
    found: dict[str, float] | None = functionals.get(aliases.get(plain, plain))
    if found is None:
        names = functional_names()
        raise InputError(
            f"dftd3: there are no parameters for the functional {name!r}{_near(plain, names)}; {len(names)} names are "
            "known: python -c 'from nvdd_dftd3.parameters import functional_names; print(*functional_names())'. "
            "Or give s8, a1 and a2"
        )
    return found


@cache
def _known() -> dict[str, Any]:
    text = files(__package__).joinpath("functionals.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"dftd3: option {name} = {value!r}: give a number")
    return float(value)


def _near(name: str, known: Sequence[str]) -> str:
    """Phrase a suggestion in brackets when known names are close; else return nothing."""
    matches = get_close_matches(name.lower(), known, n=3)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""
