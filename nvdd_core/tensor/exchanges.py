"""Tells whoever drives an evaluation which exchanges its handlers made.

The adjoint of an exchange is collective too, but autograd reaches it only on ranks where the differentiated
value depends on the exchange's output. A driver that differentiates collects the outputs here and makes its
value depend on all of them (by an empty slice), so that every rank takes part in every adjoint.

Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_SINK: ContextVar[list[torch.Tensor] | None] = ContextVar("nvdd_exchanges", default=None)


@contextmanager
def collect_exchanges(into: list[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
    """Append the output of every exchange that handlers make in this scope to `into`, and give that list.

    Outputs outside an autograd graph are left out.
    """
    outputs: list[torch.Tensor] = [] if into is None else into
    token = _SINK.set(outputs)
    try:
        yield outputs
    finally:
        _SINK.reset(token)


def note_exchange(output: torch.Tensor) -> torch.Tensor:
    """Report the output of an exchange and return it."""
    sink = _SINK.get()
    if sink is not None and output.requires_grad:
        sink.append(output)
    return output
