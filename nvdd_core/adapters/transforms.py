"""What happens to the rows of one input before, or of one output after, an adapted op runs on plain tensors.

Each transform is data with one method. Rows are ``[owned | ghost]`` under halo storage; under sharded storage they
are owned rows, looked up in a buffer of all rows with a last row of zeros (the padding).

Invariant: whether a transform communicates depends on the declaration and the scope alone, which are the same on
every rank, never on the values or on what one rank holds.
Layer: adapters.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nvdd_core.comm import all_reduce_sum_replicated, all_reduce_sum_symmetric
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.tensor import GatherMetadata, ParticleHaloMetadata, RowScope
from nvdd_core.tensor.exchanges import exchanged


@dataclass(frozen=True)
class Transform(ABC):
    """Base of the transforms."""

    word: ClassVar[str]
    """What JSON calls it."""

    @abstractmethod
    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`; `where` names the op and the position in messages."""

    def to_dict(self) -> dict[str, Any]:
        """Return the transform as JSON-ready data."""
        return {"type": self.word, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class ArgTransform(Transform):
    """A transform of an input."""


@dataclass(frozen=True)
class OutputTransform(Transform):
    """A transform of an output."""


@dataclass(frozen=True)
class GatherInputs(ArgTransform):
    """Owned or local rows -> local rows, with ghosts that hold their owners' values: one exchange."""

    word: ClassVar[str] = "gather_inputs"

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        meta = _halo(scope, where)
        _check_rows(x, meta, where, (meta.n_padded, meta.n_owned))
        if scope.rules.exchanges:
            return exchanged(meta.plan.forward, x[: meta.n_owned])
        if x.shape[0] != meta.n_padded:
            raise AdapterError(
                f"{_rank(scope)}{where}: {x.shape[0]} owned rows given where nothing is exchanged (a wide halo); "
                f"compute all {meta.n_padded} local rows there"
            )
        return x


@dataclass(frozen=True)
class SliceOwned(ArgTransform):
    """Owned or local rows -> owned rows."""

    word: ClassVar[str] = "slice_owned"

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        meta = _halo(scope, where)
        _check_rows(x, meta, where, (meta.n_padded, meta.n_owned))
        return x[: meta.n_owned]


@dataclass(frozen=True)
class GatherInputsFull(ArgTransform):
    """Owned rows (with the row of zeros or without) -> the rows of all ranks by global id, and a row of zeros."""

    word: ClassVar[str] = "gather_inputs_full"

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        meta = _sharded(scope, where)
        n_owned = meta.n_owned
        _check_count(x, scope, where, {"owned": n_owned, "owned and padding": n_owned + 1})
        return meta.full_gather(x[:n_owned])


@dataclass(frozen=True)
class ScatterOutputs(OutputTransform):
    """Local rows -> local rows: what the op wrote into ghosts is summed into owners, then ghosts are refreshed."""

    word: ClassVar[str] = "scatter_outputs"

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        meta = _halo(scope, where)
        _check_rows(x, meta, where, (meta.n_padded,))
        return exchanged(meta.plan.correct, x) if scope.rules.exchanges else x


@dataclass(frozen=True)
class AllReduceSum(OutputTransform):
    """Each rank's share -> the sum over ranks.

    Attributes
    ----------
    replicated : bool
        What follows is the same computation on every rank, counted once: the adjoint passes the gradient through.
        Otherwise each rank goes on with its own share, and the adjoint is the sum over ranks too.
    """

    word: ClassVar[str] = "all_reduce_sum"
    replicated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.replicated, bool):
            raise SpecError(f"AllReduceSum.replicated: expected a bool, found {self.replicated!r}")

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        if scope.mesh is None:
            raise AdapterError(f"{where}: the rows name no mesh to sum over; wrap them with meta or config")
        reduce, mesh = all_reduce_sum_replicated if self.replicated else all_reduce_sum_symmetric, scope.mesh
        return exchanged(lambda share: reduce(share, mesh), x)


@dataclass(frozen=True)
class SliceOutputsOwned(OutputTransform):
    """The rows of all ranks by global id, and a row of zeros -> owned rows and the row of zeros."""

    word: ClassVar[str] = "slice_outputs_owned"

    def apply(self, x: torch.Tensor, scope: RowScope, where: str) -> torch.Tensor:
        """Return what takes the place of `x`."""
        meta = _sharded(scope, where)
        _check_count(x, scope, where, {"global and padding": meta.n_global + 1})
        return meta.slice_owned(x)


ARG_TRANSFORMS: Mapping[str, type[ArgTransform]] = {
    t.word: t for t in (GatherInputs, GatherInputsFull, SliceOwned)
}
OUTPUT_TRANSFORMS: Mapping[str, type[OutputTransform]] = {
    t.word: t for t in (ScatterOutputs, AllReduceSum, SliceOutputsOwned)
}


def read_transform(value: Any, known: Mapping[str, type[Transform]], where: str) -> Transform:
    """Return the transform that `Transform.to_dict` described.

    Raises
    ------
    SpecError
        When its type or a key is unknown.
    """
    body = dict(value) if isinstance(value, Mapping) else {}
    word = body.pop("type", None)
    cls = known.get(word) if isinstance(word, str) else None
    if cls is None:
        raise SpecError(
            f"{where}: expected an object whose type is one of {', '.join(known)}, found {value!r}"
        )
    unknown = sorted(body.keys() - {f.name for f in dataclasses.fields(cls)})
    if unknown:
        raise SpecError(f"{where}: unknown key {unknown[0]!r} of {cls.word}")
    return cls(**body)


def _rank(scope: RowScope) -> str:
    return "" if scope.mesh is None else f"rank {scope.mesh.rank}: "


def _halo(scope: RowScope, where: str) -> ParticleHaloMetadata:
    if scope.meta is None:
        hint = (
            "; under sharded storage use GatherInputsFull and SliceOutputsOwned" if scope.gather_meta else ""
        )
        raise AdapterError(f"{_rank(scope)}{where}: the rows have no halo metadata{hint}")
    return scope.meta


def _sharded(scope: RowScope, where: str) -> GatherMetadata:
    if scope.gather_meta is None:
        raise AdapterError(
            f"{_rank(scope)}{where}: the rows have no gather metadata; under halo storage use GatherInputs, "
            "SliceOwned and ScatterOutputs"
        )
    return scope.gather_meta


def _check_rows(x: torch.Tensor, meta: ParticleHaloMetadata, where: str, allowed: tuple[int, ...]) -> None:
    names = {meta.n_owned: "owned", meta.n_padded: "local"}
    _check_count(x, RowScope(meta), where, {names[n]: n for n in allowed})


def _check_count(x: torch.Tensor, scope: RowScope, where: str, allowed: Mapping[str, int]) -> None:
    if x.dim() == 0 or x.shape[0] not in allowed.values():
        expected = " or ".join(f"{n} {name}" for name, n in allowed.items())
        raise AdapterError(
            f"{_rank(scope)}{where}: expected {expected} rows, found a tensor of shape {tuple(x.shape)}; is this the "
            "right position?"
        )
