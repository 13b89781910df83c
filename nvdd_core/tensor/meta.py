"""What a ShardTensor knows about its rows: the halo's sizes and routes, and the mesh that serves it.

`ParticleHaloMetadata` wraps a `HaloPlan`; `ParticleHaloConfig` holds the mesh and the ghost width. `RowLayout` is
what the metadata of halo storage shares with that of sharded storage (`lookup.GatherMetadata`): each such object
has a token of its own, which only its copies share. Two tensors are aligned when their tokens agree, so a tensor
from before a rebuild can't be combined with one from after it unnoticed, on any rank.

A process group can't travel. Pickling keeps the sizes, the routes and this rank's place in its mesh; reading
binds them to a mesh of the same size on the same rank, named by `loading_onto`. For a mesh of one rank
nothing need be named.

Layer: tensor.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.errors import DistributedError, SpecError
from nvdd_core.tensor.modes import RowKind

_TARGET: ContextVar[Mesh | None] = ContextVar("nvdd_loading_onto", default=None)


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place in a mesh, in a form that can be pickled."""

    rank: int
    size: int
    device: str

    @classmethod
    def of(cls, mesh: Mesh) -> MeshPlace:
        """Describe this rank's place in `mesh`."""
        return cls(mesh.rank, mesh.size, str(mesh.device))

    def mesh(self) -> Mesh:
        """Return the mesh to bind to here.

        Raises
        ------
        DistributedError
            When no mesh is named and one is needed, or the named one has another size or rank.
        """
        target = _TARGET.get()
        if target is None and self.size == 1:
            return _single(self.device)
        if target is None:
            raise DistributedError(
                f"this ShardTensor belongs to rank {self.rank} of {self.size} and its process group can't be "
                "pickled; read it on that rank of a mesh of the same size inside "
                "`with nvdd_core.tensor.loading_onto(mesh):`, or pickle `x.to_local()` with the global ids of "
                "its rows"
            )
        if (target.rank, target.size) != (self.rank, self.size):
            raise DistributedError(
                f"this ShardTensor belongs to rank {self.rank} of {self.size}, but it is read on rank "
                f"{target.rank} of {target.size}; its rows have no meaning there. Gather the rows to one "
                "rank before saving and scatter them after reading"
            )
        return target


@functools.lru_cache(maxsize=8)
def _single(device: str) -> Mesh:
    """Return one mesh of one rank per device, so that tensors read one by one agree on it."""
    return Mesh.single(device)


@contextmanager
def loading_onto(mesh: Mesh) -> Iterator[None]:
    """Bind the ShardTensors that are unpickled in this scope to `mesh`."""
    token = _TARGET.set(mesh)
    try:
        yield
    finally:
        _TARGET.reset(token)


def new_token() -> str:
    """Return a token that no other distribution of rows has."""
    return uuid.uuid4().hex


class RowLayout(Protocol):
    """How rows are distributed, whichever the storage: one rank's sizes, the mesh, and the token."""

    ROW_KIND: ClassVar[RowKind]
    """What dim 0 of a tensor with all rows of this rank counts."""

    @property
    def token(self) -> str:
        """Tells this distribution from every other."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the rows."""
        ...

    @property
    def n_owned(self) -> int:
        """Rows this rank owns."""
        ...

    @property
    def n_padded(self) -> int:
        """Rows this rank holds."""
        ...

    def aligned_with(self, other: RowLayout) -> bool:
        """Whether both describe the same distribution of rows; the answer is the same on every rank."""
        ...


class Distribution:
    """What the metadata of every storage can do: be compared by token, and stay itself when copied."""

    token: str

    def aligned_with(self, other: RowLayout) -> bool:
        """Whether both describe the same distribution of rows; the answer is the same on every rank."""
        return self.token == other.token

    def __copy__(self) -> Self:
        return self  # immutable, and bound to a mesh that can't be copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


@dataclass(frozen=True, eq=False)
class ParticleHaloMetadata(Distribution):
    """One rank's slice of the rows: sizes, and where ghosts come from and go to.

    Attributes
    ----------
    plan : HaloPlan
        The exchange that serves these rows.
    token : str
        Tells this distribution of rows from every other; made anew unless it is a copy.
    """

    ROW_KIND: ClassVar[RowKind] = RowKind.LOCAL

    plan: HaloPlan
    token: str = field(default_factory=new_token)

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the rows."""
        return self.plan.mesh

    @property
    def n_owned(self) -> int:
        """Rows this rank owns."""
        return self.plan.n_owned

    @property
    def n_padded(self) -> int:
        """Rows this rank holds: owned and ghost."""
        return self.plan.n_local

    @property
    def halo_routing(self) -> torch.Tensor:
        """Owned rows that other ranks hold copies of, grouped by rank, shape (n_send,), int64."""
        return self.plan.send_index

    def __reduce__(self) -> tuple[Callable[..., ParticleHaloMetadata], tuple[object, ...]]:
        plan = self.plan
        return _read_metadata, (
            MeshPlace.of(plan.mesh),
            plan.n_owned,
            plan.send_index,
            plan.send_splits,
            plan.recv_splits,
            self.token,
        )


def _read_metadata(
    place: MeshPlace,
    n_owned: int,
    send_index: torch.Tensor,
    send_splits: tuple[int, ...],
    recv_splits: tuple[int, ...],
    token: str,
) -> ParticleHaloMetadata:
    mesh = place.mesh()
    plan = HaloPlan(mesh, n_owned, send_index.to(mesh.device), tuple(send_splits), tuple(recv_splits))
    return ParticleHaloMetadata(plan, token)


@dataclass(frozen=True, eq=False)
class ParticleHaloConfig:
    """Which mesh exchanges the halo, and how wide the halo is.

    Attributes
    ----------
    mesh : Mesh
    ghost_width : float
        Width, in the unit of positions, within which remote rows are copied.

    Raises
    ------
    SpecError
        When the width is negative or not finite.
    """

    mesh: Mesh
    ghost_width: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.ghost_width < float("inf"):
            raise SpecError(f"a ghost width must be finite and not negative, found {self.ghost_width!r}")

    def __reduce__(self) -> tuple[Callable[..., ParticleHaloConfig], tuple[object, ...]]:
        return _read_config, (MeshPlace.of(self.mesh), self.ghost_width)

    def __deepcopy__(self, memo: dict[int, object]) -> ParticleHaloConfig:
        return self


def _read_config(place: MeshPlace, ghost_width: float) -> ParticleHaloConfig:
    return ParticleHaloConfig(place.mesh(), ghost_width)
