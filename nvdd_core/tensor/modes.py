"""What a tensor's rows are, and what a spec asks of the dispatch: words and data, no behaviour.

`RowKind` names what dim 0 of a tensor counts, `ScatterMode` what follows a scatter along it, `StorageKind`
how rows are spread. `DispatchRules` is the part of a spec that handlers read; `DispatchSpec` is anything that
offers it, since specs themselves live in a higher layer.

Invariant: the value of every member is the word written in JSON.
Layer: tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable


class RowKind(StrEnum):
    """What the entries along dim 0 of a tensor are."""

    LOCAL = "local"
    """This rank's rows, ``[owned | ghost]``."""
    OWNED = "owned"
    """This rank's owned rows alone."""
    SEGMENTS = "segments"
    """One entry per segment, each held by every rank."""


class ScatterMode(StrEnum):
    """What follows a scatter into local rows."""

    LOCAL = "local"
    """Nothing. Right when every receiver is an owned row and ghosts are not read afterwards."""
    REFRESH = "refresh"
    """Ghosts take their owners' values: one exchange. Right when every receiver is an owned row."""
    HALO_CORRECTION = "halo_correction"
    """What was written into ghosts is summed into their owners, then ghosts take their owners' values."""


class StorageKind(StrEnum):
    """How the rows of a tensor are spread over ranks."""

    HALO = "halo"
    SHARDED = "sharded"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The part of a spec that decides what handlers do.

    Attributes
    ----------
    storage : StorageKind
    scatter : ScatterMode
        What follows a scatter into local rows; read under halo storage.
    system_reductions : bool
        Whether a scatter of rows into segments is summed over ranks.
    exchanges : bool
        Whether ghosts are filled by exchanges; False where ghost rows are computed in full instead.
    """

    storage: StorageKind = StorageKind.HALO
    scatter: ScatterMode = ScatterMode.LOCAL
    system_reductions: bool = False
    exchanges: bool = True


@runtime_checkable
class DispatchSpec(Protocol):
    """Anything that says how operations on its tensors are to be dispatched."""

    @property
    def dispatch_rules(self) -> DispatchRules:
        """The rules for the handlers."""
        ...


DEFAULT_RULES = DispatchRules()
