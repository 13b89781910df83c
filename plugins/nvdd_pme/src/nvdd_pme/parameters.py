"""Splitting, wave vectors and mesh for an asked error, from the cell and the cutoff alone.

Key objects: `Options` (what the user asks for), `Splitting` (what is chosen), `choose_waves`, `choose_mesh`, both
for a cell of short lattice vectors (see `nvdd_pme.bases`). The error is that of forces, root of the mean square, in
units of ``q^2 / d^2`` with the mean square of charges and the spacing d of a simple cubic lattice as dense: how large
the Coulomb force between neighbours is. Nothing of a rank's own rows is looked at, so all ranks, and any number of
ranks, choose alike. Layer: plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvdd_core.errors import InputError
from nvdd_pme.influence import inverted
from nvdd_pme.pair_kernels import LARGEST_SPLITTING

ORDERS = (4, 5, 6, 7, 8)
"""Orders of splines that can be asked for; lower ones have no second derivative."""

DENSITY = 0.02
"""Charges per cubic Angstrom that errors are estimated for; where there are more, relative errors are smaller."""

# Parts of the asked error; their squares sum to less than one.
_NEAR_PART, _FAR_PART, _MESH_PART = 0.35, 0.35, 0.8

# A mesh's error is COEFFICIENT * (alpha^2 / density^(2/3)) * (alpha * spacing)^order * skewness^2
# * sqrt(1 + PAIRS * density / alpha^3), with the largest length over height of the cell as its skewness: a charge's
# force on itself, and those of the charges within 1/alpha, in random directions. Measured on disordered ions in 10
# lattices for alpha * spacing from 0.17 to 0.4 and alpha from 0.25 to 0.5.
COEFFICIENT = {4: 0.12, 5: 0.03, 6: 0.026, 7: 0.016, 8: 0.0145}
PAIRS = 1.7

COARSEST = 0.4
"""Largest alpha * spacing; beyond it errors grow faster than that."""

LARGEST_MESH = 2**31 - 1
LARGEST_WAVES = 4_000_000


@dataclass(frozen=True)
class Options:
    """What a user asks for; None is chosen by `accuracy`.

    Attributes
    ----------
    cutoff : float
        Of real space, Angstrom.
    accuracy : float
        Relative force error.
    alpha : float, optional
        1/Angstrom.
    k_cutoff : float, optional
        Largest wave vector of the Ewald sum, 1/Angstrom.
    order : int, optional
        Of splines.
    spacing : float, optional
        Largest distance of mesh points, Angstrom.
    """

    cutoff: float = 9.0
    accuracy: float = 1e-5
    alpha: float | None = None
    k_cutoff: float | None = None
    order: int | None = None
    spacing: float | None = None

    @classmethod
    def read(cls, model: str, **given: object) -> Options:
        """Check options as they come from a command line.

        Raises
        ------
        InputError
            Naming the option, its value and what is expected.
        """
        found: dict[str, float | int | None] = {}
        for name, value in given.items():
            low, high = _RANGES[name]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(
                    f"{model}: option {name} = {value!r}: expected a number from {low:g} to {high:g}{_UNITS[name]}"
                )
            if name == "order" and value not in ORDERS:
                raise InputError(
                    f"{model}: option order = {value!r}: expected one of {', '.join(map(str, ORDERS))}"
                )
            found[name] = int(value) if name == "order" else float(value)
        made = cls(**found)  # type: ignore[arg-type]
        if made.splitting * made.cutoff > LARGEST_SPLITTING:
            raise InputError(
                f"{model}: option alpha = {made.splitting:g} with cutoff = {made.cutoff:g}: their product may be "
                f"{LARGEST_SPLITTING:g} at most"
            )
        return made

    @property
    def promise(self) -> str:
        """What is known of the force error, for people."""
        given = [name for name in _INSTEAD if getattr(self, name) is not None]
        if given:
            return f"{' and '.join(given)} given, so the force error isn't known"
        return f"force error {self.accuracy:g}"

    @property
    def splitting(self) -> float:
        """The splitting parameter, 1/Angstrom.

        Pairs beyond the cutoff, taken as random, pull with 2 sqrt(density / cutoff) exp(-(alpha cutoff)^2) on a charge
        (Kolafa and Perram, Molecular Simulation 9, 351, 1992).
        """
        if self.alpha is not None:
            return self.alpha
        size = 2.0 / (math.sqrt(self.cutoff) * DENSITY ** (1 / 6))
        return _digits(_NEAR_PART * self.accuracy / size) / self.cutoff

    @property
    def largest_wave(self) -> float:
        """The largest wave vector of an Ewald sum, 1/Angstrom.

        Those left out, taken as random, pull with 2 alpha sqrt(density / k) exp(-(k / 2 alpha)^2).
        """
        if self.k_cutoff is not None:
            return self.k_cutoff
        alpha = self.splitting
        size = 2.0 * alpha / (math.sqrt(2.0 * alpha) * DENSITY ** (1 / 6))
        return 2.0 * alpha * _digits(_FAR_PART * self.accuracy / size)


def _digits(part: float) -> float:
    """Return x with exp(-x^2) = part, 1 at least."""
    return math.sqrt(max(math.log(1.0 / part), 1.0))


_INSTEAD = ("alpha", "k_cutoff", "order", "spacing")
"""Options instead of what would follow from the accuracy."""

_RANGES = {
    "cutoff": (0.5, 100.0),
    "accuracy": (1e-14, 0.1),
    "alpha": (1e-3, 16.0),
    "k_cutoff": (1e-3, 1e3),
    "order": (min(ORDERS), max(ORDERS)),
    "spacing": (1e-3, 100.0),
}
_UNITS = {
    "cutoff": " Angstrom",
    "accuracy": "",
    "alpha": " 1/Angstrom",
    "k_cutoff": " 1/Angstrom",
    "order": "",
    "spacing": " Angstrom",
}


@dataclass(frozen=True)
class Splitting:
    """What was chosen for one cell.

    Attributes
    ----------
    alpha : float
        1/Angstrom.
    size : tuple of int
        Mesh points along each axis, or the largest frequency.
    order : int
        Of splines; 0 for the Ewald sum.
    k_cutoff : float
        1/Angstrom; 0 for a mesh.
    """

    alpha: float
    size: tuple[int, int, int]
    order: int = 0
    k_cutoff: float = 0.0

    def __str__(self) -> str:
        if self.order:
            mesh = " x ".join(map(str, self.size))
            return f"alpha {self.alpha:.4g}/A, mesh {mesh}, order {self.order}"
        return f"alpha {self.alpha:.4g}/A, wave vectors to {self.k_cutoff:.4g}/A"


Chooser = Callable[[torch.Tensor, Options], Splitting]


def choose_waves(cell: torch.Tensor, options: Options) -> Splitting:
    """Choose wave vectors for a cell (3, 3), float64, on the CPU."""
    alpha = options.splitting
    k_cutoff = options.largest_wave
    reach = [math.floor(k_cutoff * side / (2.0 * math.pi) + 1e-9) for side in _sides(cell)]
    waves = math.prod(2 * n + 1 for n in reach)
    if waves > 8 * LARGEST_WAVES:
        raise InputError(
            f"ewald: a cell of {' x '.join(f'{s:.4g}' for s in _sides(cell))} A needs {waves / 4:.1e} wave vectors: "
            "use the model pme, or a larger cutoff"
        )
    return Splitting(alpha, (reach[0], reach[1], reach[2]), k_cutoff=k_cutoff)


def choose_mesh(cell: torch.Tensor, options: Options) -> Splitting:
    """Choose mesh and order for a cell (3, 3), float64, on the CPU."""
    alpha = options.splitting
    order = _order(options.accuracy) if options.order is None else options.order
    sides = _sides(cell)
    spacing = options.spacing
    if spacing is None:
        spacing = _spacing(alpha, order, options.accuracy, _skewness(cell))
    if max(sides) / spacing > 1e5:
        raise InputError(f"pme: a mesh {spacing:.3g} A wide is too fine for a cell {max(sides):.4g} A long")
    size = [smooth(max(math.ceil(side / spacing), order)) for side in sides]
    if math.prod(size) > LARGEST_MESH:
        raise InputError(f"pme: a mesh of {' x '.join(map(str, size))} is too large; give a larger cutoff")
    return Splitting(alpha, (size[0], size[1], size[2]), order=order)


def _sides(cell: torch.Tensor) -> list[float]:
    """Lengths of the lattice vectors: a wave vector k has a frequency of at most k * length / 2 pi along each."""
    return [float(side) for side in torch.linalg.vector_norm(cell, dim=1)]


def _skewness(cell: torch.Tensor) -> float:
    """Largest ratio of a lattice vector's length to the height of the cell along it; 1 where they are orthogonal."""
    inverse_heights = torch.linalg.vector_norm(inverted(cell), dim=0)
    return float((torch.linalg.vector_norm(cell, dim=1) * inverse_heights).max())


def _order(accuracy: float) -> int:
    for order, finest in ((4, 1e-2), (6, 1e-3)):
        if accuracy >= finest:
            return order
    return 8


def _spacing(alpha: float, order: int, accuracy: float, skewness: float) -> float:
    pairs = math.sqrt(1.0 + PAIRS * DENSITY / alpha**3)
    size = COEFFICIENT[order] * alpha**2 / DENSITY ** (2 / 3) * skewness**2 * pairs
    step: float = (_MESH_PART * accuracy / size) ** (1.0 / order)
    return min(step, COARSEST) / alpha


def smooth(n: int) -> int:
    """Return the next number from n on whose prime factors are 2, 3 and 5, which transforms do fast."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1
