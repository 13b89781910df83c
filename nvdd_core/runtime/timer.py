"""Seconds per phase of a step.

On a CPU every step is timed. On a GPU timing needs events, so only steps that the caller marks are timed and the
sums are scaled up; no step waits for the device.

Layer: runtime.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("rebuild", "neighbor_list", "exchange", "model", "reduce", "integrate", "write")


class PhaseTimer:
    """Accumulates wall seconds by phase; `phase` may not be nested."""

    def __init__(self, device: torch.device, sample_every: int = 16) -> None:
        self._cuda = device.type == "cuda"
        self._every = sample_every if self._cuda else 1
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._step = 0
        self._sampling = True

    def next_step(self) -> None:
        """Tell that a step begins."""
        self._step += 1
        if len(self._events) > 512:  # all but the newest are long finished
            self._fold(256)
        self._sampling = self._step % self._every == 0 or not self._cuda

    @contextmanager
    def phase(self, name: str, *, rare: bool = False) -> Iterator[None]:
        """Time the body under `name`; `rare` phases (rebuild, write) wait for the device and are never sampled."""
        if self._cuda and not rare:
            # a captured event would belong to the graph
            if not self._sampling or torch.cuda.is_current_stream_capturing():
                yield
                return
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        start = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self._seconds[name] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase so far (waits for the device)."""
        self._fold(len(self._events))
        return dict(self._seconds)

    def _fold(self, count: int) -> None:
        """Add the oldest `count` pairs of events to the sums (waits for the device to have passed them)."""
        for name, begin, end in self._events[:count]:
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) * 1e-3 * self._every
        del self._events[:count]

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds()
        self._seconds = dict.fromkeys(PHASES, 0.0)
