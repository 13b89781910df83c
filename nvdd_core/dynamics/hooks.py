"""What happens beside the steps of a run: logging, writing, checkpoints, a user's own measurements.

A hook is a callable with `every` (steps between calls) and `scope` (which ranks call it and what it may
do). The runner hands it a `HookContext`; `run_hooks` decides who is called. `FinalHook` adds
`finish` for the last step of a run, `ManagedHook` adds `close` for hooks that hold a file, `RestartHook` marks those
that save what a restart begins with.

Invariant: whether a hook is called depends on the step, its `every` and its `scope` only, so all ranks
decide alike and a GLOBAL hook may communicate.
Layer: dynamics.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics.state import MDState
from nvdd_core.errors import InputError


class HookScope(enum.Enum):
    """Which ranks call a hook, and what it may do there."""

    LOCAL = "local"
    """Every rank, on its own rows, without collectives."""
    GLOBAL = "global"
    """Every rank, together: collectives are allowed, and all ranks must make the same ones."""
    RANK_ZERO = "rank_zero"
    """Rank 0 only, without collectives: for what needs `HookContext.info` alone."""


@dataclass(frozen=True)
class StepInfo:
    """Numbers of the whole system after a step, equal on all ranks.

    Attributes
    ----------
    step : int
        Completed steps.
    time_fs : float
        Simulated time in fs.
    energy : float
        Potential energy in eV.
    kinetic : float
        Kinetic energy in eV.
    temperature : float
        K.
    pressure_gpa : float or None
        Pressure in GPa where the stress was computed.
    extra : Mapping[str, float]
        Further columns of the log, the same names at every step.
    """

    step: int
    time_fs: float
    energy: float
    kinetic: float
    temperature: float
    pressure_gpa: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Potential and kinetic energy in eV."""
        return self.energy + self.kinetic


class SystemView(Protocol):
    """What hooks read of a `runtime.ShardedBatch`; its per-row tensors are aligned with the state's."""

    @property
    def numbers(self) -> torch.Tensor:
        """Atomic numbers, shape (n,), int64."""

    @property
    def system(self) -> torch.Tensor:
        """System of each row, shape (n,), int64."""

    @property
    def cell(self) -> torch.Tensor:
        """Cells, shape (S, 3, 3), float64, A."""

    @property
    def pbc(self) -> torch.Tensor:
        """Periodic directions, shape (S, 3), bool."""

    @property
    def fields(self) -> Mapping[str, torch.Tensor]:
        """Further per-row data."""

    @property
    def n_global(self) -> int:
        """Rows of the whole system, over all ranks."""


@dataclass(frozen=True)
class HookContext:
    """What a hook may read after a step.

    Attributes
    ----------
    step : int
        Completed steps.
    sharded : SystemView
        Numbers, cell and further fields of this rank's rows, in the order of `state`.
    state : MDState
        Positions, velocities and forces of this rank's rows.
    info : StepInfo
        Numbers of the whole system.
    mesh : Mesh
        The group of ranks.
    """

    step: int
    sharded: SystemView
    state: MDState
    info: StepInfo
    mesh: Mesh


class Hook(Protocol):
    """A callable that the runner calls at step 0 and after every `every` steps.

    It may change the cell, the same on all ranks: from the next step on the run uses it. Nothing else of what it
    sees is meant to be changed.
    """

    @property
    def every(self) -> int:
        """Steps between two calls, one or more."""

    @property
    def scope(self) -> HookScope:
        """Which ranks call it."""

    def __call__(self, ctx: HookContext) -> None:
        """Do the work after the step `ctx.step`."""


@runtime_checkable
class ManagedHook(Hook, Protocol):
    """A hook that holds something to be released at the end of a run, however it ends."""

    def close(self) -> None:
        """Release it; calling twice is harmless."""


@runtime_checkable
class FinalHook(Hook, Protocol):
    """A hook that must see the last step of a run whether or not it is due then, as a checkpoint must."""

    def finish(self, ctx: HookContext) -> None:
        """Do what is left after the last step, on the ranks of `scope`, and nothing if that was done."""


@runtime_checkable
class RestartHook(Hook, Protocol):
    """A hook that saves what a restart begins with.

    After it the run goes on as that restart will, from a domain made of nothing but the rows, so that both give the
    same bits.
    """

    @property
    def begins_anew(self) -> bool:
        """Whether it is one."""


def check_every(every: int, what: str) -> int:
    """Return `every` if it is a number of steps that a hook can have.

    Raises
    ------
    InputError
        If it is below 1.
    """
    if every < 1:
        raise InputError(f"{what}: 'every' is {every}; it is a number of steps and must be 1 or more")
    return every


def is_due(hook: Hook, step: int) -> bool:
    """Return whether `hook` is to be called after `step`; the same answer on all ranks."""
    return step % hook.every == 0


def any_due(hooks: Iterable[Hook], step: int) -> bool:
    """Return whether any hook is due, so that the runner has to measure; the same answer on all ranks."""
    return any(is_due(hook, step) for hook in hooks)


def any_begins_anew(hooks: Iterable[Hook], step: int) -> bool:
    """Return whether a restart may begin with what a hook saved after `step`; the same answer on all ranks."""
    return any(isinstance(hook, RestartHook) and hook.begins_anew and is_due(hook, step) for hook in hooks)


def run_hooks(hooks: Iterable[Hook], ctx: HookContext) -> None:
    """Call the hooks that are due after `ctx.step` on this rank (collective where one has GLOBAL scope)."""
    for hook in hooks:
        if is_due(hook, ctx.step) and (hook.scope is not HookScope.RANK_ZERO or ctx.mesh.rank == 0):
            hook(ctx)


def finish_hooks(hooks: Iterable[Hook], ctx: HookContext) -> None:
    """Call `finish` of every `FinalHook` after the last step (collective where one has GLOBAL scope)."""
    for hook in hooks:
        if isinstance(hook, FinalHook) and (hook.scope is not HookScope.RANK_ZERO or ctx.mesh.rank == 0):
            hook.finish(ctx)


def close_hooks(hooks: Iterable[Hook]) -> None:
    """Close every `ManagedHook`, each even if another one fails; then raise the first failure."""
    failure: Exception | None = None
    for hook in hooks:
        if isinstance(hook, ManagedHook):
            try:
                hook.close()
            except Exception as exc:
                failure = failure or exc
    if failure is not None:
        raise failure
