"""The table of handlers: which code runs for an operation on a ShardTensor.

`Handler` is a name, a predicate and the code; `HandlerRegistry` keeps, for each operation, an ordered tuple
of them. The first whose predicate holds runs; when none does, the operation runs on the rows as on a plain
tensor. `REGISTRY` is the table that ShardTensor consults.

Invariants: looking up an operation without handlers costs one dictionary access; tuples are replaced, never
changed, so a thread that dispatches sees a whole table while another registers; predicates are free of
collectives and give the same answer on every rank.
Layer: tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Op = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Handler:
    """Code that takes the place of an operation where its predicate holds.

    Attributes
    ----------
    name : str
        Shown by the dispatch trace.
    predicate : callable (func, args, kwargs) -> bool
        Whether this handler serves the call; it must not communicate.
    run : callable (func, args, kwargs) -> result
        The replacement. ShardTensor dispatch is off while it runs, so that it sees plain rows; it tags what
        it returns itself.
    """

    name: str
    predicate: Callable[[Op, Args, Kwargs], bool]
    run: Callable[[Op, Args, Kwargs], Any]


@dataclass(frozen=True)
class Registration:
    """A handler's places in a registry; `remove` takes it out of all of them."""

    registry: HandlerRegistry
    ops: tuple[Op, ...]
    handler: Handler

    def remove(self) -> None:
        """Undo the registration; a second call does nothing."""
        self.registry.unregister(self.ops, self.handler)


class HandlerRegistry:
    """Ordered handlers by operation."""

    def __init__(self) -> None:
        self._table: dict[Op, tuple[Handler, ...]] = {}
        self._lock = threading.Lock()

    def register(self, ops: Op | Iterable[Op], handler: Handler, *, first: bool = False) -> Registration:
        """Add `handler` for one operation or several.

        Parameters
        ----------
        ops : callable or iterable of callables
            Operations as ``__torch_function__`` names them: functions of `torch`, methods of `torch.Tensor`,
            op packets and op overloads.
        handler : Handler
        first : bool
            Ask this handler before the present ones instead of after them.

        Returns
        -------
        Registration
            Takes the handler out again.

        Raises
        ------
        ValueError
            When the same handler is already there for one of the operations.
        """
        chosen = (ops,) if callable(ops) else tuple(ops)
        with self._lock:
            for op in chosen:
                if any(h is handler for h in self._table.get(op, ())):
                    raise ValueError(f"handler {handler.name!r} is already registered for {op!r}")
            for op in chosen:
                present = self._table.get(op, ())
                self._table[op] = (handler, *present) if first else (*present, handler)
        return Registration(self, chosen, handler)

    def unregister(self, ops: Iterable[Op], handler: Handler) -> None:
        """Remove `handler` from `ops`, wherever it still is."""
        with self._lock:
            for op in ops:
                left = tuple(h for h in self._table.get(op, ()) if h is not handler)
                if left:
                    self._table[op] = left
                else:
                    self._table.pop(op, None)

    def handlers(self, op: Op) -> tuple[Handler, ...]:
        """Return the handlers of `op` in the order in which they are asked."""
        return self._table.get(op, ())

    def match(self, op: Op, args: Args, kwargs: Kwargs) -> Handler | None:
        """Return the handler that serves this call, None when the operation runs as it is."""
        for handler in self._table.get(op, ()):
            if handler.predicate(op, args, kwargs):
                return handler
        return None

    def ops(self) -> tuple[Op, ...]:
        """Return every operation that has handlers."""
        return tuple(self._table)


REGISTRY = HandlerRegistry()
