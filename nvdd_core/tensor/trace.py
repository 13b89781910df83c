"""A record of what the dispatch did: which operation met which handler, and what was sent.

Use `DispatchTrace` as a context manager around a forward pass and read `records` or print `table()`. Tracing
is per thread and per context; without a trace the dispatch pays one look at a context variable.

Layer: tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from torch.overrides import resolve_name

PLAIN = "plain"
"""Handler name of operations that ran on the rows as they are."""

_ACTIVE: ContextVar[DispatchTrace | None] = ContextVar("nvdd_dispatch_trace", default=None)


@dataclass(frozen=True)
class DispatchRecord:
    """One operation on a ShardTensor.

    Attributes
    ----------
    op : str
        The operation's name, such as ``torch.Tensor.index_add_``.
    handler : str
        Name of the handler that ran, or ``"plain"``.
    moved : mapping of str to int
        Bytes that this rank sent, by kind of collective; a collective that sent nothing is there with 0.
    """

    op: str
    handler: str
    moved: Mapping[str, int]


class DispatchTrace:
    """Collects a `DispatchRecord` for each operation on a ShardTensor in its scope.

    Attributes
    ----------
    records : list of DispatchRecord
        In the order in which the operations began.
    """

    def __init__(self) -> None:
        self.records: list[DispatchRecord] = []
        self._token: Token[DispatchTrace | None] | None = None

    def __enter__(self) -> DispatchTrace:
        if self._token is not None:
            raise RuntimeError(
                "this dispatch trace is already recording; make another one for a nested scope"
            )
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            _ACTIVE.reset(self._token)
            self._token = None

    @property
    def handled(self) -> list[DispatchRecord]:
        """The records of operations that a handler took over."""
        return [r for r in self.records if r.handler != PLAIN]

    def counts(self) -> Counter[tuple[str, str]]:
        """Count calls by operation and handler."""
        return Counter((r.op, r.handler) for r in self.records)

    def table(self) -> str:
        """Return a text table of calls and sent bytes by operation and handler."""
        moved: Counter[tuple[str, str]] = Counter()
        for r in self.records:
            moved[r.op, r.handler] += sum(r.moved.values())
        rows = [
            (op, handler, str(n), str(moved[op, handler]))
            for (op, handler), n in sorted(self.counts().items())
        ]
        head = ("operation", "handler", "calls", "bytes sent")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [head, *rows]
        ]
        return "\n".join(line.rstrip() for line in lines)


def active_trace() -> DispatchTrace | None:
    """Return the trace that records here, if any."""
    return _ACTIVE.get()


def op_name(func: Any) -> str:
    """Return a readable name of an operation as ``__torch_function__`` gives it."""
    name = resolve_name(func)
    return name if name else str(func)
