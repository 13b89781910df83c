"""Sums of rows by segment: each row counts once, on its owner.

The destination holds one entry per segment, the same on every rank; the source, or its segment index, is
tagged as rows. Ghost rows are left out, and where the spec says ``system_reductions`` the sum runs over all
ranks. That sum is symmetric (its adjoint is an all-reduce too), so it is for quantities that go on into the
computation; what is differentiated in the end stays each rank's own share.

Invariant: the destination's own values, equal on all ranks, are added once, after the sum over ranks.
Layer: tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd_core.comm import all_reduce_sum_symmetric
from nvdd_core.errors import SpecError
from nvdd_core.tensor.exchanges import exchanged
from nvdd_core.tensor.handlers.calls import SCATTER_OPS, ScatterCall, parse
from nvdd_core.tensor.handlers.scatter import Route, check_same_rows, route, row_operand
from nvdd_core.tensor.modes import RowKind
from nvdd_core.tensor.registry import Args, Handler, HandlerRegistry, Kwargs, Op, Registration
from nvdd_core.tensor.shard_tensor import ShardTensor, inherit
from nvdd_core.tensor.trace import op_name


def _into_segments(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return route(parse(func, args, kwargs)) is Route.INTO_SEGMENTS


def _reduce(func: Op, args: Args, kwargs: Kwargs) -> torch.Tensor:
    call = parse(func, args, kwargs)
    rows = None if call is None else row_operand(call)
    if call is None or rows is None or rows.row_layout is None:
        raise RuntimeError("the segment handler ran without its predicate")
    check_same_rows(func, call)
    _check(func, call, rows)
    n_owned = rows.row_layout.n_owned
    total = call.apply(torch.zeros_like(call.dest), call.index[:n_owned], _owned(call, n_owned))
    if rows.rules.system_reductions:
        mesh = rows.row_layout.mesh
        total = exchanged(lambda share: all_reduce_sum_symmetric(share, mesh), total)
    if call.in_place:
        call.dest.add_(total)
        return call.dest
    result = call.dest + total
    if not isinstance(call.dest, ShardTensor):
        return result
    tagged = inherit(result, call.dest)
    tagged._kind, tagged._open = RowKind.SEGMENTS, False
    return tagged


def _owned(call: ScatterCall, n_owned: int) -> Any:
    """Return the part of the source that belongs to owned rows; a source that is broadcast stays whole."""
    source = call.source
    if not isinstance(source, torch.Tensor):
        return source
    entries = call.index.shape[0]
    per_row = source.dim() > 0 and source.shape[0] >= entries and source.dim() >= call.dest.dim()
    return source[:n_owned] if per_row else source


def _check(func: Op, call: ScatterCall, rows: ShardTensor) -> None:
    found, expected = call.dest.shape[0], rows._n_systems
    if expected is None or found != expected:
        segments = (
            "is not known (pass n_systems to ShardTensor.wrap)" if expected is None else f"is {expected}"
        )
        raise SpecError(
            f"{op_name(func)}: rows are summed into a plain tensor of {found} entries, but the number of "
            f"segments {segments}. If the destination has rows, make it with torch.zeros_like(x) or "
            "ShardTensor.promote; if this rank's local sum is meant, ghosts included, use x.to_local() as the "
            "source"
        )
    if call.reduction != "sum" or not call.with_self:
        raise SpecError(
            f"{op_name(func)}: rows can be combined into segments by a sum that includes the destination, "
            f"found reduction {call.reduction!r} with include_self={call.with_self}. Reduce "
            "x.to_local()[:n_owned] and combine the ranks' results yourself"
        )
    if call.index.dtype is torch.bool:
        raise SpecError(
            f"{op_name(func)}: rows are assigned to segments by an integer index, found a boolean mask"
        )


SEGMENT_REDUCE = Handler("segment_reduce", _into_segments, _reduce)


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register the sum by segment for every scatter operation."""
    return [registry.register(SCATTER_OPS, SEGMENT_REDUCE)]
