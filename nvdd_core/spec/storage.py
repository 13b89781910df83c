"""Storage policies: how the rows of a model's tensors lie on the ranks, as data.

`HaloStorage` keeps ``[owned | ghost]`` rows on each rank, `ShardedStorage` owned rows that others look up by
global id, `ReplicatedStorage` every row on every rank.

Layer: spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from nvdd_core.spec.base import Decode, SpecData, decode_enum
from nvdd_core.tensor import ScatterMode, StorageKind


class GatherMode(StrEnum):
    """What precedes a read of ghost rows by a layer after the first."""

    LOCAL = "local"
    """Nothing: ghosts hold what they hold."""
    REFRESH = "refresh"
    """Ghosts take their owners' values: one exchange."""


@dataclass(frozen=True)
class HaloStorage(SpecData):
    """Each rank holds its owned rows and copies of the remote rows that its edges read.

    Attributes
    ----------
    scatter : ScatterMode
        What follows a scatter into rows.
    gather : GatherMode
        What precedes a read of ghost rows.
    """

    VARIANT: ClassVar[str] = StorageKind.HALO.value

    READERS: ClassVar[Mapping[str, Decode]] = {
        "scatter": decode_enum(ScatterMode),
        "gather": decode_enum(GatherMode),
    }

    scatter: ScatterMode = ScatterMode.LOCAL
    gather: GatherMode = GatherMode.REFRESH

    def __post_init__(self) -> None:
        self._set_enum("scatter", ScatterMode)
        self._set_enum("gather", GatherMode)


@dataclass(frozen=True)
class ShardedStorage(SpecData):
    """Each rank holds its owned rows; rows of others are looked up by global id when they are needed."""

    VARIANT: ClassVar[str] = StorageKind.SHARDED.value


@dataclass(frozen=True)
class ReplicatedStorage(SpecData):
    """Each rank holds every row, so memory does not shrink with the number of ranks."""

    VARIANT: ClassVar[str] = StorageKind.REPLICATED.value


StoragePolicy = HaloStorage | ShardedStorage | ReplicatedStorage
