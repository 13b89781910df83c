"""What a user sees while a run goes on: a progress bar in a terminal, plain lines elsewhere.

`ProgressHook` is a hook of rank 0; it writes to standard error and asks for nothing that isn't
measured anyway.

Invariant: it never communicates, and never changes a result. Layer: cli.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nvdd_core.dynamics import HookContext, HookScope, StepInfo
from nvdd_core.dynamics.units import FS_PER_NS, SECONDS_PER_DAY

_LINE_EVERY_S = 5.0


class ProgressHook:
    """Shows steps, steps/s, ns/day, temperature and total energy.

    Parameters
    ----------
    steps : int
        Steps of the run.
    dt : float
        Time step, fs.
    every : int
        Steps between two calls.
    stream : TextIO
        Where to write; a terminal gets a bar, anything else a line every few seconds.
    clock : callable
        Seconds; for tests.
    """

    scope = HookScope.RANK_ZERO

    def __init__(
        self,
        steps: int,
        dt: float,
        every: int,
        stream: TextIO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = max(1, every)
        self._steps, self._dt, self._stream, self._clock = steps, dt, stream, clock
        self._start: tuple[float, int] | None = None
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if stream.isatty():
            self._bar = _bar(stream)
            self._task = self._bar.add_task("", total=steps)

    def __call__(self, ctx: HookContext) -> None:
        """Show the state after ``ctx.step``."""
        now = self._clock()
        if self._start is None:
            self._start = (now, ctx.step)
            if self._bar is not None:
                self._bar.start()
        rate = (ctx.step - self._start[1]) / max(now - self._start[0], 1e-9)
        text = describe(ctx.info, rate, self._dt)
        if self._bar is not None:
            self._bar.update(self._task, completed=ctx.step, description=text)
        elif now - self._last_line >= _LINE_EVERY_S or ctx.step >= self._steps:
            self._last_line = now
            self._stream.write(f"step {ctx.step}/{self._steps}  {text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )


def describe(info: StepInfo, steps_per_s: float, dt: float) -> str:
    """Return speed, temperature and total energy as one line of text."""
    speed = (
        "" if steps_per_s <= 0 else f"{steps_per_s:.1f} steps/s  {ns_per_day(steps_per_s, dt):.3g} ns/day  "
    )
    return f"{speed}T {info.temperature:.1f} K  E {info.total:.6f} eV"


def ns_per_day(steps_per_s: float, dt: float) -> float:
    """Return the simulated nanoseconds per day of wall time; `dt` in fs."""
    return steps_per_s * dt * SECONDS_PER_DAY / FS_PER_NS
