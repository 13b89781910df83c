"""The ranks of a calculator as the program sees them: a pool, and which rank has which rows.

`Crew.evaluate` sends each rank the positions of its own rows and puts what comes back in the order of the atoms.

Invariant: nothing here outlives the pool; after an error, and in a forked child, everything is made anew.
Layer: interop.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import ase
import numpy as np
import torch

from nvdd_core.interop.seat import Answer, Order, Refused, Work
from nvdd_core.interop.snapshot import Snapshot
from nvdd_core.runtime import Batch, DomainConfig, WorkerPool
from nvdd_core.runtime.precision import precision_note
from nvdd_core.runtime.source import ModelSource
from nvdd_core.runtime.workers import START_LIMIT_S

_SEAT = "nvdd_core.interop.seat"
# Changes that leave every row what it is; a model sees nothing of ``info``.
_LIGHT = frozenset({"positions", "cell", "info"})
_SMALLEST_VOLUME = 1e-9  # Angstrom^3


@dataclass(frozen=True)
class Settings:
    """What the ranks are and compute."""

    source: ModelSource
    n_ranks: int
    device: str
    dtype: torch.dtype
    config: DomainConfig
    timeout_s: float


@dataclass(frozen=True)
class Results:
    """Results for one system, in the order of its atoms; None where the model or the cell has no such thing.

    Attributes
    ----------
    energy : float
        eV.
    forces : ndarray, shape (N, 3), or None
        eV/Angstrom.
    stress : ndarray, shape (3, 3), or None
        eV/Angstrom^3, tension positive.
    node_energy : ndarray, shape (N,), or None
        eV.
    """

    energy: float
    forces: np.ndarray | None
    stress: np.ndarray | None
    node_energy: np.ndarray | None


@dataclass
class _Placed:
    """What the ranks hold."""

    seen: Snapshot
    ids: list[np.ndarray]
    reference: np.ndarray  # positions at the last rebuild
    n_rebuilds: int


class Crew:
    """Ranks that keep a model and the rows of one system; they start at the first evaluation.

    Parameters
    ----------
    settings : Settings

    Attributes
    ----------
    n_rebuilds : int
        Domains that the ranks have built since they started.
    seconds : float
        Time that the last evaluation took on the slowest rank.
    outputs : frozenset of str
        What the model gives; empty before the first evaluation.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.n_rebuilds = 0
        self.seconds = 0.0
        self.outputs: frozenset[str] = frozenset()
        self._pool: WorkerPool | None = None
        self._owner = 0
        self._placed: _Placed | None = None
        self._turn = 0

    def evaluate(self, atoms: ase.Atoms, seen: Snapshot) -> Results:
        """Evaluate `atoms`, of which `seen` is a copy.

        Raises
        ------
        InputError, NumericalError
            The ranks refuse it; they stay.
        Exception
            Whatever else a rank raises, or DistributedError when one died or didn't answer; the ranks have ended.
        """
        self._let_go_of_what_ended()
        placed, self._placed = self._placed, None  # until this has come to a good end
        if placed is not None and _LIGHT.issuperset(placed.seen.changes(atoms)) and _finite(seen):
            works = self._light(placed, seen)
        else:
            batch = _batch(atoms)
            batch.validate()
            if self.settings.dtype == torch.float32 and (note := precision_note(batch)):
                warnings.warn(note, stacklevel=2)
            placed = None
            works = [self._work(seen, is_new=True, batch=batch)]
            works += [self._work(seen, is_new=True)] * (self.settings.n_ranks - 1)
        pool = self._pool or self._start()
        self._turn += 1
        answers = pool.run_each(f"{_SEAT}:evaluate", [(work,) for work in works])
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer.fault.error()
        self._placed = _remember(placed, seen, answers)
        self.n_rebuilds = self._placed.n_rebuilds
        self.seconds = max(answer.seconds for answer in answers)
        return _gather(answers, self._placed.ids, len(atoms))

    def close(self) -> None:
        """End the ranks; the next evaluation starts new ones."""
        self._let_go_of_what_ended()
        pool, self._pool, self._placed = self._pool, None, None
        if pool is not None:
            pool.close()

    def _let_go_of_what_ended(self) -> None:
        """Forget a pool that is closed, or that belongs to the process which this one was forked from."""
        if self._pool is not None and not (self._pool.is_open and self._owner == os.getpid()):
            self._pool = self._placed = None

    def _start(self) -> WorkerPool:
        settings = self.settings
        pool = WorkerPool(settings.n_ranks, settings.device, settings.timeout_s)
        order = Order(settings.source, settings.dtype, settings.config)
        limit = max(settings.timeout_s, START_LIMIT_S)  # loading is no evaluation
        # a failure closes the pool
        self.outputs, *_ = pool.run(f"{_SEAT}:load", order, timeout_s=limit)
        self._pool, self._owner = pool, os.getpid()
        return pool

    def _work(self, seen: Snapshot, *, is_new: bool, batch: Batch | None = None) -> Work:
        volume = abs(float(np.linalg.det(seen.cell)))
        return Work(self._turn + 1, volume > _SMALLEST_VOLUME, is_new, batch)

    def _light(self, placed: _Placed, seen: Snapshot) -> list[Work]:
        """Return the work for rows that are where they were, with new positions and perhaps a new cell."""
        positions = seen.arrays["positions"].astype(np.float64, copy=False)
        cell = None if np.array_equal(seen.cell, placed.seen.cell) else seen.cell
        # The ranks would find out by themselves, but only after an evaluation for nothing.
        reach = 0.5 * self.settings.config.skin
        moved = positions - placed.reference
        far = float(np.einsum("ij,ij->i", moved, moved).max()) > reach**2
        head = self._work(seen, is_new=False)
        return [
            Work(head.turn, head.stress, False, None, positions[ids], cell, far or cell is not None)
            for ids in placed.ids
        ]


def _finite(seen: Snapshot) -> bool:
    return bool(np.isfinite(seen.arrays["positions"]).all() and np.isfinite(seen.cell).all())


def _batch(atoms: ase.Atoms) -> Batch:
    """Return a batch without what no result depends on, however odd it is."""
    bare = atoms.copy()
    bare.set_constraint()
    bare.arrays.pop("momenta", None)
    bare.set_masses([1.0] * len(bare))  # ASE has none for numbers that it doesn't know
    return Batch.from_ase(bare)


def _remember(placed: _Placed | None, seen: Snapshot, answers: Sequence[Answer]) -> _Placed:
    known: Sequence[np.ndarray | None] = [None] * len(answers) if placed is None else placed.ids
    ids = [old if answer.ids is None else answer.ids for old, answer in zip(known, answers, strict=True)]
    n_rebuilds = answers[0].n_rebuilds
    kept = placed is not None and placed.n_rebuilds == n_rebuilds
    reference = placed.reference if placed is not None and kept else seen.arrays["positions"]
    return _Placed(seen, [found for found in ids if found is not None], reference, n_rebuilds)


def _gather(answers: Sequence[Answer], ids: Sequence[np.ndarray], n: int) -> Results:
    first = answers[0]
    forces = None if first.forces is None else np.zeros((n, 3))
    node_energy = None if first.node_energy is None else np.zeros(n)
    for answer, mine in zip(answers, ids, strict=True):
        if forces is not None:
            forces[mine] = answer.forces
        if node_energy is not None:
            node_energy[mine] = answer.node_energy
    return Results(first.energy, forces, first.stress, node_energy)
