"""How a system is spread over ranks. Layer: runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from nvdd_core.errors import InputError
from nvdd_core.spec import StrategyKind

# A tenth of a millimetre. Any reach is right for an open system; one of 1e300 only breaks arithmetic.
_LONGEST = 1e6


@dataclass(frozen=True)
class DomainConfig:
    """Geometry and rule of the decomposition.

    Attributes
    ----------
    cutoff : float or None
        Angstrom; None takes the model's. A smaller one than the model's is refused.
    skin : float
        Angstrom; neighbour lists reach so much further and are kept until an atom has moved half of it.
    ghost_width : float or None
        Angstrom; None takes what strategy and model need. A smaller one is refused.
    grid_dims : tuple of int or None
        Regular grid of domains; None bisects recursively.
    strategy : StrategyKind
    """

    cutoff: float | None = None
    skin: float = 0.0
    ghost_width: float | None = None
    grid_dims: tuple[int, int, int] | None = None
    strategy: StrategyKind = StrategyKind.HALO

    def __post_init__(self) -> None:
        for name in ("cutoff", "skin", "ghost_width"):
            value = getattr(self, name)
            if value is not None and not _is_length(value):
                raise InputError(f"{name} is {value!r}: expected a finite length in Angstrom, not below zero")
        if not _is_strategy(self.strategy):
            known = ", ".join(f"StrategyKind.{kind.name}" for kind in StrategyKind)
            raise InputError(f"strategy is {self.strategy!r}: expected one of {known}")
        if self.grid_dims is not None and not _is_grid(self.grid_dims):
            raise InputError(f"grid_dims is {self.grid_dims!r}: expected three whole numbers above zero")

    def list_cutoff(self, model_cutoff: float) -> float:
        """Return the reach of neighbour lists, Angstrom.

        Raises
        ------
        InputError
            If the configured cutoff is smaller than the model's, or the reach is no length of a system of atoms.
        """
        cutoff = model_cutoff if self.cutoff is None else self.cutoff
        if cutoff < model_cutoff:
            raise InputError(
                f"cutoff {cutoff} A is smaller than the model's {model_cutoff} A; leave it out or give at least that"
            )
        reach = cutoff + self.skin
        if not reach <= _LONGEST:
            raise InputError(
                f"cutoff {cutoff} A with a skin of {self.skin} A: neighbour lists reach up to "
                f"{_LONGEST:g} A; give a smaller cutoff or skin"
            )
        return reach

    def width(self, model_cutoff: float, layers: int) -> float:
        """Return the ghost width, Angstrom.

        Raises
        ------
        InputError
            If the configured width is smaller than strategy and model need.
        """
        hops = layers if self.strategy is StrategyKind.WIDE_HALO else 1
        needed = hops * self.list_cutoff(model_cutoff)
        if self.ghost_width is None:
            return needed
        if self.ghost_width < needed:
            raise InputError(
                f"ghost_width {self.ghost_width} A is too small: strategy {self.strategy.value} needs {needed} A "
                f"({hops} x (cutoff + skin)); leave it out or give at least that"
            )
        return self.ghost_width


def _is_length(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value) and float(value) >= 0


def _is_grid(dims: object) -> bool:
    return (
        isinstance(dims, (tuple, list))
        and len(dims) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in dims)
    )


def _is_strategy(kind: object) -> bool:
    return isinstance(kind, StrategyKind)  # its text compares equal but is another object
