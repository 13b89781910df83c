"""What a model's outputs are and how the ranks' values become one: `OutputSpec`.

Layer: spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from nvdd_core.spec.base import Decode, SpecData, decode_enum


class OutputKind(StrEnum):
    """What dim 0 of an output counts."""

    PER_NODE = "per_node"
    """Rows."""
    PER_GRAPH = "per_graph"
    """Segments."""
    GLOBAL = "global"
    """Neither: the value is passed through."""
    UNKNOWN = "unknown"
    """Not declared: the value is passed through."""


class Reduce(StrEnum):
    """How the ranks' values of an output are combined."""

    NONE = "none"
    """What is usual for the kind, see `OutputSpec.combined`."""
    ALL_REDUCE = "all_reduce"
    """Partial values: summed over ranks."""
    OWNED_ONLY = "owned_only"
    """Complete values: taken from the owner of each row, or from any rank."""


_USUAL = {OutputKind.PER_NODE: Reduce.OWNED_ONLY, OutputKind.PER_GRAPH: Reduce.ALL_REDUCE}


@dataclass(frozen=True)
class OutputSpec(SpecData):
    """Shape and combination rule of one output.

    Attributes
    ----------
    kind : OutputKind
    reduce : Reduce
    """

    READERS: ClassVar[Mapping[str, Decode]] = {"kind": decode_enum(OutputKind), "reduce": decode_enum(Reduce)}

    kind: OutputKind = OutputKind.UNKNOWN
    reduce: Reduce = Reduce.NONE

    def __post_init__(self) -> None:
        self._set_enum("kind", OutputKind)
        self._set_enum("reduce", Reduce)

    @property
    def combined(self) -> Reduce:
        """The rule that holds: rows come from their owners and segments are summed, unless said otherwise."""
        return _USUAL.get(self.kind, Reduce.NONE) if self.reduce is Reduce.NONE else self.reduce
