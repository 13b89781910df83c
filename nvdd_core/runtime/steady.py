"""Evaluations between two rebuilds, whose shapes stay: on a GPU they are captured once and replayed.

From the second evaluation of a domain on, positions of local rows are brought into tensors that stay in place
(`Steady.update`), before the evaluation and outside of it. What follows reads these and nothing else that changes, so
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
from dataclasses import dataclass, replace

import torch

from nvdd_core.comm import CommTally, Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime.domain import Domain
from nvdd_core.runtime.near_edges import NearEdges
from nvdd_core.runtime.outputs import Partial
from nvdd_core.runtime.sharded import Contents

CAPTURE_MODES = ("auto", "on", "off")

# The host takes the time where launching takes more than this part of what the device took in all.
_LAUNCH_BOUND = 0.8
# Captured evaluations keep memory of their own beside that of others.
_MOST_MEMORY = 0.4

Evaluate = Callable[[torch.Tensor], Partial]


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
    mode : {"auto", "on", "off"}
        Whether evaluations are captured; ``off`` leaves everything as it is outside a run.
    capturable : bool
        Whether the model says that it can be captured.

    Raises
    ------
    InputError
        When there is no such mode.
    """

    def __init__(self, mesh: Mesh, mode: str, *, capturable: bool) -> None:
        if mode not in CAPTURE_MODES:
            raise InputError(f"capture is {mode!r}; give {', '.join(CAPTURE_MODES[:-1])} or {CAPTURE_MODES[-1]}")
        self.mesh = mesh
        self._always = mode == "on"
        self._fixed = mode == "on" or (mode == "auto" and mesh.device.type == "cuda")
        self._captures = capturable and mode != "off" and mesh.captures
        self._launch_bound: bool | None = True if self._always else None
        self._timing: _Timing | None = None
        self._pool = torch.cuda.MemPool() if self._captures else None
        self._stream = torch.cuda.Stream(mesh.device) if self._captures else None
        self.begin()

    def begin(self) -> None:
        """Forget the domain before: a new one has been built."""
        self.near = NearEdges()
        self._local: torch.Tensor | None = None
        self._seen: Contents | None = None
        self._missing: torch.Tensor | None = None
        self._captured: dict[frozenset[str], _Captured] = {}
        self._last: frozenset[str] | None = None
        if not self._launch_bound:
            self._launch_bound, self._timing = None, None

    def update(self, domain: Domain, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Bring local rows to `positions` (n_owned, 3) (collective).

        Returns
        -------
        Tensor, shape (), or None
            Above zero if more edges have come within the cutoff than there was room for. None before there are steady
            evaluations: the first of a domain is like any other.
        """
        if self._last is None or not self._fixed:
            return None
        if self._seen is not None and self._seen.same(Contents((positions,))):
            return self._missing
        moved = domain.plan.forward((positions - domain.offset).to(dtype))
        if self._local is None:
            self._local = moved.clone()
            self.near.keep()
        else:
            self._local.copy_(moved)
        self._seen = Contents((positions,))
        cell = domain.box.cell.to(dtype)
        self._missing = sum(self.near.refresh(self._local, cell, domain.system), positions.new_zeros(()))
        return self._missing

    def compute(
        self, domain: Domain, positions: torch.Tensor, dtype: torch.dtype, wanted: frozenset[str], evaluate: Evaluate
    ) -> Partial:
        """Return what ``evaluate(local positions)`` gives of `wanted` (collective)."""
        self.update(domain, positions, dtype)
        repeated, self._last = wanted == self._last, wanted
        local = self._local
        if local is None:
            return evaluate(domain.plan.forward((positions - domain.offset).to(dtype)))
        if self._captures and repeated and wanted not in self._captured and self._decided():
            self._capture(wanted, lambda: evaluate(local))
        if wanted in self._captured:
            return self._replayed(self._captured[wanted])
        if self._captures and self._launch_bound is None:
            self._timing = _Timing(self.mesh.device)
            with self._timing:
                return evaluate(local)
        return evaluate(local)

    def _decided(self) -> bool:
        """Tell whether evaluations are to be captured; agreed by all ranks once a measurement is there (collective)."""
        if self._launch_bound is None and self._timing is not None:
            mine = self._timing.launch_bound() and _plenty_of_memory(self.mesh.device)
            told = [flag for (flag,) in self.mesh.all_gather_ints([int(mine)])]
            self._launch_bound = any(told)
        return bool(self._launch_bound)

    def _capture(self, wanted: frozenset[str], evaluate: Callable[[], Partial]) -> None:
        """Capture an evaluation; where that can't be done, say so and don't try again."""
        counter, before = self.mesh.counter, self.mesh.counter.snapshot()
        graph = torch.cuda.CUDAGraph()
        try:
            partial = self._recorded(graph, evaluate)
        except Exception as error:  # whatever it is: the evaluation that follows raises what is the model's own
            counter.restore(before)
            self._captures = False
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"rank {self.mesh.rank}: an evaluation could not be captured in a CUDA graph ({first}); the run goes on "
                "without, at the cost of its launches",
                stacklevel=2,
            )
            return
        tally = counter.since(before)
        counter.restore(before)
        self._captured[wanted] = _Captured(graph, partial, tally)

    def _recorded(self, graph: torch.cuda.CUDAGraph, evaluate: Callable[[], Partial]) -> Partial:
        if self._stream is None or self._pool is None:
            raise InputError("this mesh can't capture")
        current = torch.cuda.current_stream(self.mesh.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # threads of NCCL ask for events meanwhile, which a capture has to forbid its own thread only
            graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
            try:
                partial = evaluate()
            except BaseException:
                self._abandon(graph, self._pool)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return partial

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
        """End a capture that failed."""
        try:
            graph.capture_end()
        except RuntimeError:  # the error once more, and what torch leaves undone then: its pool would stay open
            torch._C._cuda_endAllocateToPool(self.mesh.device.index or 0, pool.id)

    def _replayed(self, captured: _Captured) -> Partial:
        captured.graph.replay()
        self.mesh.counter.add_tally(captured.tally)
        partial = captured.partial  # the next replay writes into it
        return replace(
            partial,
            energy=_copied(partial.energy),
            forces=_copied(partial.forces),
            virial=_copied(partial.virial),
            node_energy=_copied(partial.node_energy),
            node_virial=_copied(partial.node_virial),
            extra={name: t.clone() for name, t in partial.extra.items()},
        )


class _Timing:
    """Seconds that the host took for an evaluation, and those that the device took; waits for nothing by itself."""

    def __init__(self, device: torch.device) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._host = 0.0

    def __enter__(self) -> None:
        self._begin.record()
        self._host = -time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._host += time.perf_counter()
        self._end.record()

    def launch_bound(self) -> bool:
        """Compare the two (waits for the evaluation)."""
        self._end.synchronize()
        return self._host > _LAUNCH_BOUND * 1e-3 * self._begin.elapsed_time(self._end)


def _plenty_of_memory(device: torch.device) -> bool:
    _, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device) < _MOST_MEMORY * total


def _copied(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.clone()
