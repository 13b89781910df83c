"""`trace_and_validate`: one process, then ranks, then a diagnosis, then specs that could be right.

Layer: validate.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import ase
import torch

from nvdd_core import errors
from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, InputError, NumericalError
from nvdd_core.plugins.foreign import error_text, wanted_end
from nvdd_core.runtime import Batch, DomainConfig, MLIPSpec, Model, WorkerPool
from nvdd_core.runtime.model_api import members_of
from nvdd_core.runtime.source import ModelSource
from nvdd_core.runtime.structures import read_structures
from nvdd_core.spec import StrategyKind
from nvdd_core.validate.candidates import candidates, fixes_between
from nvdd_core.validate.diagnose import Diagnosis, Outcome, diagnose
from nvdd_core.validate.findings import (
    Cause,
    HandlerCount,
    RankError,
    Traffic,
    ValidationReport,
)
from nvdd_core.validate.observe import Observation, Request, observe
from nvdd_core.validate.places import place_in_traceback
from nvdd_core.validate.record import modules_of
from nvdd_core.validate.text import next_action, warning

MAX_EVALUATIONS = 8
"""Runs on ranks until the search for a spec ends, the first one included."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_REACHES = (1.5, 2.5)
Structure: TypeAlias = str | os.PathLike[str] | ase.Atoms | Sequence[ase.Atoms] | Batch


def trace_and_validate(
    model: str | Callable[..., Model],
    structure: Structure,
    *,
    ranks: int = 2,
    strategy: str | StrategyKind = StrategyKind.HALO,
    spec: MLIPSpec | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    fix: bool = True,
    config: DomainConfig | None = None,
    timeout_s: float = 300.0,
    pool: WorkerPool | None = None,
    tell: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Evaluate a model in one process and on several ranks, and say where and why they differ.

    Parameters
    ----------
    model : str or callable
        An installed model, ``"package.module:factory"``, ``"path/file.py:factory"``, or a callable that can be
        imported. It is called with ``dtype``, ``device`` and `options`, as far as it takes them.
    structure : path, ase.Atoms, sequence of ase.Atoms, or Batch
        Of a file the last system is taken.
    ranks : int
        Processes on this machine; on a GPU, several share one where there are fewer.
    strategy : str or StrategyKind
    spec : MLIPSpec, optional
        Instead of the model's own.
    options : mapping, optional
    device : str
        ``"cpu"`` or ``"cuda"``.
    dtype : str
        ``"float64"`` or ``"float32"``.
    fix : bool
        Whether to look for a spec that works where the one as given doesn't.
    config : DomainConfig, optional
        Cutoff, skin, grid; its strategy gives way to `strategy`.
    timeout_s : float
        Time limit of a run on ranks, seconds.
    pool : WorkerPool, optional
        Ranks to use as long as nothing fails on them, instead of new ones; of the same number and device.
    tell : callable, optional
        Called with what is done next, in words: making a model takes seconds, each time that ranks start.

    Returns
    -------
    ValidationReport

    Raises
    ------
    InputError
        When the model, its options or the structure can't be used.
    """
    if ranks < 2:
        raise InputError(f"ranks is {ranks}: a comparison with one process takes at least 2")
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype!r}: expected {' or '.join(_DTYPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but this machine has no GPU that torch can use")
    config = dataclasses.replace(config or DomainConfig(), strategy=StrategyKind(strategy))
    if spec is not None and (reason := _bound_here(spec)):
        raise InputError(f"spec can't be sent to ranks: {reason}")
    source = ModelSource.of(model, options).by_name()
    request = Request(source, _batch(structure), config, _DTYPES[dtype], spec)
    if pool is not None and (pool.n_ranks, pool.device) != (ranks, device):
        raise InputError(f"the pool has {pool.n_ranks} ranks on {pool.device}; expected {ranks} on {device}")
    with _Session(request, ranks, device, timeout_s, pool, tell) as session:
        return session.report(dtype, fix)


def _bound_here(spec: MLIPSpec) -> str:
    """Return why a spec can't leave this process, "" where it can."""
    try:
        pickle.dumps(spec)
    except Exception as exc:  # what code without a name raises depends on what it is
        return f"an adapter of it holds code that has no name ({' '.join(str(exc).split())}); move it to module level"
    return ""


def _batch(structure: Structure) -> Batch:
    if isinstance(structure, Batch):
        return structure
    if isinstance(structure, str | os.PathLike):
        structure = read_structures(Path(structure), "-1")
    return Batch.from_ase(structure)


class _Session:
    """The runs of one validation, and what became of them."""

    def __init__(
        self,
        request: Request,
        n_ranks: int,
        device: str,
        timeout_s: float,
        pool: WorkerPool | None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.request, self.n_ranks, self.device, self.timeout_s = request, n_ranks, device, timeout_s
        self.evaluations = 0
        self.untried = ""
        self._given, self._pool = pool, pool
        self._tell = tell or (lambda text: None)

    def __enter__(self) -> _Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None and self._pool is not self._given:
            self._pool.close()

    # -- runs ----------------------------------------------------------------------------------------------

    def alone(self) -> Observation | RankError:
        """Evaluate in this process.

        Raises
        ------
        InputError, NumericalError
            What is wrong with the input is the caller's to mend.
        """
        self._tell(f"evaluating {self.request.source.name} in one process")
        try:
            return observe(Mesh.single(self.device), self.request)
        except (InputError, NumericalError, KeyboardInterrupt):
            raise
        except BaseException as exc:  # a model raises whatever it happens to raise, SystemExit too
            return _error(exc)

    def on_ranks(self, **changes: Any) -> Outcome:
        """Evaluate on ranks; what a rank raises is an outcome like any other."""
        self.evaluations += 1
        what = (
            ("with another spec" if "spec" in changes else "with more ghosts") if changes else "and comparing"
        )
        self._tell(f"evaluating on {self.n_ranks} ranks {what}")
        with tempfile.TemporaryDirectory(prefix="nvdd-validate-") as folder:
            request = dataclasses.replace(self.request, folder=folder, **changes)
            if self._pool is None or not self._pool.is_open:
                self._pool = WorkerPool(self.n_ranks, self.device, self.timeout_s)
            try:
                return Outcome(tuple(self._pool.run(observe, request, timeout_s=self.timeout_s)))
            except KeyboardInterrupt:
                raise
            except BaseException as exc:  # a model raises whatever it happens to raise
                return Outcome(self._left_behind(Path(folder)), _error(exc))

    def _left_behind(self, folder: Path) -> tuple[Observation, ...]:
        """Return what failing ranks had recorded, if each of them left something."""
        files = [folder / f"{rank}.pickle" for rank in range(self.n_ranks)]
        if not all(file.exists() for file in files):
            return ()
        return tuple(pickle.loads(file.read_bytes()) for file in files)  # written by our own ranks

    # -- the search ----------------------------------------------------------------------------------------

    def report(self, dtype: str, fix: bool) -> ValidationReport:
        """Run everything and say what was found."""
        alone = self.alone()
        if isinstance(alone, RankError):
            return self._make(dtype, None, Outcome((), alone), _FAILED_ALONE, None, None)
        derived = frozenset(name for name, gradient in alone.gradients.items() if gradient is not None)
        self.request = dataclasses.replace(self.request, derive=derived)
        outcome = self.on_ranks()
        found = diagnose(alone, outcome, self.request.dtype)
        given = self.request.spec or alone.spec
        working = given if found.passed else None
        reach = None
        if not found.passed and fix and _spec_may_help(outcome.error):
            if reason := _bound_here(given):
                self.untried = f"no other spec was tried, since this one can't be sent to ranks: {reason}"
            else:
                working = self._search(alone, given, found)
        if working is None and _may_lack_rows(found, self.request.config.strategy):
            reach = self._reach(alone)
        return self._make(dtype, alone, outcome, found, working, reach)

    def _search(self, alone: Observation, spec: MLIPSpec, found: Diagnosis) -> MLIPSpec | None:
        """Try candidates; go on from one that is nearer to being right."""
        model = self.request.source.load(self.request.dtype, torch.device(self.device))
        if members := members_of(model):
            names = ", ".join(member.name for member in members)
            self.untried = f"no other spec was tried, as each member runs by its own: validate {names} alone"
            return None
        tried, modules = [spec], modules_of(model)
        strategy = self.request.config.strategy
        queue = list(candidates(spec, found, modules, strategy))
        while queue and self.evaluations < MAX_EVALUATIONS:
            spec = queue.pop(0)
            if spec in tried:
                continue
            tried.append(spec)
            result = diagnose(alone, self.on_ranks(spec=spec), self.request.dtype)
            if result.passed:
                return spec
            if result.progress > found.progress:
                found, queue = result, [*candidates(spec, result, modules, strategy), *queue]
        return None

    def _reach(self, alone: Observation) -> float | None:
        """Return a larger cutoff with which the ranks agree with one process, if there is one."""
        for factor in _REACHES:
            cutoff = factor * alone.cutoff
            config = dataclasses.replace(self.request.config, cutoff=cutoff)
            result = diagnose(alone, self.on_ranks(config=config), self.request.dtype)
            if result.passed:
                return cutoff
        return None

    def _make(
        self,
        dtype: str,
        alone: Observation | None,
        outcome: Outcome,
        found: Diagnosis,
        working: MLIPSpec | None,
        reach: float | None,
    ) -> ValidationReport:
        given = self.request.spec or (alone.spec if alone is not None else None)
        fixes = fixes_between(given, working) if given is not None and working is not None else ()
        ranks = outcome.ranks
        report = ValidationReport(
            model=self.request.source.name,
            ranks=self.n_ranks,
            strategy=self.request.config.strategy.value,
            dtype=dtype,
            device=self.device,
            n_rows=len(self.request.batch),
            n_edges=0 if alone is None else int(alone.edges.shape[1]),
            passed=found.passed,
            cause=found.cause if reach is None else Cause.MISSING_GHOSTS,
            place=found.place or (place_in_traceback(outcome.error.trace) if outcome.error else None),
            outputs=found.outputs,
            divergence=found.divergence,
            missing=found.missing,
            helpers=found.helpers,
            scripted=found.scripted,
            handlers=_handlers(ranks),
            traffic=_traffic(ranks),
            adapters=tuple(ranks[0].adapters) if ranks else (),
            error=outcome.error,
            fixes=fixes,
            spec=working,
            reach=reach,
            evaluations=self.evaluations,
            warning=self.untried or _warning(alone, ranks, self.request.config.strategy),
            next_action="",
        )
        return dataclasses.replace(report, next_action=next_action(report))


_FAILED_ALONE = Diagnosis(False, Cause.REFERENCE, None, (), None, (), (), (), {}, (0, 0, 0))


def _warning(alone: Observation | None, ranks: Sequence[Observation], strategy: StrategyKind) -> str:
    if alone is None or not ranks:
        return ""
    lacking = min(rank.n_global - len(rank.ids) for rank in ranks)
    if strategy is StrategyKind.GRAPH_PARTITION:  # which gives every rank all rows
        lacking = 1
    return warning(alone.cutoff, alone.edges.shape[1], lacking, len(ranks))


def _may_lack_rows(found: Diagnosis, strategy: StrategyKind) -> bool:
    if found.cause is Cause.STALE_GHOSTS:
        return (
            strategy is StrategyKind.WIDE_HALO
        )  # there ghosts are computed, and a deeper halo could be the answer
    return found.cause in (Cause.UNKNOWN, Cause.WRONG_SCATTER)


def _spec_may_help(error: RankError | None) -> bool:
    """Tell whether a spec could mend an error: one of nvdd's own that is no loss of contact and no time-out."""
    kind = None if error is None else getattr(errors, error.type, DistributedError)
    return kind is None or not issubclass(kind, DistributedError)


def _error(exc: BaseException) -> RankError:
    notes = "\n".join(getattr(exc, "__notes__", ()))  # the traceback of the rank
    told = error_text(exc) if isinstance(exc, Exception) else wanted_end(exc)
    return RankError(type(exc).__name__, told, notes or "".join(traceback.format_exception(exc)))


def _handlers(ranks: Sequence[Observation]) -> tuple[HandlerCount, ...]:
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for op, handler, n_bytes in (record for rank in ranks for record in rank.handlers):
        calls[op, handler] += 1
        sent[op, handler] += n_bytes
    return tuple(
        HandlerCount(op, handler, n, sent[op, handler]) for (op, handler), n in sorted(calls.items())
    )


def _traffic(ranks: Sequence[Observation]) -> tuple[Traffic, ...]:
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for rank in ranks:
        calls.update(rank.calls)
        sent.update(rank.bytes)
    return tuple(Traffic(kind, n, sent[kind]) for kind, n in sorted(calls.items()))
