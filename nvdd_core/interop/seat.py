"""What one rank of a calculator does: it keeps a model and its rows from one call to the next.

`load` makes the model, `evaluate` brings the rows up to date and evaluates them. The calculator calls both on all
ranks at once.

Invariant: a rank refuses, and the ranks live on, only when all of them raised the same type of error after the same
collectives; any other error ends them all.
Layer: interop.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from nvdd_core.comm import Fault, Mesh, agreed
from nvdd_core.errors import InputError, NumericalError
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.runtime.source import ModelSource

_WAIT_S = 2.0
_POLL_S = 0.001
_GIVEN = frozenset({"energy", "forces", "node_energy"})


@dataclass(frozen=True)
class Order:
    """What a rank needs to make its model."""

    source: ModelSource
    dtype: torch.dtype
    config: DomainConfig


@dataclass(frozen=True)
class Work:
    """One evaluation, as one rank is told of it.

    Attributes
    ----------
    turn : int
        Which evaluation this is, from 1.
    stress : bool
        Whether the cell has a volume.
    batch : Batch or None
        New systems on rank 0 and, there and elsewhere, `is_new`.
    positions : ndarray, shape (n_owned, 3), or None
        Of the rows that this rank owns, in its order, Angstrom.
    cell : ndarray, shape (3, 3), or None
        A new cell, Angstrom.
    rebuild : bool
        Whether rows have moved so far that the domain is made anew first.
    """

    turn: int
    stress: bool
    is_new: bool
    batch: Batch | None = None
    positions: np.ndarray | None = None
    cell: np.ndarray | None = None
    rebuild: bool = False


@dataclass(frozen=True)
class Answer:
    """What one rank found.

    Attributes
    ----------
    energy : float
        Of the whole system, eV.
    stress : ndarray, shape (3, 3), or None
        Likewise, eV/Angstrom^3.
    ids : ndarray, shape (n_owned,), or None
        Which rows this rank owns; None where it is those of the last answer.
    forces : ndarray, shape (n_owned, 3), or None; node_energy : ndarray, shape (n_owned,), or None
    n_rebuilds : int
        Domains built so far.
    seconds : float
        Time that the evaluation took.
    """

    energy: float
    stress: np.ndarray | None
    ids: np.ndarray | None
    forces: np.ndarray | None
    node_energy: np.ndarray | None
    n_rebuilds: int
    seconds: float


@dataclass(frozen=True)
class Refused:
    """All ranks refused the input alike and are ready for another one."""

    fault: Fault


class _Seat:
    """A rank's model and rows."""

    def __init__(self, model: DistributedModel) -> None:
        self.model = model
        self.sharded: ShardedBatch | None = None
        self._told = 0  # version of the rows whose ids the calculator knows

    def answer(self, work: Work) -> Answer:
        """Evaluate (collective)."""
        begin = time.perf_counter()
        sharded = self._update(work)
        wanted = (_GIVEN | ({"stress"} if work.stress else set())) & frozenset(self.model.model.outputs)
        out = self.model(sharded, wanted)
        moved = sharded.version != self._told
        self._told = sharded.version
        return Answer(
            energy=float(out.energy[0]),
            stress=None if out.stress is None else _numpy(out.stress[0]),
            ids=_numpy(sharded.ids) if moved else None,
            forces=None if out.forces is None else _numpy(out.forces),
            node_energy=None if out.node_energy is None else _numpy(out.node_energy.double()),
            n_rebuilds=self.model.n_rebuilds,
            seconds=time.perf_counter() - begin,
        )

    def _update(self, work: Work) -> ShardedBatch:
        if work.is_new or self.sharded is None:
            self.sharded = ShardedBatch.scatter(work.batch, self.model.mesh)
            return self.sharded
        sharded = self.sharded
        if work.positions is not None:
            sharded.rows["positions"] = torch.from_numpy(work.positions).to(sharded.positions)
        if work.cell is not None:
            sharded.cell = torch.from_numpy(work.cell).to(sharded.cell)[None]
        if work.rebuild:
            self.model.rebuild(sharded)
        return sharded


_SEATS: dict[int, _Seat] = {}  # by the number of the mesh


def load(mesh: Mesh, order: Order) -> frozenset[str]:
    """Make the model and return the names of its outputs (collective)."""
    with agreed(mesh), warnings.catch_warnings():
        if mesh.rank != 0:  # all ranks load the same, and one tells what users should know
            warnings.simplefilter("ignore", UserWarning)
        model = order.source.load(order.dtype, mesh.device)
    _SEATS[mesh.id] = _Seat(DistributedModel(model, order.config, mesh))
    return frozenset(model.outputs)


def evaluate(mesh: Mesh, work: Work) -> Answer | Refused:
    """Evaluate (collective); what all ranks refuse alike is an answer, too."""
    seat = _SEATS[mesh.id]
    try:
        return seat.answer(work)
    except (InputError, NumericalError) as exc:
        if not _all_refuse(mesh, exc, work.turn):
            raise
        seat.sharded = None
        return Refused(Fault.of(mesh.rank, exc))


def _all_refuse(mesh: Mesh, exc: Exception, turn: int) -> bool:
    """Tell whether every rank raises this type of error after the same collectives.

    Ranks that can't be sure to be at the same place must not ask each other by a collective, so they write what
    they have in the store that they share.
    """
    store = mesh.store()
    if store is None:
        return mesh.size == 1
    mine = f"{type(exc).__name__} {sorted(mesh.counter.calls.items())}"
    keys = [f"nvdd/refusal/{turn}/{rank}" for rank in range(mesh.size)]
    end = time.monotonic() + _WAIT_S
    try:
        store.set(keys[mesh.rank], mine)
        while not store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return all(bytes(store.get(key)).decode() == mine for key in keys)
    except RuntimeError:  # the store went with its host
        return False


def _numpy(t: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(t.detach().cpu().numpy())
