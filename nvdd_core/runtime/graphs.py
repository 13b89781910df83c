"""CUDA graphs of evaluations, and the memory that they share.

Key object: `GraphPool`. Graphs of one pool may be replayed in any order, one at a time.

Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")

# torch goes on asking graphs whose capture failed, so these must live as long as the process.
_FAILED: list[object] = []


class GraphPool:
    """Captures what a function does on a GPU.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Memory stays with a pool as long as one graph of it is there: one that is never replayed.
        self._first = torch.cuda.CUDAGraph()
        self._pool: Any = None
        self._held = self._record(self._first, lambda: torch.zeros(1, device=device))
        self._pool = self._first.pool()

    def capture(self, evaluate: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return a graph of `evaluate`, and what it gave: a replay writes there.

        Raises
        ------
        RuntimeError
            When it did what can't be captured, and whatever `evaluate` raises; nothing was computed then.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            return graph, self._record(graph, evaluate)
        except BaseException:
            _FAILED.append((graph, self._first, self._held))
            raise

    def _record(self, graph: torch.cuda.CUDAGraph, evaluate: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            try:
                # threads of NCCL ask for events meanwhile, which a capture has to forbid its own thread only
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                found = evaluate()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        current.wait_stream(self._stream)
        return found

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed: torch raises once more, and then leaves its pool of memory open."""
        with suppress(RuntimeError):
            graph.capture_end()
        if self._pool is not None:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, cast(Any, self._pool))
