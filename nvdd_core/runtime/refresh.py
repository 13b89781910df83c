"""Adapters that refresh ghosts at the boundary of foreign message-passing blocks: `neighbor_refresh_adapters`.

A block of somebody else's library sums messages where no handler can see it, and the next block reads the result on
neighbours. Every edge belongs to the rank that owns its receiver, so the block's owned rows are complete, and ghosts
need their owners' values: one exchange of what the block returns. (Summing ghosts' rows into owners instead would be
right only while they hold zeros, which a bias after the sum is enough to break.)

The replacements are functions of this module by name, ``always_0``, ``needed_1`` and so on, made on demand, so that
adapters with them can be written to JSON.

Layer: runtime.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nvdd_core.adapters import MethodAdapter
from nvdd_core.errors import InputError
from nvdd_core.runtime.context import current_dd_context, refresh_neighbors
from nvdd_core.spec import ScatterMode

_NAME = re.compile(r"(always|needed)_(\d+)")


def neighbor_refresh_adapters(
    modules: Iterable[torch.nn.Module], *, output: int = 0, always: bool = False
) -> tuple[MethodAdapter, ...]:
    """Return one adapter for each ``forward`` in the classes of `modules`, to refresh the ghosts of what it returns.

    Parameters
    ----------
    modules : iterable of Module
        The live blocks, such as ``model.interactions``; leave out the last when nobody reads its result on neighbours,
        if it is of a class of its own.
    output : int
        Which output holds the rows, where a block returns a tuple.
    always : bool
        Refresh under every scatter mode. By default only where handlers don't do it: with ``ScatterMode.LOCAL``.

    Raises
    ------
    InputError
        When a module's class has no ``forward`` of its own.
    """
    classes = dict.fromkeys(type(module) for module in modules)
    for cls in classes:
        if not issubclass(cls, torch.nn.Module) or cls.forward is torch.nn.Module.forward:
            raise InputError(
                f"{cls.__name__} has no forward to adapt: pass the message-passing blocks themselves"
            )
    # where one class inherits its forward from another one here, the other's adapter serves both
    served = [cls for cls in classes if _definer(cls) is cls or _definer(cls) not in classes]
    return tuple(MethodAdapter(cls, "forward", _refresher(output, always)) for cls in served)


def _definer(cls: type) -> type:
    return next(base for base in cls.__mro__ if "forward" in vars(base))


@functools.cache
def _refresher(output: int, always: bool) -> Callable[..., Any]:
    def refresh(original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(instance, *args, **kwargs)
        context = current_dd_context()
        if not context.exchanges or not (always or context.scatter is ScatterMode.LOCAL):
            return result
        if not isinstance(result, tuple):
            return refresh_neighbors(result)
        parts = list(result)
        parts[output] = refresh_neighbors(parts[output])
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)

    refresh.__name__ = refresh.__qualname__ = f"{'always' if always else 'needed'}_{output}"
    return refresh


def __getattr__(name: str) -> Callable[..., Any]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _refresher(int(found[2]), found[1] == "always")
