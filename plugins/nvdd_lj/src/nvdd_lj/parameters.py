"""Lennard-Jones parameters: options in, tables of pair coefficients out.

Key objects: `Parameters` (what the model knows), `parse_options` (reads the user's options),
`Shift` (what is done at the cutoff). Invariant: a `Parameters` object is complete and valid, so
nothing after it has to check numbers again. Layer: plugin.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from ase.data import atomic_numbers, chemical_symbols

from nvdd_core.errors import InputError

BOLTZMANN = 8.617333262e-5
"""Boltzmann's constant, eV/K."""

BUILT_IN: Mapping[str, tuple[float, float]] = {
    "Ne": (34.9, 2.78),
    "Ar": (119.8, 3.405),
    "Kr": (171.0, 3.60),
    "Xe": (221.0, 4.10),
}
"""Symbol to (epsilon / k_B in K, sigma in Angstrom), fitted to second virial coefficients.

J. O. Hirschfelder, C. F. Curtiss, R. B. Bird, Molecular Theory of Gases and Liquids (Wiley, 1954),
table I-A. Argon's values are those of A. Michels, Hub. Wijker, Hk. Wijker, Physica 15, 627 (1949),
which the simulation literature of liquid argon uses since A. Rahman, Phys. Rev. 136, A405 (1964).
"""

CUTOFF_IN_SIGMA = 2.5
"""The default cutoff over the largest sigma."""

LARGEST_NUMBER = len(chemical_symbols) - 1

_QUANTITIES = ("epsilon", "sigma")
_LARGEST = 1e15  # whose square float32 still holds
_UNITS = {"epsilon": "eV", "sigma": "Angstrom", "cutoff": "Angstrom"}

Table = npt.NDArray[np.float64]


class Shift(StrEnum):
    """What is added so that the truncated pair energy ends smoothly at the cutoff."""

    NONE = "none"
    ENERGY = "energy"
    FORCE = "force"


@dataclass(frozen=True)
class Parameters:
    """Pair tables of a set of species.

    Attributes
    ----------
    numbers : tuple of int
        Atomic numbers with values of their own, ascending.
    wildcard : bool
        Whether one more species, last in the tables, stands for every other atomic number.
    epsilon, sigma : tuple of tuple of float
        Well depth (eV) and diameter (Angstrom) of every pair of species, symmetric.
    cutoff : float
        Pairs at this distance (Angstrom) or farther don't interact.
    shift : Shift
        What is done at the cutoff.
    """

    numbers: tuple[int, ...]
    wildcard: bool
    epsilon: tuple[tuple[float, ...], ...]
    sigma: tuple[tuple[float, ...], ...]
    cutoff: float
    shift: Shift

    @property
    def n_species(self) -> int:
        """How many rows the tables have."""
        return len(self.numbers) + int(self.wildcard)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols of `numbers`."""
        return tuple(chemical_symbols[number] for number in self.numbers)

    def lookup(self) -> npt.NDArray[np.int64]:
        """Species index of every atomic number.

        Returns
        -------
        (LARGEST_NUMBER + 2,) int64
            -1 where nothing is known; the last entry stands for numbers outside the periodic table.
        """
        rest = len(self.numbers) if self.wildcard else -1
        table = np.full(LARGEST_NUMBER + 2, rest, dtype=np.int64)
        table[list(self.numbers)] = np.arange(len(self.numbers))
        return table

    def coefficients(self) -> Table:
        """Numbers that a kernel reads for each pair of species.

        Returns
        -------
        (T, T, 4) float64
            sigma^2, 4 epsilon, a constant e0 and a slope f1, such that the pair energy within the cutoff is
            ``4 eps (s^6 - s^3) + e0 + f1 r`` with ``s = sigma^2 / r^2``.
        """
        sigma, epsilon = np.array(self.sigma), np.array(self.epsilon)
        six = (sigma / self.cutoff) ** 6
        energy = 4.0 * epsilon * six * (six - 1.0)
        slope = -24.0 * epsilon * six * (2.0 * six - 1.0) / self.cutoff
        zero = np.zeros_like(energy)
        constant, linear = {
            Shift.NONE: (zero, zero),
            Shift.ENERGY: (-energy, zero),
            Shift.FORCE: (self.cutoff * slope - energy, -slope),
        }[self.shift]
        return np.stack([sigma**2, 4.0 * epsilon, constant, linear], axis=-1)


def parse_options(options: Mapping[str, object]) -> Parameters:
    """Read the model's options.

    Parameters
    ----------
    options : mapping of str to object
        ``epsilon``, ``sigma`` (eV, Angstrom) for every species, ``epsilon.Ar`` for one, ``epsilon.Ar-Kr`` for
        one pair instead of the Lorentz-Berthelot rule, ``cutoff`` (Angstrom) and ``shift``. Values may be
        strings. A mapping ``epsilon={"Ar": ...}`` means the same as ``epsilon.Ar``.

    Raises
    ------
    InputError
        An option that doesn't exist, or a value that makes no sense.
    """
    given = _Given()
    for key, value in _flatten(options):
        given.take(key, value)
    return given.parameters()


class _Given:
    """Options as they were read, before they are completed from the built-in table."""

    def __init__(self) -> None:
        self.everywhere: dict[str, float] = {}
        self.one: dict[str, dict[int, float]] = {name: {} for name in _QUANTITIES}
        self.pair: dict[str, dict[tuple[int, int], float]] = {name: {} for name in _QUANTITIES}
        self.cutoff: float | None = None
        self.shift = Shift.NONE

    def take(self, key: str, value: object) -> None:
        """Read one option."""
        name, _, where = key.partition(".")
        if name == "cutoff" and not where:
            self.cutoff = _positive(key, value)
        elif name == "shift" and not where:
            self.shift = _shift(value)
        elif name in _QUANTITIES:
            self._take_quantity(key, name, where, value)
        else:
            raise InputError(_unknown_option(key))

    def _take_quantity(self, key: str, name: str, where: str, value: object) -> None:
        number = _positive(key, value) if name == "sigma" else _not_negative(key, value)
        elements = tuple(_element(key, symbol) for symbol in where.split("-")) if where else ()
        if not elements and "." not in key:
            self.everywhere[name] = number
        elif len(elements) == 1:
            self.one[name][elements[0]] = number
        elif len(elements) == 2:
            first, second = sorted(elements)
            if self.pair[name].setdefault((first, second), number) != number:
                raise InputError(f"lj: option {key} = {number:g} is given twice with different values")
        else:
            raise InputError(
                f"lj: option {key!r} names {len(elements)} elements; give one (Ar) or a pair (Ar-Kr)"
            )

    def parameters(self) -> Parameters:
        """Complete the tables."""
        named = {number for name in _QUANTITIES for number in self.one[name]}
        named |= {number for name in _QUANTITIES for pair in self.pair[name] for number in pair}
        wildcard = len(self.everywhere) == len(_QUANTITIES)
        if not named and not wildcard:
            named = {atomic_numbers[symbol] for symbol in BUILT_IN}
        numbers = tuple(sorted(named))
        epsilon, sigma = (self._column(name, numbers, wildcard) for name in _QUANTITIES)
        epsilons = self._mix("epsilon", np.sqrt(np.outer(epsilon, epsilon)), numbers)
        sigmas = self._mix("sigma", np.add.outer(sigma, sigma) / 2.0, numbers)
        cutoff = CUTOFF_IN_SIGMA * float(sigmas.max()) if self.cutoff is None else self.cutoff
        return Parameters(numbers, wildcard, _rows(epsilons), _rows(sigmas), cutoff, self.shift)

    def _column(self, name: str, numbers: Sequence[int], wildcard: bool) -> Table:
        values = [self._value(name, number) for number in numbers]
        return np.array(values + ([self.everywhere[name]] if wildcard else []))

    def _value(self, name: str, number: int) -> float:
        if number in self.one[name]:
            return self.one[name][number]
        if name in self.everywhere:
            return self.everywhere[name]
        symbol = chemical_symbols[number]
        if symbol not in BUILT_IN:
            raise InputError(
                f"lj: {symbol} is named in the options but has no {name}; give --option {name}.{symbol}="
                f"VALUE ({_UNITS[name]}), or {name}=VALUE for every element (built in: {', '.join(BUILT_IN)})"
            )
        kelvin, diameter = BUILT_IN[symbol]
        return kelvin * BOLTZMANN if name == "epsilon" else diameter

    def _mix(self, name: str, table: Table, numbers: Sequence[int]) -> Table:
        for (first, second), value in self.pair[name].items():
            i, j = numbers.index(first), numbers.index(second)
            table[i, j] = table[j, i] = value
        return table


def _flatten(options: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _rows(table: Table) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in table)


def _number(key: str, value: object) -> float:
    wanted = f"a number ({_UNITS[key.partition('.')[0]]})"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"lj: option {key} = {value!r} is not {wanted}")
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"lj: option {key} = {value!r} is not {wanted}") from None
    if not math.isfinite(number):
        raise InputError(f"lj: option {key} = {value!r} is not finite; give {wanted}")
    if abs(number) > _LARGEST:
        raise InputError(f"lj: option {key} = {value!r} is too large; give {wanted} up to {_LARGEST:g}")
    return number


def _positive(key: str, value: object) -> float:
    number = _number(key, value)
    if number <= 0.0:
        raise InputError(f"lj: option {key} = {value!r} must be greater than 0")
    return number


def _not_negative(key: str, value: object) -> float:
    number = _number(key, value)
    if number < 0.0:
        raise InputError(f"lj: option {key} = {value!r} must not be negative")
    return number


def _shift(value: object) -> Shift:
    choices = [choice.value for choice in Shift]
    if not isinstance(value, str) or value.lower() not in choices:
        raise InputError(
            f"lj: option shift = {value!r} is not one of {', '.join(choices)}{_near(value, choices)}"
        )
    return Shift(value.lower())


def _element(key: str, symbol: str) -> int:
    if symbol not in atomic_numbers:
        near = _near(symbol, list(atomic_numbers))
        raise InputError(f"lj: option {key!r} names {symbol!r}, which is no element's symbol{near}")
    return int(atomic_numbers[symbol])


def _unknown_option(key: str) -> str:
    forms = ["epsilon", "sigma", "cutoff", "shift"]
    stem, dot, rest = key.partition(".")
    near = _near(stem, forms) if stem not in forms else f"; {stem} takes no {dot}{rest}"
    return (
        f"lj: there is no option {key!r}{near}. Options: epsilon, sigma (every element), epsilon.Ar, "
        "sigma.Ar (one element), epsilon.Ar-Kr, sigma.Ar-Kr (one pair), cutoff, shift"
    )


def _near(word: object, choices: Sequence[str]) -> str:
    lowered = {choice.lower(): choice for choice in choices}
    text = str(word).lower()
    close = difflib.get_close_matches(text, lowered, n=3, cutoff=0.6)
    close += [name for name in lowered if len(text) >= 3 and name.startswith(text) and name not in close]
    return f" (did you mean {' or '.join(lowered[name] for name in close[:3])}?)" if close else ""
