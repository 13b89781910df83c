"""Which results a kernel is compiled for.

Key objects: `Want` (what a caller asks for), `Variant` (everything that changes the code of a kernel).
Invariant: both are hashable and small, so compiled kernels and recorded launches are looked up by them.
Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import warp as wp


class Virial(IntEnum):
    """How much of the virial is asked for."""

    NONE = 0
    TOTAL = 1
    ROWS = 2


@dataclass(frozen=True)
class Want:
    """Results of one evaluation; what is not asked for is not computed."""

    energy: bool
    forces: bool
    virial: Virial = Virial.NONE

    def to_int(self) -> int:
        """Return the same as one integer, which a torch operator can take."""
        return int(self.energy) | int(self.forces) << 1 | int(self.virial) << 2

    @classmethod
    def from_int(cls, code: int) -> Want:
        """Undo `to_int`."""
        return cls(bool(code & 1), bool(code & 2), Virial(code >> 2))


@dataclass(frozen=True)
class Variant:
    """A kernel's compile-time choices.

    Attributes
    ----------
    dtype : torch.dtype
        float32 or float64.
    half : bool
        Whether each pair of owned rows is listed once.
    many_species : bool
        Whether coefficients depend on the rows' species; otherwise the first entry of the table serves all.
    linear_term : bool
        Whether the pair energy has a term in r (a shifted force), which costs a square root.
    want : Want
        The results.
    """

    dtype: torch.dtype
    half: bool
    many_species: bool
    linear_term: bool
    want: Want


def scalar_type(dtype: torch.dtype) -> Any:
    """Warp's scalar of a torch dtype."""
    return wp.float64 if dtype == torch.float64 else wp.float32


def vec3_type(dtype: torch.dtype) -> Any:
    """Warp's vector of three."""
    return wp.vec3d if dtype == torch.float64 else wp.vec3f


def vec4_type(dtype: torch.dtype) -> Any:
    """Warp's vector of four."""
    return wp.vec4d if dtype == torch.float64 else wp.vec4f


def mat33_type(dtype: torch.dtype) -> Any:
    """Warp's 3 x 3 matrix."""
    return wp.mat33d if dtype == torch.float64 else wp.mat33f


def typed(function: Any, types: dict[str, Any]) -> Any:
    """Give a function the argument types that Warp reads; they depend on the dtype, so annotations can't."""
    function.__annotations__ = dict(types)
    return function
