"""Sharded storage: each rank holds its owned rows, and rows of others are looked up by global id.

`GatherMetadata` is the directory: where the row of every global id lies. A lookup is a `HaloPlan` made on
demand: `plan_for` finds the remote rows that an index names, tells their owners, and translates the index to
``[owned | fetched]`` rows. Reading is the plan's exchange, adding its reverse, so derivatives of any order are
right as they are for a halo.

The id ``n_global`` is padding: it reads zeros and what is added to it is dropped. Any other id out of range is an
error on every rank.

Invariants: every rank takes part in every lookup, also with an empty index; each lookup begins with a vote, so a
rank that must plan anew, or can't, is never alone.
Layer: tensor.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from nvdd_core.comm import HaloPlan, Mesh, agreed
from nvdd_core.errors import SpecError
from nvdd_core.tensor.exchanges import exchanged
from nvdd_core.tensor.meta import Distribution, MeshPlace, new_token
from nvdd_core.tensor.modes import RowKind

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})
_KEPT_PLANS = 8


@dataclass(frozen=True, eq=False)
class RowLookup:
    """What serves one index.

    Attributes
    ----------
    plan : HaloPlan
        Its ghosts are the remote rows that the index names, each once.
    index : Tensor, int64
        The index in local rows ``[owned | fetched | padding]``; same shape.
    padded : bool
        Whether some entry of this rank is padding.
    """

    plan: HaloPlan
    index: torch.Tensor
    padded: bool

    def fetch(self, owned: torch.Tensor) -> torch.Tensor:
        """Return the rows that `index` refers to, (n_local [+ 1], *F) (collective, differentiable)."""
        local = exchanged(self.plan.forward, _plain(owned))
        if not self.padded:
            return local
        return torch.cat([local, local.new_zeros((1, *local.shape[1:]))])

    def send_home(self, written: torch.Tensor) -> torch.Tensor:
        """Return owned rows with what was written for them on all ranks (collective, differentiable).

        Parameters
        ----------
        written : Tensor, shape (n_local + 1, *F)
            The last row is padding's and is dropped.

        Returns
        -------
        Tensor, shape (n_owned, *F)
        """
        return exchanged(self.plan.reverse, written[: self.plan.n_local])


class _Kept(NamedTuple):
    """A lookup, its number, which is the same on every rank, and the very tensor and content that it was made for."""

    number: int
    tensor: weakref.ref[torch.Tensor]
    content: torch.Tensor
    lookup: RowLookup

    def serves(self, index: torch.Tensor) -> bool:
        """Whether `index` is that tensor and says the same still; no version counts writes from outside torch."""
        if self.tensor() is not index or (index.dtype, index.device) != (
            self.content.dtype,
            self.content.device,
        ):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return torch.equal(index, self.content)


class _Request(NamedTuple):
    """What this rank needs for one index, before its owners know."""

    slots: torch.Tensor  # rows of their owners, grouped by owner
    wanted: list[int]  # rows from each rank
    translated: torch.Tensor
    padded: bool


@dataclass(frozen=True, eq=False)
class GatherMetadata(Distribution):
    """One rank's part of sharded rows, and where every other row lies; made by `build`.

    Attributes
    ----------
    mesh : Mesh
    ids : Tensor, shape (n_owned,), int64
        Global ids of this rank's rows.
    n_global : int
        Rows of all ranks; as an id it is padding.
    place : Tensor, shape (n_global + 1,), int64
        Where the row of each id stands when the ranks' rows are joined in rank order. The last entry is
        padding's. This table is the one thing on a rank that grows with the whole system.
    counts : tuple of int
        Rows of each rank.
    token : str
        Tells this distribution of rows from every other; made anew unless it is a copy.
    """

    ROW_KIND: ClassVar[RowKind] = RowKind.OWNED

    mesh: Mesh
    ids: torch.Tensor
    n_global: int
    place: torch.Tensor = field(repr=False)
    counts: tuple[int, ...]
    token: str = field(default_factory=new_token)
    _kept: list[_Kept] = field(default_factory=list, init=False, repr=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)

    @classmethod
    def build(cls, mesh: Mesh, ids: torch.Tensor, n_global: int | None = None) -> GatherMetadata:
        """Make the directory from each rank's ids (collective).

        Parameters
        ----------
        mesh : Mesh
        ids : Tensor, shape (n_owned,), integer
            Global ids of this rank's rows, in their order; together the ranks name each of
            ``0 .. n_global - 1`` once.
        n_global : int, optional
            Number of rows of all ranks, where it is known and should be checked.

        Raises
        ------
        SpecError
            On every rank, when an id is missing, out of range or there twice; the message names it.
        """
        problem = None
        if ids.dim() != 1 or ids.dtype not in _INTEGERS:
            problem = SpecError(
                f"rank {mesh.rank}: global ids must be integers of shape (n_owned,), found {ids.dtype} of shape "
                f"{tuple(ids.shape)}"
            )
        rows = ids.shape[0] if ids.dim() else 0
        said = _vote(mesh, problem, [rows, -1 if n_global is None else n_global])
        counts = [row[0] for row in said]
        own = ids.detach().to(mesh.device, torch.int64, copy=True)
        every = mesh.all_to_all_rows(own.repeat(mesh.size), [rows] * mesh.size, counts, kind="directory")
        total = _check_ids(every, counts, [row[1] for row in said])
        place = torch.arange(total + 1, device=mesh.device)
        place[every] = torch.arange(total, device=mesh.device)
        return cls(mesh, own, total, place, tuple(counts))

    @property
    def n_owned(self) -> int:
        """Rows this rank owns."""
        return self.counts[self.mesh.rank]

    @property
    def n_padded(self) -> int:
        """Rows this rank holds, which are the owned ones."""
        return self.n_owned

    @property
    def first(self) -> int:
        """Rows of the ranks before this one."""
        return sum(self.counts[: self.mesh.rank])

    @property
    def rank_assignment(self) -> torch.Tensor:
        """The rank that owns each global id, shape (n_global,), int64."""
        ends = torch.tensor(self.counts, device=self.place.device).cumsum(0)
        return torch.bucketize(self.place[: self.n_global], ends, right=True)

    def plan_for(self, index: torch.Tensor, problem: SpecError | None = None) -> RowLookup:
        """Return what serves `index`, a tensor of global ids of any shape (collective).

        Plans of the last few index tensors are kept. One is used again for the very same tensor as long as its
        entries are the same, and when every rank has its part of that plan.

        Parameters
        ----------
        index : Tensor, integer
        problem : SpecError, optional
            What this rank found wrong with the call already; raised on every rank.

        Raises
        ------
        SpecError
            On every rank, when an id is neither of a row nor ``n_global``; the message names id and rank.
        """
        kept = self._recall(index)
        request = None
        if kept is None and problem is None:
            try:
                request = self._request(index)
            except SpecError as exc:
                problem = exc
        counts = _wanted(kept, request, self.mesh.size)
        said = _vote(self.mesh, problem, [-1 if kept is None else kept.number, *counts])
        if kept is not None and all(row[0] == kept.number for row in said):
            self._kept.sort(key=lambda k: k is kept)  # the one used last is given up last
            return kept.lookup
        request = request or self._request(index)
        send = [row[1 + self.mesh.rank] for row in said]
        slots = self.mesh.all_to_all_rows(request.slots, request.wanted, send, kind="lookup")
        plan = HaloPlan(self.mesh, self.n_owned, slots, tuple(send), tuple(request.wanted))
        lookup = RowLookup(plan, request.translated, request.padded)
        self._keep(index, lookup)
        return lookup

    def full_gather(self, owned: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks in the order of their ids (collective, differentiable).

        Parameters
        ----------
        owned : Tensor, shape (n_owned, *F)

        Returns
        -------
        Tensor, shape (n_global + 1, *F)
            The last row is zero. The gradient of a rank's owned rows is the sum over what every rank made of
            them.
        """
        lookup = self.plan_for(self._every_id)
        return lookup.fetch(owned).index_select(0, lookup.index)

    def slice_owned(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of `full`, and the last row, which is padding's (differentiable).

        Parameters
        ----------
        full : Tensor, shape (n_global + 1, *F)

        Returns
        -------
        Tensor, shape (n_owned + 1, *F)
        """
        if full.dim() == 0 or full.shape[0] != self.n_global + 1:
            raise SpecError(
                f"rank {self.mesh.rank}: slice_owned needs the {self.n_global} rows of all ranks and padding's, found "
                f"a tensor of shape {tuple(full.shape)}"
            )
        return _plain(full).index_select(0, torch.cat([self.ids, self._every_id[-1:]]))

    @functools.cached_property
    def _every_id(self) -> torch.Tensor:
        return torch.arange(self.n_global + 1, device=self.place.device)

    def _request(self, index: torch.Tensor) -> _Request:
        """Return what this rank needs for `index`; no communication."""
        if index.dtype not in _INTEGERS:
            raise SpecError(f"rank {self.mesh.rank}: global ids must be integers, found {index.dtype}")
        with torch._C.DisableTorchFunctionSubclass():
            ids = index.detach().reshape(-1).to(self.place.device, torch.int64)
        beyond = (ids < 0) | (ids > self.n_global)
        if bool(beyond.any()):
            raise SpecError(
                f"rank {self.mesh.rank}: no row has the global id {int(ids[beyond][0])}; ids are "
                f"0 .. {self.n_global - 1}, and {self.n_global} stands for padding"
            )
        place = self.place[ids]
        low, high, n = self.first, self.first + self.n_owned, self.n_global
        wanted = torch.zeros(n + 1, dtype=torch.bool, device=place.device)
        wanted[place] = True
        padded = bool(wanted[n])
        wanted[low:high] = False
        needed = wanted[:n].nonzero()[:, 0]  # in rank order, as a plan wants them
        row = torch.empty_like(self.place)
        row[low:high] = torch.arange(self.n_owned, device=row.device)
        row[needed] = torch.arange(self.n_owned, self.n_owned + len(needed), device=row.device)
        row[n] = self.n_owned + len(needed)
        ends = torch.tensor(self.counts, device=row.device).cumsum(0)
        owner = torch.bucketize(needed, ends, right=True)
        slots = needed - (ends - torch.tensor(self.counts, device=row.device))[owner]
        counts = torch.bincount(owner, minlength=self.mesh.size).tolist()
        return _Request(slots, counts, row[place].view(index.shape), padded)

    def _recall(self, index: torch.Tensor) -> _Kept | None:
        return next((k for k in self._kept if k.serves(index)), None)

    def _keep(self, index: torch.Tensor, lookup: RowLookup) -> None:
        number = next(self._numbers)
        with torch._C.DisableTorchFunctionSubclass():
            content = index.detach().clone()
        alive = [k for k in self._kept if (tensor := k.tensor()) is not None and tensor is not index]
        alive.append(_Kept(number, weakref.ref(index), content, lookup))
        # Other indices never drive out the plan of every id, which is the dearest and serves every full_gather.
        every = vars(self).get("_every_id")
        alive.sort(key=lambda k: every is not None and k.tensor() is every)
        self._kept[:] = alive[-_KEPT_PLANS:]

    def __reduce__(self) -> tuple[Callable[..., GatherMetadata], tuple[object, ...]]:
        place = MeshPlace.of(self.mesh)
        return _read_directory, (place, self.ids, self.n_global, self.place, self.counts, self.token)


def _read_directory(
    place: MeshPlace,
    ids: torch.Tensor,
    n_global: int,
    table: torch.Tensor,
    counts: Sequence[int],
    token: str,
) -> GatherMetadata:
    mesh = place.mesh()
    return GatherMetadata(mesh, ids.to(mesh.device), n_global, table.to(mesh.device), tuple(counts), token)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Return the rows of `t` as a tensor that no handler looks at."""
    return t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)


def _wanted(kept: _Kept | None, request: _Request | None, size: int) -> list[int]:
    """Return how many rows this rank wants from each; none where it can't say."""
    if kept is not None:
        return list(kept.lookup.plan.recv_splits)
    return [0] * size if request is None else request.wanted


def _vote(mesh: Mesh, problem: SpecError | None, numbers: Sequence[int]) -> list[list[int]]:
    """Return every rank's numbers, or raise everywhere when a rank has a problem (collective)."""
    said = mesh.all_gather_ints([int(problem is not None), *numbers])
    if any(row[0] for row in said):
        with agreed(mesh):
            if problem is not None:
                raise problem
    return [row[1:] for row in said]


def _check_ids(every: torch.Tensor, counts: Sequence[int], told: Sequence[int]) -> int:
    """Return the number of rows, or raise, on every rank alike, when `every` does not name each of them once."""
    total = len(every)
    wrong = next((rank for rank, n in enumerate(told) if n not in (-1, told[0])), None)
    if wrong is not None:
        raise SpecError(f"rank {wrong} counts {told[wrong]} rows in all, rank 0 counts {told[0]}")
    expected = total if told[0] == -1 else told[0]
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = every.cpu()
    beyond = ((ids < 0) | (ids >= expected)).nonzero()[:, 0]
    if len(beyond):
        at = int(beyond[0])
        raise SpecError(
            f"rank {int(owner[at])} has a row with the global id {int(ids[at])}, but the {expected} rows of all "
            f"ranks have the ids 0 .. {expected - 1}"
        )
    times = torch.bincount(ids, minlength=expected)
    twice = (times > 1).nonzero()[:, 0]
    if len(twice):
        ranks = owner[ids == twice[0]].tolist()
        raise SpecError(
            f"the global id {int(twice[0])} is there {len(ranks)} times, on ranks {ranks}; ids are unique"
        )
    if total != expected:
        missing = int((times == 0).nonzero()[0])
        raise SpecError(
            f"no rank has the row with the global id {missing}; {expected} rows were announced, found {total}"
        )
    return total
