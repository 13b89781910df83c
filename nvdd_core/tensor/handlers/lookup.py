"""Sharded rows, read and added to by global id.

An index along dim 0 of sharded rows holds global ids; every rank takes part, also with an empty index, and gets
the entries that its own index names, as a plain tensor. Served are ``index_select``, ``x[ids]``, ``gather``,
``take_along_dim``, ``embedding``, and for adding every scatter that sums. Reading runs the very operation that
was called, on ``[owned | fetched | padding]`` rows with a translated index.

An integer or a slice along dim 0 could be a position or a global id and is refused, here and in `refused`. A
boolean mask has the length of this rank's rows and can only mean them; it stays local.

Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.errors import SpecError
from nvdd_core.tensor.handlers.calls import SCATTER_OPS, along_rows, bind, parse, spellings
from nvdd_core.tensor.handlers.scatter import Route, check_same_rows, route
from nvdd_core.tensor.lookup import GatherMetadata, RowLookup
from nvdd_core.tensor.modes import RowKind
from nvdd_core.tensor.registry import Args, Handler, HandlerRegistry, Kwargs, Op, Registration
from nvdd_core.tensor.shard_tensor import ShardTensor, inherit
from nvdd_core.tensor.trace import op_name

LOCAL_ADVICE = "use x.to_local() for this rank's rows, or a tensor of global ids"
_MASKS = frozenset({torch.bool, torch.uint8})


def is_sharded(value: Any) -> bool:
    """Whether `value` holds owned rows of sharded storage."""
    return isinstance(value, ShardTensor) and value._gather_meta is not None and value._kind is RowKind.OWNED


def any_sharded(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor of sharded storage is among the arguments; quick, since every plain ``x[...]`` asks."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ShardTensor) and value._gather_meta is not None:
            return True
    return False


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Read:
    """A call that reads rows of `table`.

    Attributes
    ----------
    table : Tensor
    index : Tensor or other
        What it names along dim 0.
    run : callable (rows, index) -> Tensor
        Does the same for other rows and a translated index.
    """

    table: torch.Tensor
    index: Any
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _index_select(a: Mapping[str, Any]) -> _Read | None:
    if not along_rows(a):
        return None
    return _Read(a["self"], a["index"], lambda rows, i: torch.index_select(rows, 0, i))


def _gather(a: Mapping[str, Any]) -> _Read | None:
    if not along_rows(a):
        return None
    return _Read(a["self"], a["index"], lambda rows, i: torch.gather(rows, 0, i))


def _take_along_dim(a: Mapping[str, Any]) -> _Read | None:
    if a.get("dim") is None:
        raise SpecError(
            f"take_along_dim over all entries of sharded rows has no meaning; name dim=0, or {LOCAL_ADVICE}"
        )
    if not along_rows(a):
        return None
    return _Read(a["self"], a["indices"], lambda rows, i: torch.take_along_dim(rows, i, 0))


def _getitem(a: Mapping[str, Any]) -> _Read | None:
    table, key = a["self"], a["key"]
    key = tuple(key) if isinstance(key, tuple) else (key,)
    at = row_entry(key, table.dim())
    if at is None:
        return None
    return _Read(table, as_ids(key[at]), lambda rows, i: rows[(*key[:at], i, *key[at + 1 :])])


def _index(a: Mapping[str, Any]) -> _Read | None:
    indices = tuple(a["indices"])
    if indices[0] is None:
        return None
    return _Read(a["self"], indices[0], lambda rows, i: torch.ops.aten.index(rows, [i, *indices[1:]]))


def _embedding(a: Mapping[str, Any]) -> _Read:
    refused = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if a.get(name)]
    if refused:
        raise SpecError(f"embedding from sharded rows knows no {refused[0]}; leave it out")
    index, padding = a["index"], a.get("padding_idx")

    def run(rows: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        out = rows[i]
        if padding is None:
            return out
        fixed = (index == padding).reshape(*index.shape, *[1] * (out.dim() - index.dim()))
        return torch.where(fixed, out.detach(), out)

    return _Read(a["self"], index, run)


def _functional_embedding(a: Mapping[str, Any]) -> _Read:
    padding, meta = a.get("padding_idx"), a["self"]._gather_meta
    negative = padding is not None and padding < 0
    return _embedding({**a, "padding_idx": padding + meta.n_global if negative else padding})


_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_Form = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], _Read | None]]
_READ_FAMILIES: dict[str, _Form] = {
    "index_select": (("self", "dim", "index"), _index_select),
    "gather": (("self", "dim", "index", "sparse_grad"), _gather),
    "take_along_dim": (("self", "indices", "dim"), _take_along_dim),
    "index": (("self", "indices"), _index),
    "_unsafe_index": (("self", "indices"), _index),
    "embedding": (("self", "index", "padding_idx", "scale_grad_by_freq", "sparse"), _embedding),
}
_READS: dict[Op, _Form] = {op: form for name, form in _READ_FAMILIES.items() for op in spellings(name)}
_READS[torch.Tensor.__getitem__] = (("self", "key"), _getitem)
_READS[torch.nn.functional.embedding] = (("index", "self", *_EMBEDDING_OPTIONS), _functional_embedding)


def row_entry(key: tuple[Any, ...], n_dims: int) -> int | None:
    """Return the place in an index of what applies to dim 0, None when dim 0 is kept whole."""
    for at, entry in enumerate(key):
        if entry is None:
            continue
        if entry is Ellipsis:
            if sum(map(_dims_taken, key)) < n_dims:
                return None
            continue
        return None if isinstance(entry, slice) and entry == slice(None) else at
    return None


def _dims_taken(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    masks = isinstance(entry, torch.Tensor) and entry.dtype in _MASKS
    return entry.dim() if masks else 1


def as_ids(entry: Any) -> Any:
    """Turn a list, a range or an array into the tensor that torch would index by."""
    if isinstance(entry, (int, float, slice, torch.Tensor)) or not hasattr(entry, "__len__"):
        return entry
    return torch.as_tensor(list(entry) if isinstance(entry, range) else entry)


def _read(func: Op, args: Args, kwargs: Kwargs) -> _Read | None:
    """Return what the call reads by position or id along dim 0 of sharded rows, None when it does not."""
    names, reader = _READS[func]
    named = bind(names, args, kwargs)
    if not is_sharded(named.get("self")):
        return None
    return reader(named)


def _reads(func: Op, args: Args, kwargs: Kwargs) -> bool:
    read = _read(func, args, kwargs) if any_sharded(args, kwargs) else None
    return read is not None and not is_mask(read.index)


def is_mask(index: Any) -> bool:
    """Whether an entry of an index is a mask."""
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS


def _look_up(func: Op, args: Args, kwargs: Kwargs) -> torch.Tensor:
    read = _read(func, args, kwargs)
    if read is None:
        raise RuntimeError("the lookup handler ran without its predicate")
    if not isinstance(read.index, torch.Tensor):
        raise SpecError(
            f"{op_name(func)}: {read.index!r} along dim 0 of sharded rows could be a position here or a global id; "
            f"{LOCAL_ADVICE}"
        )
    if kwargs.get("out") is not None:
        raise SpecError(f"{op_name(func)} on sharded rows takes no out=")
    lookup = _plan(func, read.table, read.index)
    return read.run(lookup.fetch(read.table), lookup.index)


def _plan(func: Op, table: Any, index: torch.Tensor) -> RowLookup:
    meta: GatherMetadata = table._gather_meta
    problem = None
    if table._open:  # on this rank; the others learn of it in the vote
        problem = SpecError(
            f"rank {meta.mesh.rank}: {op_name(func)}: this tensor's length fits its {meta.n_owned} rows and as many "
            "segments; say which by ShardTensor.promote(t, like, kind=...) or ShardTensor.wrap(..., kind=...)"
        )
    return meta.plan_for(index, problem)


# -- adding -----------------------------------------------------------------------------------------------------------


def _adds_by_id(func: Op, args: Args, kwargs: Kwargs) -> bool:
    call = parse(func, args, kwargs)
    return call is not None and route(call) is Route.BY_ID and not is_mask(call.index)


def _add_by_id(func: Op, args: Args, kwargs: Kwargs) -> torch.Tensor:
    call = parse(func, args, kwargs)
    if call is None or not isinstance(call.dest, ShardTensor):
        raise RuntimeError("the scatter by id ran without its predicate")
    check_same_rows(func, call)
    if call.reduction != "sum" or not call.with_self:
        raise SpecError(
            f"{op_name(func)}: entries of several ranks are combined into sharded rows by a sum that includes the "
            f"destination, found reduction {call.reduction!r} with include_self={call.with_self}"
        )
    dest = call.dest
    lookup = _plan(func, dest, call.index)
    blank = dest.new_zeros((lookup.plan.n_local + 1, *dest.shape[1:]))
    added = lookup.send_home(call.apply(blank, lookup.index, call.source))
    if call.in_place:
        dest.add_(added)
        return dest
    return inherit(dest + added, dest)


LOOKUP = Handler("sharded_lookup", _reads, _look_up)
ADD_BY_ID = Handler("sharded_scatter", _adds_by_id, _add_by_id)


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register reading and adding by global id."""
    return [
        registry.register(_READS, LOOKUP),
        registry.register(SCATTER_OPS, ADD_BY_ID),
    ]
