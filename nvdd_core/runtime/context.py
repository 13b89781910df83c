"""The live distributed context, and the verbs with which a model names communication by intent.

Inside a distributed evaluation `current_dd_context` tells how local rows are laid out; outside it is a context of
one rank, where every verb is the identity or a plain sum. So one model body runs in both.

Invariant: verbs are collective inside a run; every rank calls them in the same order, also without rows.
Layer: runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from nvdd_core.comm import HaloPlan, Mesh, all_reduce_sum_symmetric
from nvdd_core.errors import DistributedError, InputError
from nvdd_core.spec import ScatterMode, StrategyKind
from nvdd_core.tensor import RowScope, ShardTensor
from nvdd_core.tensor.exchanges import exchanged


class Scope(Enum):
    """How far `system_sum` sums."""

    OWNED = "owned"  # owned rows of all ranks: the whole system's value, on every rank
    LOCAL = "local"  # owned rows of this rank: a partial that the framework completes


_NO_ROWS = RowScope()


@dataclass(frozen=True)
class DomainContext:
    """Layout of the rows in the evaluation under way.

    Attributes
    ----------
    is_distributed : bool
        False outside a run and on a mesh of one rank.
    mesh : Mesh or None
    plan : HaloPlan or None
    strategy : StrategyKind
    scatter : ScatterMode
        What the handlers do after a scatter into local rows.
    rows : RowScope
        What a ShardTensor of local rows is made with.
    may_move : float
        How far (Angstrom) a row may be from where it was when the neighbour list was made; results with one further
        away are thrown away.
    padded : bool
        Whether there are rows and edges that stand for none, so that their numbers stay (`CompilePolicy.pads`).
    """

    is_distributed: bool = False
    mesh: Mesh | None = None
    plan: HaloPlan | None = None
    strategy: StrategyKind = StrategyKind.HALO
    scatter: ScatterMode = ScatterMode.LOCAL
    rows: RowScope = _NO_ROWS
    may_move: float = 0.0
    padded: bool = False

    @property
    def n_owned(self) -> int | None:
        """Rows this rank owns, or None outside a run."""
        return None if self.plan is None else self.plan.n_owned

    @property
    def exchanges(self) -> bool:
        """Whether ghost rows are filled by exchange (a wide halo computes them instead)."""
        return self.is_distributed and self.strategy is not StrategyKind.WIDE_HALO


_NONE = DomainContext()
# One a process, not one a thread: autograd runs the backward pass of a GPU in a thread of its own.
_LIVE: list[DomainContext] = [_NONE]
_KEPT: list[bool] = []


def current_dd_context() -> DomainContext:
    """Return the context of the evaluation under way, or one that is not distributed.

    Raises
    ------
    DistributedError
        When a layer runs again for its gradient (``torch.utils.checkpoint``) although the evaluation over several
        ranks that kept its graph is over, so that ghosts would stay stale.
    """
    if _LIVE[-1] is _NONE and _KEPT and torch._C._current_graph_task_id() >= 0:
        raise DistributedError(
            "a checkpointed layer runs again for its gradient after the evaluation is over: differentiate inside "
            "`with model.differentiating(sharded):`"
        )
    return _LIVE[-1]


def keep_graphs() -> None:
    """Note that an evaluation over several ranks has handed out a graph."""
    if not _KEPT:
        _KEPT.append(True)


@contextmanager
def enter_context(context: DomainContext) -> Iterator[DomainContext]:
    """Make `context` current for the body."""
    _LIVE.append(context)
    try:
        yield context
    finally:
        _LIVE.pop()


def to_local(x: Any) -> Any:
    """Return the plain tensor of local rows behind a ShardTensor, and anything else as it is."""
    return x.to_local() if isinstance(x, ShardTensor) else x


def localize(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a model's inputs in which no value is a ShardTensor, for a kernel that must not see one."""
    return {name: to_local(value) for name, value in data.items()}


def autograd_target(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor to differentiate with respect to, for a model that takes derivatives itself.

    Results depend on what the model was handed, not on views made of it on the way: a gradient with respect to
    ``to_local(x)`` is None where the model used ``x``. The gradient covers local rows. On ghosts it is a share of
    what belongs to their owners: return it with all local rows and declare ``OutputSpec(PER_NODE, ALL_REDUCE)``.

    Parameters
    ----------
    x : Tensor, shape (n_local, *F)
        As the model was handed it; where no gradient is recorded for it yet, recording begins.

    Raises
    ------
    InputError
        When gradients are switched off, so that nothing would be recorded.
    """
    if not torch.is_grad_enabled():
        raise InputError(
            "autograd_target was called where gradients are off; wrap forward in torch.enable_grad()"
        )
    return x if x.requires_grad else x.requires_grad_(True)


def distributed_method(body: Callable[..., Any]) -> Callable[..., Any]:
    """Make `body` the replacement of a method that differs from the original in a distributed run only.

    Parameters
    ----------
    body : callable
        Called as ``body(context, original, instance, *args, **kwargs)`` in an evaluation over several ranks.

    Returns
    -------
    callable
        ``(original, instance, *args, **kwargs)``, as `nvdd_core.adapters.MethodAdapter` takes it; anywhere else it
        runs the original.
    """

    @functools.wraps(body)
    def replacement(original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_dd_context()
        if not context.is_distributed:
            return original(instance, *args, **kwargs)
        return body(context, original, instance, *args, **kwargs)

    return replacement


def refresh_neighbors(x: torch.Tensor) -> torch.Tensor:
    """Give ghost rows their owners' current values.

    Parameters
    ----------
    x : Tensor, shape (n_local, *F) or (n_owned, *F)
        Owned rows first; ghost rows, if there are any, are overwritten.

    Returns
    -------
    Tensor, shape (n_local, *F)
        Differentiable: gradients on ghost rows are summed into their owners.
    """
    context = current_dd_context()
    if context.plan is None or not context.exchanges:
        if context.plan is not None and x.shape[0] != context.plan.n_local:
            raise InputError(
                f"refresh_neighbors got {x.shape[0]} rows where nothing is exchanged (wide halo or one rank): "
                f"compute all {context.plan.n_local} local rows there, not only the {context.plan.n_owned} owned ones"
            )
        return x
    return exchanged(context.plan.forward, to_local(x)[: context.plan.n_owned])


def scatter_to_owners(x: torch.Tensor) -> torch.Tensor:
    """Sum what was written into ghost rows into their owners, and refresh the ghosts.

    Parameters
    ----------
    x : Tensor, shape (n_local, *F)
        This rank's partial sums, in owned and ghost rows.

    Returns
    -------
    Tensor, shape (n_local, *F)
    """
    context = current_dd_context()
    if context.plan is None or not context.exchanges:
        return x
    return exchanged(context.plan.correct, to_local(x))


def system_sum(
    values: torch.Tensor, system: torch.Tensor, n_systems: int, scope: Scope = Scope.OWNED
) -> torch.Tensor:
    """Sum owned rows by system.

    Parameters
    ----------
    values : Tensor, shape (rows, *F)
        Owned rows first; ghost rows are ignored.
    system : Tensor, shape (rows,), int64
    n_systems : int
    scope : Scope
        OWNED: the whole system's sum on every rank. LOCAL: this rank's share.

    Returns
    -------
    Tensor, shape (n_systems, *F)
    """
    context = current_dd_context()
    values, system = to_local(values), to_local(system)
    if context.plan is not None:
        values, system = values[: context.plan.n_owned], system[: context.plan.n_owned]
    out = values.new_zeros((n_systems, *values.shape[1:])).index_add(0, system, values)
    mesh = context.mesh
    if scope is Scope.LOCAL or not context.is_distributed or mesh is None:
        return out
    return exchanged(lambda share: all_reduce_sum_symmetric(share, mesh), out)
