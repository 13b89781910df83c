"""Evaluations between two rebuilds, whose shapes stay: on a GPU they are captured once and replayed.

From the second evaluation of a domain on, positions of local rows are brought into tensors that stay in place
(`Steady.update`), before the evaluation and outside of it; from the first one on, where tensors of the domain before
have room. What follows reads these and nothing else that changes, so
a CUDA graph of it can be replayed: the hundreds of launches of a small system then cost the host one.

A capture costs the host what an evaluation costs it, and memory of its own. So in the mode ``auto`` evaluations are
captured only where the host was seen to be what takes the time, and where memory is plentiful; the ranks agree on it.
A model says by `CompilePolicy.capture` that it can be captured. Where a capture fails nevertheless, the run goes on
without.

Invariant: every rank takes the same way; only whether it replays or evaluates may differ, which peers don't see.
Layer: runtime.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from nvdd_core.comm import CommTally, Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime.domain import Domain
from nvdd_core.runtime.graphs import GraphPool
from nvdd_core.runtime.outputs import OUTPUTS, Partial
from nvdd_core.runtime.padded import PaddedDomain
from nvdd_core.runtime.timer import PhaseTimer
from nvdd_core.spec import CompilePolicy

CAPTURE_MODES = ("auto", "on", "off")

# The host takes the time where launching takes more than this part of what the device took in all. Where one capture
# serves domain after domain it pays earlier: after a rebuild or a vote the device waits for what is launched.
_LAUNCH_BOUND, _LAUNCH_BOUND_PADDED = 0.9, 0.5
# Captured evaluations keep memory of their own beside that of others.
_MOST_MEMORY = 0.4

Evaluate = Callable[[Domain, torch.Tensor], Partial]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    partial: Partial
    tally: CommTally


class Steady:
    """The steady evaluations of one run.

    Parameters
    ----------
    mesh : Mesh
    timer : PhaseTimer
    mode : {"auto", "on", "off"}
        Whether evaluations are captured; ``off`` leaves everything as it is outside a run.
    policy : CompilePolicy
        Whether the model says that it can be captured.

    Raises
    ------
    InputError
        When there is no such mode.
    """

    def __init__(self, mesh: Mesh, timer: PhaseTimer, mode: str, policy: CompilePolicy) -> None:
        if mode not in CAPTURE_MODES:
            raise InputError(
                f"capture is {mode!r}; give {', '.join(CAPTURE_MODES[:-1])} or {CAPTURE_MODES[-1]}"
            )
        self.mesh, self.timer, self._pads = mesh, timer, policy.pads
        possible = policy.capture and (mode == "on" or (mode == "auto" and mesh.captures))
        self._captures = possible and mesh.captures
        # None: not known yet; where it is False evaluations are as they are outside a run
        self._launch_bound: bool | None = (True if mode == "on" else None) if possible else False
        self._unsure = self._launch_bound is None
        self._timing: _Timing | None = None
        self._graphs: GraphPool | None = None
        self._captured: dict[frozenset[str], _Captured] = {}
        self._padded: PaddedDomain | None = None
        self._evaluated: set[frozenset[str]] = set()  # what was, in the tensors of the place
        self.begin()

    def begin(self, *, anew: bool = False) -> None:
        """Forget the domain before, since a new one is built; `anew` forgets all that came before it."""
        if anew:
            self._padded = None
            self._evaluated.clear()
        self._place: PaddedDomain | _Still | None = None
        self._updated = False
        self._last: frozenset[str] | None = None
        if self._padded is None:
            self._captured.clear()
        if self._unsure and not self._launch_bound:
            self._launch_bound, self._timing = None, None

    def update(self, domain: Domain, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Bring local rows to `positions` (n_owned, 3) for the next evaluation (collective).

        Returns
        -------
        Tensor, shape (), or None
            Above zero if more edges have come within the cutoff than there was room for; None where that can't be, and
            before there are steady evaluations.
        """
        if not self._launch_bound or (self._last is None and self._place is None):
            return None
        place = self._place = self._place or self._settled(domain, dtype)
        self._updated = True
        return place.move((positions - domain.offset).to(dtype))

    def _resume(self, domain: Domain, positions: torch.Tensor, dtype: torch.dtype) -> None:
        """Go on in the tensors of the domain before, if there are some and they have room on every rank (collective).

        Without them the first evaluation of a domain is like any other, and tells how many edges there are.
        """
        padded = self._padded
        if padded is None or not self._launch_bound:
            return
        local = domain.plan.forward((positions - domain.offset).to(dtype))
        domain.near.count(padded.domain.near, local, domain.box.cell.to(dtype), domain.system)
        if self._all_fit(padded, domain):
            padded.load(domain)
            self._place = padded

    def _all_fit(self, padded: PaddedDomain, domain: Domain) -> bool:
        return all(n for (n,) in self.mesh.all_gather_ints([int(padded.fits(domain))]))

    def _settled(self, domain: Domain, dtype: torch.dtype) -> PaddedDomain | _Still:
        """Return new tensors for positions (collective)."""
        if not self._pads:
            return _Still(domain, dtype)
        self._captured.clear()
        self._evaluated.clear()
        self._padded = PaddedDomain(domain, self.mesh, dtype, self._padded)
        self._padded.load(domain)
        return self._padded

    def compute(
        self,
        domain: Domain,
        positions: torch.Tensor,
        dtype: torch.dtype,
        wanted: frozenset[str],
        evaluate: Evaluate,
    ) -> Partial:
        """Return what ``evaluate(domain, local positions)`` gives of `wanted` (collective)."""
        first, repeated = self._last is None, wanted == self._last
        if repeated:
            self._decide()
        if first:
            self._resume(domain, positions, dtype)
        if not self._updated:
            self.update(domain, positions, dtype)
        self._updated, self._last, place = False, wanted, self._place
        if place is None or (self._pads and wanted - frozenset(OUTPUTS)):
            with nullcontext() if first else self._timed():
                with self.timer.phase("exchange"):
                    local = domain.plan.forward((positions - domain.offset).to(dtype))
                return evaluate(domain, local)
        # before a capture kernels must have been chosen, and what is kept made
        ready = wanted in self._evaluated if self._pads else repeated
        if self._captures and wanted not in self._captured and ready:
            self._capture(wanted, lambda: evaluate(place.domain, place.local))
        if wanted in self._captured:
            return _own(self._replayed(self._captured[wanted]), domain.plan.n_owned, copy=True)
        self._evaluated.add(wanted)
        return _own(evaluate(place.domain, place.local), domain.plan.n_owned)

    def _timed(self) -> AbstractContextManager[None]:
        """Time an evaluation where it isn't known yet what takes the time; the first of a domain does more."""
        if self._launch_bound is not None:
            return nullcontext()
        self._timing = _Timing()
        return self._timing

    def _decide(self) -> None:
        """Agree on whether evaluations are to be captured, once one was timed (collective)."""
        if self._launch_bound is None and self._timing is not None:
            limit = _LAUNCH_BOUND_PADDED if self._pads else _LAUNCH_BOUND
            mine = [int(self._timing.launch_bound(limit)), int(_plenty_of_memory(self.mesh.device))]
            told = self.mesh.all_gather_ints(mine)  # one slow host holds up all
            self._launch_bound = any(bound for bound, _ in told) and all(room for _, room in told)

    def _capture(self, wanted: frozenset[str], evaluate: Callable[[], Partial]) -> None:
        """Capture an evaluation; where that can't be done, say so and don't try again."""
        counter, before = self.mesh.counter, self.mesh.counter.snapshot()
        try:
            self._graphs = self._graphs or GraphPool(self.mesh.device)
            graph, partial = self._graphs.capture(evaluate)
        except Exception as error:  # what is the model's own the evaluation that follows raises again
            self._captures = False
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"rank {self.mesh.rank}: an evaluation could not be captured in a CUDA graph ({first}); the run goes "
                "on without, at the cost of its launches",
                stacklevel=2,
            )
        else:
            self._captured[wanted] = _Captured(graph, partial, counter.since(before))
        counter.restore(before)

    def _replayed(self, captured: _Captured) -> Partial:
        with self.timer.phase("model"):
            captured.graph.replay()
        self.mesh.counter.add_tally(captured.tally)
        return captured.partial


class _Still:
    """A domain with positions that stay in place until the next rebuild."""

    def __init__(self, domain: Domain, dtype: torch.dtype) -> None:
        self.domain = domain
        self.local = torch.zeros((domain.plan.n_local, 3), dtype=dtype, device=domain.ids.device)

    def move(self, owned: torch.Tensor) -> None:
        """Bring rows to the positions `owned` (n_owned, 3) (collective)."""
        self.local.copy_(self.domain.plan.forward(owned))


def _own(partial: Partial, n_owned: int, *, copy: bool = False) -> Partial:
    """Return a share without rows that stand for none; a copy of what the next replay writes into."""

    def own(t: torch.Tensor | None, *, rows: bool = True) -> torch.Tensor | None:
        if t is None:
            return None
        t = t[:n_owned] if rows else t
        return t.clone() if copy else t

    return replace(
        partial,
        energy=own(partial.energy, rows=False),
        forces=own(partial.forces),
        virial=own(partial.virial, rows=False),
        node_energy=own(partial.node_energy),
        node_virial=own(partial.node_virial),
        extra={name: t.clone() if copy else t for name, t in partial.extra.items()},
    )


class _Timing(AbstractContextManager[None]):
    """Seconds that the host took for an evaluation, and those that the device took; waits for nothing by itself."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._host = 0.0

    def __enter__(self) -> None:
        self._begin.record()
        self._host = -time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._host += time.perf_counter()
        self._end.record()

    def launch_bound(self, limit: float) -> bool:
        """Compare the two (waits for the evaluation)."""
        self._end.synchronize()
        device = 1e-3 * float(self._begin.elapsed_time(self._end))
        return self._host > limit * device


def obstacle(mesh: Mesh, policy: CompilePolicy) -> str | None:
    """Return why nothing can be captured here, or None."""
    if mesh.device.type != "cuda":
        return "there is no GPU"
    if not policy.capture:
        return "the model does not declare that it can be (CompilePolicy.capture)"
    return (
        None
        if mesh.captures
        else "its collectives can't be: they are not NCCL's, or NCCL_GRAPH_REGISTER is not 0"
    )


def _plenty_of_memory(device: torch.device) -> bool:
    _, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device) < _MOST_MEMORY * total
