"""What is kept of a tensor for comparison: a few numbers a row.

Features are projected on a fixed vector, so that a row is one number; an edge tensor becomes one sum a receiver. What
dim 0 counts is not known on one rank alone, where counts may coincide, so every view that fits is kept and
`compare` takes the one that fits on all ranks and in the reference.

Layer: validate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nvdd_core.runtime import to_local
from nvdd_core.validate.findings import View

_WHOLE = 1024
"""Entries of a tensor that is compared entry by entry."""


@dataclass(frozen=True)
class Layout:
    """How one rank's rows and edges lie.

    Attributes
    ----------
    ids : Tensor, shape (n_local,), int64
    n_owned : int
    receivers : Tensor, shape (E,), int64
        Of every directed edge.
    """

    ids: torch.Tensor
    n_owned: int
    receivers: torch.Tensor

    @property
    def n_local(self) -> int:
        """Owned and ghost rows."""
        return int(self.ids.shape[0])


@dataclass(frozen=True)
class Summary:
    """A tensor for comparison.

    Attributes
    ----------
    shape : tuple of int
    views : mapping of View to Tensor, float64 on the CPU
        LOCAL (n_local,), OWNED (n_owned,), EDGES (n_owned,) sums over edges into each owned row, WHOLE (any,).
    """

    shape: tuple[int, ...]
    views: Mapping[View, torch.Tensor]

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return 8 * sum(t.numel() for t in self.views.values())


def projection(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `n` fixed numbers between -1 and 1 without a pattern that features could share."""
    return torch.cos(torch.arange(n, dtype=torch.float64, device=device) * 1.7320508 + 0.3)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Return `t` (rows, ...) with one dimension of features, also where it has no rows; a single number is a row."""
    t = torch.atleast_1d(t)
    return t.reshape(t.shape[0], math.prod(t.shape[1:]))


def summarise(value: torch.Tensor, layout: Layout) -> Summary | None:
    """Return what is kept of `value`; None for what holds no floating-point numbers."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        t = to_local(value).detach()
        if t.layout != torch.strided or t.is_meta or not (t.is_floating_point() or t.is_complex()):
            return None
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        shape = tuple(t.shape)
        t = t.to(layout.ids.device, torch.float64)
        views: dict[View, torch.Tensor] = {}
        if shape and t.numel():
            rows = as_rows(t)
            rows = rows @ projection(rows.shape[1], rows.device)
            views = _row_views(rows, layout)
        elif shape and shape[0] == 0:
            views = _row_views(t.new_zeros(0), layout)
        if not views:
            views[View.WHOLE] = _whole(t.reshape(-1))
        elif t.numel() <= _WHOLE:
            views[View.WHOLE] = t.reshape(-1)
        return Summary(shape, {view: kept.to("cpu", copy=True) for view, kept in views.items()})


def _row_views(rows: torch.Tensor, layout: Layout) -> dict[View, torch.Tensor]:
    views = {}
    n = rows.shape[0]
    if n == layout.n_local:
        views[View.LOCAL] = rows
    if n == layout.n_owned:
        views[View.OWNED] = rows
    if n == layout.receivers.shape[0]:
        sums = rows.new_zeros(layout.n_local).index_add(0, layout.receivers, rows)
        views[View.EDGES] = sums[: layout.n_owned]
    return views


def _whole(entries: torch.Tensor) -> torch.Tensor:
    if entries.numel() <= _WHOLE:
        return entries
    # linear, so that shares of a large tensor still add up
    return torch.stack([entries.sum(), entries @ projection(entries.shape[0], entries.device)])
