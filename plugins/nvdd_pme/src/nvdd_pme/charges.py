"""Where charges come from: another model, an option that gives them per element, or a column of the structure file.

Key objects: `parse_charges`, `Charges`. Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ase.data import atomic_numbers, chemical_symbols

from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch

COLUMNS = ("charges", "initial_charges")
"""Columns of a structure file that are read, the first that there is."""

_HOW = (
    "give the structure file a column 'charges' or 'initial_charges' (e), or --option charges=\"Na=1,Cl=-1\", or put a "
    "model in front that predicts them"
)


def parse_charges(model: str, value: object) -> dict[int, float]:
    """Read the option ``charges``: text such as ``"Na=1,Cl=-1"``, or a mapping of symbols to numbers.

    Raises
    ------
    InputError
        Naming the part that can't be read.
    """
    if value is None:
        return {}
    pairs: list[tuple[str, Any]]
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",")] if value.strip() else []
        pairs = [(symbol.strip(), number.strip()) for symbol, _, number in parts]
    elif isinstance(value, Mapping):
        pairs = [(str(symbol), number) for symbol, number in value.items()]
    else:
        raise InputError(f'{model}: option charges = {value!r}: expected text such as "Na=1,Cl=-1"')
    if not pairs:
        raise InputError(
            f'{model}: option charges is empty; expected text such as "Na=1,Cl=-1", or leave it out for charges of the '
            "structure file or of another model"
        )
    found: dict[int, float] = {}
    for symbol, number in pairs:
        if symbol not in atomic_numbers:
            raise InputError(f"{model}: option charges: '{symbol}' is no element; write \"Na=1,Cl=-1\"")
        if atomic_numbers[symbol] in found:
            raise InputError(f"{model}: option charges gives {symbol} twice")
        found[atomic_numbers[symbol]] = _number(model, symbol, number)
    return found


def _number(model: str, symbol: str, value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < 1e6:  # also not a number
        raise InputError(
            f"{model}: option charges: the charge of {symbol} is {value!r}; expected a number of e"
        )
    return number


class Charges:
    """Charges of local rows: the option's, or else the field of the batch.

    The field is a column of the structure file, in whose place a composition puts what another member computed. The
    option and another member's charges together are refused: by the composition, which asks for `fields`, and here
    where the field turns out to be differentiable.

    Parameters
    ----------
    model : str
        Name for messages.
    by_number : mapping of int to float
        Charge (e) by atomic number; empty if the option is not given.
    """

    def __init__(self, model: str, by_number: Mapping[int, float]) -> None:
        self.model, self.by_number = model, dict(by_number)
        table = torch.full((len(chemical_symbols) + 1,), torch.nan, dtype=torch.float64)
        for number, charge in self.by_number.items():
            table[number] = charge
        self._table = table

    @property
    def fields(self) -> frozenset[str]:
        """Fields of the batch that the option stands for."""
        return frozenset(COLUMNS if self.by_number else ())

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Raise InputError for an element without a charge, where the option says what elements have."""
        if not self.by_number:
            return
        bad = self._of(numbers).isnan()
        if not bool(bad.any()):
            return
        first = int(ids[bad].min())
        number = int(numbers[ids == first][0])
        symbol = chemical_symbols[number] if 0 <= number < len(chemical_symbols) else f"number {number}"
        known = ",".join(chemical_symbols[n] for n in self.by_number)
        raise InputError(
            f"{self.model}: option charges says nothing of {symbol} (atom {first}); it gives {known}"
        )

    def __call__(self, batch: LocalBatch) -> torch.Tensor:
        """Return the charges (n_local,), float64, e.

        Raises
        ------
        InputError
            When there are none, or two sources of them, or a column has another shape.
        """
        name, given = self._given(batch)
        computed = given is not None and given.requires_grad  # what is read from a file is not
        if self.by_number:
            if computed:
                raise InputError(
                    f"{self.model}: another model computes the charges, and the option charges gives them, too: leave "
                    "the option out"
                )
            return self._of(batch.numbers)
        if name is None or given is None:
            raise InputError(f"{self.model}: the atoms have no charges: {_HOW}")
        self._check_shape(name, given, batch)
        return given.double()

    def _given(self, batch: LocalBatch) -> tuple[str | None, torch.Tensor | None]:
        name = next((name for name in COLUMNS if name in batch.fields), None)
        return name, None if name is None else batch.fields[name]

    def _of(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._table.device != numbers.device:
            self._table = self._table.to(numbers.device)
        inside = (numbers >= 0) & (numbers < len(chemical_symbols))
        return self._table[torch.where(inside, numbers, len(chemical_symbols))]

    def _check_shape(self, name: str, given: torch.Tensor, batch: LocalBatch) -> None:
        if given.shape != (batch.n_local,):
            raise InputError(
                f"{self.model}: the field '{name}' has shape {tuple(given.shape)}; expected one number for each of "
                f"{batch.n_local} local rows"
            )

    def check_column(self, batch: LocalBatch) -> None:
        """Raise InputError for a charge of the structure file that is not finite; reads back from a device."""
        name, given = self._given(batch)
        if self.by_number or given is None or given.requires_grad:
            return
        bad = ~torch.isfinite(given[: batch.n_owned].double())
        if bool(bad.any()):
            first = int(batch.ids[: batch.n_owned][bad].min())
            raise InputError(
                f"{self.model}: the charge of atom {first} (column '{name}') is not finite; mend the file"
            )
