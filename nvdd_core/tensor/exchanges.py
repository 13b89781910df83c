"""Exchanges as the evaluation that drives them has to see them: which were made, and each in the autograd graph.

The adjoint of an exchange is collective too, but autograd reaches it only on ranks where the differentiated value
depends on the exchange's output and its input depends on what is differentiated. A driver that differentiates names
that as the anchor and collects the outputs: `exchanged` ties an input without a gradient of its own to the anchor (by
an empty sum), and the driver ties its value to all outputs (by an empty slice). So every rank takes part in every
adjoint, whatever its rows happen to depend on.

What should not be differentiated at all, such as labels, is exchanged under ``torch.no_grad()``.

Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Sink:
    outputs: list[torch.Tensor]
    anchor: torch.Tensor | None


_SINK: ContextVar[_Sink | None] = ContextVar("nvdd_exchanges", default=None)


@contextmanager
def collect_exchanges(
    into: list[torch.Tensor] | None = None, anchor: torch.Tensor | None = None
) -> Iterator[list[torch.Tensor]]:
    """Append the output of every exchange in this scope to `into`, and give that list.

    Parameters
    ----------
    into : list of Tensor, optional
        Outputs outside an autograd graph are left out.
    anchor : Tensor, optional
        What is differentiated with respect to; inputs that don't depend on it are tied to it.
    """
    outputs: list[torch.Tensor] = [] if into is None else into
    token = _SINK.set(_Sink(outputs, anchor))
    try:
        yield outputs
    finally:
        _SINK.reset(token)


def exchanged(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return ``op(rows)``, where `op` is an exchange or a sum over ranks, reported to the driver (collective)."""
    sink = _SINK.get()
    if sink is None:
        return op(rows)
    anchor = sink.anchor if torch.is_grad_enabled() and rows.is_floating_point() else None
    if anchor is not None and anchor.requires_grad and not rows.requires_grad:
        rows = rows + anchor.reshape(-1)[:0].sum().to(rows.dtype)
    output = op(rows)
    if output.requires_grad:
        sink.outputs.append(output)
    return output
