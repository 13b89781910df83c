"""Who is called when, and that everything is closed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import (
    HookContext,
    HookScope,
    ManagedHook,
    any_due,
    close_hooks,
    finish_hooks,
    is_due,
    run_hooks,
)
from nvdd_core.dynamics.hooks import check_every
from nvdd_core.errors import InputError
from tests.dynamics._support import context, info


@dataclass
class Recorder:
    """Remembers the steps it was called at."""

    every: int
    scope: HookScope
    steps: list[int] = field(default_factory=list)

    def __call__(self, ctx: HookContext) -> None:
        self.steps.append(ctx.step)


@dataclass
class Holder(Recorder):
    """A recorder with something to close, or to fail at."""

    fails: bool = False
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("stuck")


def test_every_and_scope() -> None:
    hooks = [Recorder(every, scope) for every in (1, 3) for scope in HookScope]
    base = context()
    for step in range(7):
        run_hooks(hooks, replace(base, step=step))
    for hook in hooks:
        assert hook.steps == list(range(0, 7, hook.every))


def test_rank_zero_hooks_run_on_rank_zero_only() -> None:
    hooks = [Recorder(1, scope) for scope in HookScope]
    mesh = Mesh.single()
    mesh.rank = 1
    run_hooks(hooks, replace(context(), mesh=mesh))
    assert {hook.scope: len(hook.steps) for hook in hooks} == {
        HookScope.LOCAL: 1,
        HookScope.GLOBAL: 1,
        HookScope.RANK_ZERO: 0,
    }


def test_due_is_the_same_on_all_ranks() -> None:
    hook = Recorder(5, HookScope.RANK_ZERO)
    assert [step for step in range(12) if is_due(hook, step)] == [0, 5, 10]
    assert any_due([hook, Recorder(2, HookScope.LOCAL)], 4)
    assert not any_due([hook], 4)
    assert not any_due([], 0)


def test_all_are_closed_and_the_first_failure_is_told() -> None:
    hooks = [Recorder(1, HookScope.LOCAL), Holder(1, HookScope.LOCAL, fails=True), Holder(1, HookScope.LOCAL)]
    assert [isinstance(hook, ManagedHook) for hook in hooks] == [False, True, True]
    with pytest.raises(OSError, match="stuck"):
        close_hooks(hooks)
    assert all(hook.closed for hook in hooks if isinstance(hook, Holder))


@dataclass
class Finisher(Recorder):
    """Remembers the last steps it was shown."""

    last: list[int] = field(default_factory=list)

    def finish(self, ctx: HookContext) -> None:
        self.last.append(ctx.step)


@pytest.mark.parametrize("rank", [0, 1])
def test_finish_follows_the_scope(rank: int) -> None:
    hooks = [Finisher(10, scope) for scope in HookScope]
    mesh = Mesh.single()
    mesh.rank = rank
    finish_hooks([*hooks, Recorder(1, HookScope.LOCAL)], replace(context(), mesh=mesh, step=7))
    assert [hook.last for hook in hooks] == [[7], [7], [7] if rank == 0 else []]
    assert all(hook.steps == [] for hook in hooks)


def test_every_must_be_positive() -> None:
    with pytest.raises(InputError, match="log: 'every' is 0"):
        check_every(0, "log")


def test_total_energy() -> None:
    assert info(3).total == info(3).energy + info(3).kinetic
