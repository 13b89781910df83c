"""What one rank does in the distributed checks; found by name in the workers.

Key objects: `Job`, `Share`, `joined`. Invariant: a rank returns what it owns and nothing else; rows are put
together, and counted, by the caller. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ase
import numpy as np
import torch
from numpy.typing import NDArray

from nvdd_core.comm import Mesh
from nvdd_core.runtime import (
    Batch,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    Model,
    ShardedBatch,
    current_dd_context,
)
from nvdd_core.runtime.model_adapters import root_module
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.evaluation import Evaluated, as_arrays, outputs_for
from nvdd_core.testing.failures import ConformanceError
from nvdd_core.testing.tolerances import Array


@dataclass(frozen=True)
class Job:
    """One structure to be evaluated, then again after each move.

    Attributes
    ----------
    name : str
        For messages.
    atoms : Atoms
    config : DomainConfig
    moves : sequence of array (N, 3)
        Displacements from `atoms`, Angstrom, one an evaluation after the first.
    outputs : set of str, or None
        None for what `outputs_for` says.
    """

    name: str
    atoms: ase.Atoms
    config: DomainConfig
    moves: Sequence[Array] = ()
    outputs: frozenset[str] | None = None


@dataclass(frozen=True)
class Share:
    """What one rank has after one evaluation: its rows with their ids, and its tally of collectives."""

    ids: NDArray[np.int64]
    results: Evaluated
    ghosts: int
    rebuilds: int
    calls: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)


# The model that this process made last, by the key of its source: a call for each check shouldn't load it anew.
_KEPT: dict[bytes, Model] = {}


def _model(source: ModelSource) -> Model:
    key = source.key()
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = source.load()
    return _KEPT[key]


def forget() -> None:
    """Let go of the model that this process made last."""
    _KEPT.clear()


def evaluate_jobs(mesh: Mesh, source: ModelSource, jobs: Sequence[Job]) -> list[list[Share]]:
    """Evaluate each job on all ranks of `mesh` (collective); one list of shares a job."""
    model = _model(source)
    return [_evaluate(mesh, model, job) for job in jobs]


def _evaluate(mesh: Mesh, model: Model, job: Job) -> list[Share]:
    start = torch.as_tensor(job.atoms.positions)
    sharded = ShardedBatch.scatter(Batch.from_ase(job.atoms) if mesh.rank == 0 else None, mesh)
    distributed = DistributedModel(model, job.config, mesh)
    wanted = outputs_for(model, job.atoms) if job.outputs is None else job.outputs
    shares = []
    for move in (np.zeros((len(job.atoms), 3)), *job.moves):
        sharded.positions.copy_((start + torch.as_tensor(move))[sharded.ids])
        before = mesh.counter.snapshot()
        out = distributed(sharded, wanted)
        tally = mesh.counter.since(before)
        results = as_arrays(out, distributed.spec, wanted)
        shares.append(_share(distributed, sharded, results, dict(tally.calls), dict(tally.bytes)))
    return shares


def _share(
    distributed: DistributedModel,
    sharded: ShardedBatch,
    results: Evaluated,
    calls: Mapping[str, int],
    sent: Mapping[str, int],
) -> Share:
    return Share(
        ids=sharded.ids.numpy().copy(),
        results=results,
        ghosts=distributed.domain.plan.n_ghost,
        rebuilds=distributed.n_rebuilds,
        calls=calls,
        sent=sent,
    )


def joined(shares: Sequence[Share], n: int, where: str) -> Evaluated:
    """Put the ranks' rows together in the order of ids.

    Raises
    ------
    ConformanceError
        When a row is on no rank or on two, or when the ranks disagree about a total.
    """
    ids = np.concatenate([share.ids for share in shares])
    if not np.array_equal(np.sort(ids), np.arange(n)):
        raise ConformanceError(f"{where}: the ranks own {len(ids)} rows, expected each of {n} once")
    parts = [share.results for share in shares]
    for rank, part in enumerate(parts):
        for name in {"energy", "stress"} & part.totals.keys():
            value = part.totals[name]
            if not np.array_equal(value, parts[0].totals[name]):
                raise ConformanceError(
                    f"{where}: rank {rank} has {name} {value.tolist()}, rank 0 {parts[0].totals[name].tolist()}"
                )
    order = np.argsort(ids)
    rows = {name: np.concatenate([part.rows[name] for part in parts])[order] for name in parts[0].rows}
    return Evaluated(parts[0].totals, rows)


# -- gradients -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """One rank's gradients of its share of a loss: for its own rows, and for the model's parameters."""

    ids: NDArray[np.int64]
    positions: Array
    parameters: Mapping[str, Array]


def differentiate(
    mesh: Mesh, source: ModelSource, jobs: Sequence[Job], terms: frozenset[str]
) -> list[Gradients]:
    """Differentiate a weighted sum of rows' results with respect to positions and parameters (collective)."""
    model = _model(source)
    return [_differentiate(mesh, model, job, terms) for job in jobs]


def _differentiate(mesh: Mesh, model: Model, job: Job, terms: frozenset[str]) -> Gradients:
    sharded = ShardedBatch.scatter(Batch.from_ase(job.atoms) if mesh.rank == 0 else None, mesh)
    distributed = DistributedModel(model, job.config, mesh)
    distributed(sharded, terms)
    leaf = sharded.positions.detach().clone().requires_grad_(True)
    sharded.rows["positions"] = leaf
    out = distributed.differentiable(sharded, terms)
    weight = torch.cos(0.7 * sharded.ids.double())
    loss = leaf.new_zeros(())
    if out.node_energy is not None and "node_energy" in terms:
        loss = loss + (weight * out.node_energy).sum()
    if out.forces is not None and "forces" in terms:
        loss = loss + (weight[:, None] * torch.sin(out.forces)).sum()
    parameters = _parameters(model)
    found = torch.autograd.grad(loss, [leaf, *parameters.values()], allow_unused=True)
    inputs = [leaf, *parameters.values()]
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    named = {n: g.double().numpy().copy() for n, g in zip(parameters, grads[1:], strict=True)}
    return Gradients(sharded.ids.numpy().copy(), grads[0].numpy().copy(), named)


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    module = root_module(model)
    named = () if module is None else module.named_parameters()
    return {name: p for name, p in named if p.requires_grad}


# -- failures ----------------------------------------------------------------------------------------------


class _Failing:
    """A model that raises on one rank."""

    def __init__(self, model: Model, rank: int, message: str) -> None:
        self._model, self._rank, self._message = model, rank, message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        mesh = current_dd_context().mesh
        if mesh is not None and mesh.rank == self._rank:
            raise ValueError(self._message)
        return self._model.forward(batch)


def evaluate_failing(mesh: Mesh, source: ModelSource, job: Job, rank: int, message: str) -> None:
    """Evaluate with a model that raises ``ValueError(message)`` on one rank (collective)."""
    _evaluate(mesh, _Failing(_model(source), rank, message), job)
