"""Checks of a model on several ranks against one process.

Each takes a model that other processes can make (see `ModelSource`) and structures; ranks are CPU processes of
`WorkerPool`, kept between checks and ended by `close_pools`. Invariant: a rank that hangs ends in an error after
a time limit. Layer: testing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ase
import numpy as np

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, SpecError
from nvdd_core.runtime import DomainConfig, ForceStrategy
from nvdd_core.runtime.source import ModelSource
from nvdd_core.runtime.workers import WorkerPool
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import ranks as worker
from nvdd_core.testing.evaluation import Evaluated, compare_all, evaluate, need_forces
from nvdd_core.testing.failures import ConformanceError, NotApplicable, PartlyChecked, check
from nvdd_core.testing.ranks import Gradients, Job, Share
from nvdd_core.testing.tolerances import TIGHT, Array, Tolerance, compare
from nvdd_core.validate.gradients import lacks_derivative

RANKS: Final = (1, 2, 4)
_LIMIT_S: Final = 240.0
_FAILURE_LIMIT_S: Final = 60.0
_STEPS: Final = 4

_POOLS: dict[int, WorkerPool] = {}


def pool(n_ranks: int) -> WorkerPool:
    """Return running ranks, kept until `close_pools`."""
    if n_ranks not in _POOLS or not _POOLS[n_ranks].is_open:
        _POOLS[n_ranks] = WorkerPool(n_ranks, "cpu", timeout_s=_LIMIT_S)
    return _POOLS[n_ranks]


def close_pools() -> None:
    """End all ranks that checks have started, and let go of the model."""
    worker.forget()
    while _POOLS:
        _POOLS.popitem()[1].close()


def claimed_strategies(model: Any) -> dict[StrategyKind, str]:
    """Return the strategies that a model's `distribution_spec` knows, and why it refuses the others.

    Returns
    -------
    dict
        Strategy to the reason of the refusal, empty where the model takes it.
    """
    model = ModelSource.of(model).load()
    found: dict[StrategyKind, str] = {}
    for strategy in StrategyKind:
        try:
            model.distribution_spec(strategy)
        except SpecError as error:
            found[strategy] = str(error)
        else:
            found[strategy] = ""
    return found


def _strategies(source: ModelSource, strategy: object) -> list[StrategyKind]:
    if strategy is not None:
        chosen = [strategy] if isinstance(strategy, str) else list(strategy)  # type: ignore[call-overload]
        return [StrategyKind(word) for word in chosen]
    return [kind for kind, refusal in claimed_strategies(source).items() if not refusal]


def _shares(source: ModelSource, n_ranks: int, jobs: Sequence[Job]) -> list[list[list[Share]]]:
    """Run jobs on `n_ranks` ranks; returns job -> evaluation -> rank."""
    if n_ranks == 1:
        per_rank = [worker.evaluate_jobs(Mesh.single("cpu"), source, jobs)]
    else:
        per_rank = pool(n_ranks).run(worker.evaluate_jobs, source, list(jobs))
    return [
        [[shares[j][step] for shares in per_rank] for step in range(1 + len(job.moves))]
        for j, job in enumerate(jobs)
    ]


def _moved(atoms: ase.Atoms, move: Array) -> ase.Atoms:
    moved = atoms.copy()
    moved.positions = moved.positions + move
    return moved


class _Alone:
    """What one process gives, evaluated once for each structure of a check."""

    def __init__(self, source: ModelSource) -> None:
        self._model = source.load()
        self._found: dict[tuple[object, ...], Evaluated] = {}

    def __call__(self, atoms: ase.Atoms, outputs: frozenset[str] | None) -> Evaluated:
        parts = (atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        key = (*(part.tobytes() for part in parts), outputs)
        if key not in self._found:
            self._found[key] = evaluate(self._model, atoms, outputs)
        return self._found[key]


def _check_jobs(
    source: ModelSource, alone: _Alone, n_ranks: int, jobs: Sequence[Job], tolerance: Tolerance
) -> list[list[list[Share]]]:
    """Run jobs on ranks and compare every evaluation with one process on the same positions."""
    found = _shares(source, n_ranks, jobs)
    for job, evaluations in zip(jobs, found, strict=True):
        moves = (np.zeros((len(job.atoms), 3)), *job.moves)
        for step, (move, shares) in enumerate(zip(moves, evaluations, strict=True)):
            where = f"'{job.name}' on {n_ranks} ranks, strategy {job.config.strategy.value}"
            where += f", evaluation {step}" if job.moves else ""
            expected = alone(_moved(job.atoms, move), job.outputs)
            compare_all(where, worker.joined(shares, len(job.atoms), where), expected, tolerance)
    return found


def _named(structures: ase.Atoms | Mapping[str, ase.Atoms]) -> Mapping[str, ase.Atoms]:
    return {"the structure": structures} if isinstance(structures, ase.Atoms) else structures


@check
def assert_parity(
    model: Any,
    atoms: ase.Atoms | Mapping[str, ase.Atoms],
    ranks: Sequence[int] = RANKS,
    strategy: object = None,
    tolerance: Tolerance = TIGHT,
) -> None:
    """Check that energy, forces, stress and node energies on several ranks are those of one process.

    Parameters
    ----------
    model : str, callable or Model
        See `ModelSource`; a Model has to be picklable.
    atoms : Atoms, or mapping of str to Atoms
    ranks : sequence of int
    strategy : str, StrategyKind or several, optional
        Default: all that the model's `distribution_spec` takes.
    tolerance : Tolerance
    """
    source = ModelSource.of(model)
    kinds, alone = _strategies(source, strategy), _Alone(source)
    jobs = [Job(name, a, DomainConfig(strategy=kind)) for name, a in _named(atoms).items() for kind in kinds]
    for n_ranks in ranks:
        _check_jobs(source, alone, n_ranks, jobs, tolerance)


@check
def assert_gradient_parity(
    model: Any,
    atoms: ase.Atoms,
    ranks: Sequence[int] = RANKS,
    strategy: object = None,
    tolerance: Tolerance = TIGHT,
) -> None:
    """Check gradients of a loss of rows' results, for positions and parameters, against one process.

    The loss is a weighted sum of node energies and, where the model can be differentiated twice, of forces; where it
    can't, a `PartlyChecked` warning says so.
    """
    source = ModelSource.of(model)
    loaded = source.load()
    if "node_energy" not in loaded.outputs:
        raise NotApplicable("the model gives no node_energy, of which the loss is made")
    kinds = [
        kind
        for kind in _strategies(source, strategy)
        if loaded.distribution_spec(kind).force_strategy is ForceStrategy.AUTOGRAD
    ]
    if not kinds:
        raise NotApplicable(
            "the model computes forces itself (ForceStrategy.DIRECT or MIXED), without a graph"
        )
    jobs = [Job("the structure", atoms, DomainConfig(strategy=kind)) for kind in kinds]
    terms, expected = _reference_gradients(source, jobs)
    for n_ranks in _several(ranks):
        per_rank = pool(n_ranks).run(worker.differentiate, source, jobs, terms)
        for j, job in enumerate(jobs):
            where = f"of a loss on {n_ranks} ranks, strategy {job.config.strategy.value}"
            _compare_gradients(where, [grads[j] for grads in per_rank], expected[j], tolerance)


def _reference_gradients(source: ModelSource, jobs: Sequence[Job]) -> tuple[frozenset[str], list[Gradients]]:
    """Differentiate in this process; without forces where the model has no second derivative."""
    mesh, terms = Mesh.single("cpu"), frozenset({"energy", "node_energy", "forces"})
    try:
        return terms, worker.differentiate(mesh, source, jobs, terms)
    except RuntimeError as error:
        if not lacks_derivative(error):
            raise
        reason = " ".join(str(error).split())
    warnings.warn(PartlyChecked(f"gradients of forces were not compared: {reason}"), stacklevel=2)
    terms = frozenset({"energy", "node_energy"})
    return terms, worker.differentiate(mesh, source, jobs, terms)


def _several(ranks: Sequence[int]) -> list[int]:
    """Leave out one rank, where nothing is distributed."""
    return [n_ranks for n_ranks in ranks if n_ranks != 1]


def _compare_gradients(
    where: str, found: Sequence[Gradients], expected: Gradients, tolerance: Tolerance
) -> None:
    order = np.argsort(np.concatenate([part.ids for part in found]))
    positions = np.concatenate([part.positions for part in found])[order]
    compare(
        f"gradient for positions {where}", positions, expected.positions[np.argsort(expected.ids)], tolerance
    )
    for name, value in expected.parameters.items():
        total = sum((part.parameters[name] for part in found), np.zeros_like(value))
        compare(f"gradient for '{name}' {where}", total, value, tolerance)


@check
def assert_uneven_split(
    model: Any,
    atoms: ase.Atoms,
    ranks: Sequence[int] = RANKS,
    strategy: object = None,
    tolerance: Tolerance = TIGHT,
) -> None:
    """Check parity when ranks own different numbers of rows: atoms taken out of one end of a structure."""
    source = ModelSource.of(model)
    alone = _Alone(source)
    order = np.argsort(atoms.positions[:, 2], kind="stable")
    fewer = atoms[np.sort(order[len(atoms) // 5 + 1 :])]
    for n_ranks in _several(ranks):
        jobs = [_sliced("the structure", fewer, n_ranks, kind) for kind in _strategies(source, strategy)]
        for job, evaluations in zip(jobs, _check_jobs(source, alone, n_ranks, jobs, tolerance), strict=True):
            owned = [len(share.ids) for share in evaluations[0]]
            if len(set(owned)) == 1 and job.config.strategy is not StrategyKind.GRAPH_PARTITION:
                raise NotApplicable(f"every rank owns {owned[0]} rows of this structure; give another one")


def _sliced(name: str, atoms: ase.Atoms, n_ranks: int, strategy: StrategyKind) -> Job:
    """A job whose domains are slices along the third cell vector."""
    return Job(name, atoms, DomainConfig(strategy=strategy, grid_dims=(1, 1, n_ranks)))


@check
def assert_empty_rank(
    model: Any,
    atoms: ase.Atoms,
    ranks: Sequence[int] = RANKS,
    strategy: object = None,
    tolerance: Tolerance = TIGHT,
) -> None:
    """Check parity when a rank owns no row at all: one atom, and a periodic cell with all atoms at one end."""
    source = ModelSource.of(model)
    alone = _Alone(source)
    for n_ranks in _several(ranks):
        jobs = []
        for kind in _strategies(source, strategy):
            jobs.append(Job("one atom", atoms[:1], DomainConfig(strategy=kind)))
            # rows by index are never all on one rank
            if bool(atoms.pbc.all()) and kind is not StrategyKind.GRAPH_PARTITION:
                far = atoms.copy()
                far.set_cell(atoms.cell.array * np.array([[1.0], [1.0], [2.5 * n_ranks]]))
                far.positions = far.positions + 0.1 * atoms.cell.array[2]
                jobs.append(_sliced("a cell with all atoms at one end", far, n_ranks, kind))
        for evaluations in _check_jobs(source, alone, n_ranks, jobs, tolerance):
            if min(len(share.ids) for share in evaluations[0]) > 0:
                raise ConformanceError("no rank was empty, so nothing was checked; report this")


@check
def assert_migration(
    model: Any,
    atoms: ase.Atoms,
    ranks: Sequence[int] = RANKS,
    strategy: object = None,
    tolerance: Tolerance = TIGHT,
) -> None:
    """Check parity at every step while atoms drift over the faces between domains, with and without a skin."""
    source = ModelSource.of(model)
    cutoff, alone = source.load().cutoff, _Alone(source)
    drift = 0.15 * cutoff * np.array([0.3, -0.2, 1.0])
    shake = 0.01 * cutoff * np.sin(1.7 * np.arange(3 * len(atoms))).reshape(-1, 3)
    moves = [step * drift + step * shake for step in range(1, _STEPS + 1)]
    for n_ranks in _several(ranks):
        jobs = [
            Job("the structure", atoms, DomainConfig(strategy=kind, skin=skin * cutoff), moves)
            for kind in _strategies(source, strategy)
            for skin in (0.0, 0.4)
        ]
        for job, evaluations in zip(jobs, _check_jobs(source, alone, n_ranks, jobs, tolerance), strict=True):
            if job.config.strategy is not StrategyKind.GRAPH_PARTITION and not _migrated(evaluations):
                raise NotApplicable("no atom of this structure changed its rank; give a longer one")


def _migrated(evaluations: Sequence[Sequence[Share]]) -> bool:
    first, last = (
        [frozenset(share.ids.tolist()) for share in shares] for shares in (evaluations[0], evaluations[-1])
    )
    return first != last


@check
def assert_halo_is_complete(
    model: Any, line: ase.Atoms, reach_in_forces: bool = False, tolerance: Tolerance = TIGHT
) -> None:
    """Check that an atom is influenced from within layers x cutoff only, so that ghosts that far suffice.

    Parameters
    ----------
    model : Model, or anything that `ModelSource` takes
    line : Atoms
        Longer than twice layers x cutoff, such as `structures.chain`; its last atom is moved.
    reach_in_forces : bool
        Look at forces, which reach twice as far, also where the model gives node energies.
    """
    model = ModelSource.of(model).load()
    by_rows = "node_energy" in model.outputs and not reach_in_forces
    outputs = {"energy", "forces", "node_energy"} if by_rows else {"energy", "forces"}
    reach = model.layers * model.cutoff * (1.0 if by_rows else 2.0)
    step = np.zeros((len(line), 3))
    step[-1] = [0.0, 0.11 * model.cutoff, 0.07 * model.cutoff]
    moved = _moved(line, step)
    before, after = evaluate(model, line, outputs), evaluate(model, moved, outputs)
    need_forces("the chain", before)
    near = np.minimum(
        np.linalg.norm(line.positions - line.positions[-1], axis=1),
        np.linalg.norm(line.positions - moved.positions[-1], axis=1),
    )
    far = near > reach
    if not far.any():
        raise NotApplicable(f"no atom of the chain is further than {reach:.3g} A from its end")
    what = f"beyond {model.layers} layers x {model.cutoff:g} A, after the last atom of a chain moved"
    if by_rows and after.node_energy is not None and before.node_energy is not None:
        compare(f"node energies {what}", after.node_energy[far], before.node_energy[far], tolerance)
    else:
        compare(f"forces {what}", after.forces[far], before.forces[far], tolerance)


@check
def assert_communication_is_steady(
    model: Any, atoms: ase.Atoms, ranks: Sequence[int] = RANKS, strategy: object = None
) -> dict[str, Mapping[str, int]]:
    """Check that every step between two rebuilds makes the same collectives with the same numbers of bytes.

    Returns
    -------
    dict of str to mapping
        Calls of rank 0 in a steady step, by ranks and strategy, for a report.
    """
    source = ModelSource.of(model)
    skin = 0.3 * source.load().cutoff
    shake = 0.02 * skin * np.sin(1.7 * np.arange(3 * len(atoms))).reshape(-1, 3)
    moves = [step * shake for step in range(1, _STEPS + 1)]
    budgets: dict[str, Mapping[str, int]] = {}
    for n_ranks in _several(ranks):
        kinds = _strategies(source, strategy)
        wanted = frozenset({"energy", "forces"})
        jobs = [Job("x", atoms, DomainConfig(strategy=kind, skin=skin), moves, wanted) for kind in kinds]
        for job, evaluations in zip(jobs, _shares(source, n_ranks, jobs), strict=True):
            where = f"{n_ranks} ranks, {job.config.strategy.value}"
            _check_steady(where, evaluations[1:])
            budgets[where] = evaluations[-1][0].calls
    return budgets


def _check_steady(where: str, steps: Sequence[Sequence[Share]]) -> None:
    for rank, first in enumerate(steps[0]):
        for number, shares in enumerate(steps):
            share = shares[rank]
            if share.rebuilds != first.rebuilds:
                raise ConformanceError(
                    f"{where}: step {number} rebuilt its lists, though atoms stayed in the skin"
                )
            if dict(share.calls) != dict(first.calls) or dict(share.sent) != dict(first.sent):
                raise ConformanceError(
                    f"{where}: rank {rank} made {dict(share.calls)} ({dict(share.sent)} bytes) in step {number}, "
                    f"{dict(first.calls)} ({dict(first.sent)} bytes) in the first; what a model exchanges may depend "
                    "on the domain only"
                )


@check
def assert_failure_reaches_caller(
    model: Any,
    atoms: ase.Atoms,
    n_ranks: int = 2,
    strategy: object = None,
    timeout_s: float = _FAILURE_LIMIT_S,
) -> None:
    """Check that a model that raises on one rank ends all ranks with that error, within a time limit."""
    source = ModelSource.of(model)
    kind = _strategies(source, strategy)[0]
    message = "deliberate failure of the conformance kit"
    job = Job("the structure", atoms, DomainConfig(strategy=kind))
    ranks = pool(n_ranks)
    try:
        ranks.run(worker.evaluate_failing, source, job, n_ranks - 1, message, timeout_s=timeout_s)
    except (ValueError, DistributedError) as error:
        if message not in str(error):
            raise ConformanceError(
                f"rank {n_ranks - 1} raised ValueError({message!r}), the caller got {type(error).__name__}: {error}"
            ) from error
        return
    raise ConformanceError(f"rank {n_ranks - 1} raised ValueError({message!r}), and the caller got no error")
