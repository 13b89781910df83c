"""Scatters whose destination or source has rows: which of three things they are, and the one into local rows.

Who is scattered into what decides, by declaration:

====================  =========================  ========================
destination           source or index has rows   neither has rows
====================  =========================  ========================
local or owned rows   refused                    into rows (this module)
open                  into segments              into rows
segments              into segments (`system`)   refused
plain                 into segments              untouched
====================  =========================  ========================

"Has rows" means tagged as local or owned. An open destination is one whose length fits rows and segments
alike on this rank. Ranks differ in their row counts, so what is open here may be decided elsewhere; each
column gives such a call one meaning on all ranks, or an error on those where it is decided otherwise. Into rows
of sharded storage goes by global id (`lookup`).

Into local rows: new contributions are summed where the spec asks for it, and ghosts take their owners'
values. Ghosts' earlier values are copies and never contribute, so any number of scatters into one tensor is
right. The result is written back by autograd-aware operations on the destination itself: code that drops the
return value sees it, and derivatives of any order hold.

Layer: tensor.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from nvdd_core.errors import SpecError
from nvdd_core.tensor.exchanges import exchanged
from nvdd_core.tensor.handlers.calls import SCATTER_OPS, ScatterCall, parse
from nvdd_core.tensor.modes import RowKind, ScatterMode
from nvdd_core.tensor.registry import Args, Handler, HandlerRegistry, Kwargs, Op, Registration
from nvdd_core.tensor.shard_tensor import ShardTensor, check_aligned, inherit
from nvdd_core.tensor.trace import op_name

_ROWS = frozenset({RowKind.LOCAL, RowKind.OWNED})


def row_operand(call: ScatterCall) -> ShardTensor | None:
    """Return the source or else the index when it is tagged as local or owned rows."""
    for value in (call.source, call.index):
        if isinstance(value, ShardTensor) and value._kind in _ROWS and value.row_layout is not None:
            return value
    return None


def _is_segments(value: Any) -> bool:
    return isinstance(value, ShardTensor) and value._kind is RowKind.SEGMENTS and value.row_layout is not None


class Route(Enum):
    """What a scatter along dim 0 is."""

    UNTOUCHED = "untouched"
    INTO_ROWS = "into rows"
    BY_ID = "into rows by global id"
    INTO_SEGMENTS = "into segments"
    ROWS_INTO_ROWS = (
        "rows are scattered into rows, and ghosts among the source rows would count twice. Use x.to_local() "
        "as the source and index where entries are meant"
    )
    UNKNOWN_INTO_SEGMENTS = (
        "entries of unknown kind are scattered into segments. Tag the entries (ShardTensor.promote(entries, "
        "like=x)) or their segment index as rows so that ghosts are left out, or scatter into a plain "
        "tensor to get this rank's sum"
    )
    SEGMENTS_SCATTERED = (
        "segments are scattered. Use x.to_local() as the source and index, since every rank holds all of them"
    )


REFUSED = frozenset({Route.ROWS_INTO_ROWS, Route.UNKNOWN_INTO_SEGMENTS, Route.SEGMENTS_SCATTERED})


def route(call: ScatterCall | None) -> Route:
    """Decide what the call is, from tags alone; the table in the module's docstring."""
    if call is None:
        return Route.UNTOUCHED
    if _is_segments(call.source) or _is_segments(call.index):
        return Route.SEGMENTS_SCATTERED
    dest, rows = call.dest, row_operand(call) is not None
    if isinstance(dest, ShardTensor) and dest.row_layout is not None:
        if dest._kind is RowKind.SEGMENTS:
            return Route.INTO_SEGMENTS if rows else Route.UNKNOWN_INTO_SEGMENTS
        if not rows:
            return Route.INTO_ROWS if dest._gather_meta is None else Route.BY_ID
        return Route.INTO_SEGMENTS if dest._open else Route.ROWS_INTO_ROWS
    return Route.INTO_SEGMENTS if rows else Route.UNTOUCHED


def _refuses(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return route(parse(func, args, kwargs)) in REFUSED


def _refuse(func: Op, args: Args, kwargs: Kwargs) -> Any:
    call = parse(func, args, kwargs)
    shapes = "" if call is None else f"destination {tuple(call.dest.shape)}, index {tuple(call.index.shape)}"
    raise SpecError(f"{op_name(func)} ({shapes}): {route(call).value}")


def check_same_rows(func: Op, call: ScatterCall) -> None:
    """Raise when operands of the call belong to different distributions."""
    check_aligned(func, [x for x in (call.dest, call.index, call.source) if isinstance(x, ShardTensor)])


def _into_rows(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return route(parse(func, args, kwargs)) is Route.INTO_ROWS


def _scatter_into_rows(func: Op, args: Args, kwargs: Kwargs) -> ShardTensor:
    call = parse(func, args, kwargs)
    if call is None or not isinstance(call.dest, ShardTensor) or call.dest._meta is None:
        raise RuntimeError("the scatter handler ran without its predicate")
    check_same_rows(func, call)
    dest, plan, mode = call.dest, call.dest._meta.plan, call.dest.rules.scatter
    if mode is ScatterMode.LOCAL or plan.is_trivial or dest._kind is RowKind.OWNED:
        result: torch.Tensor = func(*args, **kwargs)
        return dest if call.in_place else inherit(result, dest)
    if dest.device != plan.send_index.device:
        raise SpecError(
            f"{op_name(func)}: the rows are on {dest.device}, their halo's routes on {plan.send_index.device}; "
            "wrap the moved rows again with metadata of that device"
        )
    if mode is ScatterMode.REFRESH:
        written = func(*args, **kwargs)
        corrected = exchanged(plan.forward, written[: plan.n_owned])
    else:
        corrected = exchanged(plan.correct, _contributions(func, call, dest, plan.n_owned))
    if not call.in_place:
        return inherit(corrected, dest)
    dest.copy_(corrected)
    return dest


def _contributions(func: Op, call: ScatterCall, dest: torch.Tensor, n_owned: int) -> torch.Tensor:
    """Return owned rows with what was added to them, and ghost rows with what was added to them alone."""
    if call.reduction != "sum" or not call.with_self:
        what = call.reduction if call.reduction != "sum" else "sum without the destination's own values"
        raise SpecError(
            f"{op_name(func)}: halo_correction combines contributions of several ranks by addition, which a "
            f"{what!r} reduction does not allow. Give each edge to the rank that owns its receiver and use "
            "the scatter mode 'refresh' or 'local'"
        )
    ghosts = torch.zeros_like(dest[n_owned:])
    return call.apply(torch.cat([dest[:n_owned], ghosts]), call.index, call.source)


REFUSE = Handler("refuse_scatter", _refuses, _refuse)
ROW_SCATTER = Handler("row_scatter", _into_rows, _scatter_into_rows)


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register the scatter into rows and the refusals for every scatter operation."""
    return [registry.register(SCATTER_OPS, ROW_SCATTER), registry.register(SCATTER_OPS, REFUSE)]
