"""What sharded rows refuse: whatever goes by the position of a row, or replaces rows by global id.

A position among this rank's rows looks just like a global id, and their order on a rank means nothing. So everything
that picks, cuts, reorders or regroups along dim 0 raises and names ``x.to_local()`` instead of running on the rows
that this rank happens to have. Iteration, unpacking and ``reversed`` arrive as ``unbind`` and ``flip``.

Invariant: whether a call is refused follows from its arguments, which are the same on every rank, never from the
values of this rank's rows.
Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvdd_core.errors import SpecError
from nvdd_core.tensor.handlers.calls import along_rows, bind, spellings
from nvdd_core.tensor.handlers.lookup import LOCAL_ADVICE, any_sharded, as_ids, is_mask, is_sharded, row_entry
from nvdd_core.tensor.registry import Args, Handler, HandlerRegistry, Kwargs, Op, Registration
from nvdd_core.tensor.trace import op_name

Named = Mapping[str, Any]
Judge = Callable[[Named], str | None]
"""Arguments by name -> what is wrong with the call, None when it is fine."""

_MORE = "*"
"""Where further positional arguments are found, as in ``x.flip(0, 1)``."""

_WRITE_ADVICE = (
    "rows of sharded storage are added to by global id (index_add_, scatter_add_, index_put_ with accumulate=True) "
    "or written whole or by mask; use x.to_local() to write this rank's rows"
)
_POSITION = f"positions and global ids look alike; {LOCAL_ADVICE}"
_NO_MEANING = f"it has no meaning by global id; {LOCAL_ADVICE}"
_REGROUPED = (
    "dim 0 of the result need not count this rank's rows, so it could not be looked up by global id; put x.shape[0] "
    "first to keep the rows, or use x.to_local()"
)


# -- writes ----------------------------------------------------------------------------------------------------------


def _replaces_at_key(a: Named) -> str | None:
    key = a["key"] if isinstance(a["key"], tuple) else (a["key"],)
    at = row_entry(key, a["self"].dim())
    return None if at is None or is_mask(as_ids(key[at])) else _WRITE_ADVICE


def _writes_at_index(a: Named) -> str | None:
    first = a["indices"][0] if a["indices"] else None
    return None if first is None or is_mask(first) else _WRITE_ADVICE


def _replaces_at_index(a: Named) -> str | None:
    return None if a.get("accumulate") else _writes_at_index(a)


def _replaces_along_rows(a: Named) -> str | None:
    return _WRITE_ADVICE if along_rows(a) and a.get("reduce") is None else None


# -- positions -------------------------------------------------------------------------------------------------------


def _along(default: int | None = None, name: str = "dim") -> Judge:
    """Return what refuses a call along dim 0; `default` is the dimension of one that names none."""

    def judge(a: Named) -> str | None:
        return _POSITION if along_rows({"self": a["self"], "dim": a.get(name, default)}) else None

    return judge


def _among(default: tuple[int, ...] = ()) -> Judge:
    """Return what refuses a call with dim 0 among its dimensions; none at all stand for the flattened tensor."""

    def judge(a: Named) -> str | None:
        dims = _listed(a, "dims", default)
        flat = not dims and a["self"].dim() > 0
        return _POSITION if flat or any(along_rows({**a, "dim": d}) for d in dims) else None

    return judge


def _listed(a: Named, name: str, default: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Return sizes or dimensions, given as a sequence or one by one."""
    value = a.get(name)
    if value is None:
        return default
    return (*(value if isinstance(value, list | tuple) else (value,)), *a[_MORE])


def _splits_columns(a: Named) -> str | None:
    return _POSITION if a["self"].dim() == 1 else None  # of one dimension, the columns are the rows


def _always(a: Named) -> str | None:
    return _NO_MEANING


# -- shapes ----------------------------------------------------------------------------------------------------------


def _keeps_rows(x: torch.Tensor, sizes: tuple[Any, ...]) -> bool:
    return x.dim() == 0 or (len(sizes) > 0 and sizes[0] == x.shape[0])


def _regroups(a: Named) -> str | None:
    sizes = _listed(a, "size")
    if "size" not in a or isinstance(sizes[0] if sizes else None, torch.dtype):  # a view as another dtype
        return None
    return None if _keeps_rows(a["self"], sizes) else _REGROUPED


def _regroups_as(a: Named) -> str | None:
    return None if _keeps_rows(a["self"], tuple(a["other"].shape)) else _REGROUPED


def _flattens(a: Named) -> str | None:
    n_dims = a["self"].dim()
    many = n_dims > 1 and a.get("end_dim", -1) not in (0, -n_dims)
    return _REGROUPED if many and a.get("start_dim", 0) in (0, -n_dims) else None


_Refusal = tuple[tuple[str, ...], Judge]
_SPLIT: _Refusal = (("self", "parts", "dim"), _along(0))
_CUMULATED: _Refusal = (("self", "dim"), _along())
_SORTED: _Refusal = (("self", "dim"), _along(-1))
_ALWAYS: _Refusal = (("self",), _always)
_PICKED: _Refusal = (("self", "dim"), _along())
_RESHAPED: _Refusal = (("self", "size"), _regroups)
_FAMILIES: dict[str, _Refusal] = {
    "scatter": (("self", "dim", "index", "source", "reduce"), _replaces_along_rows),
    "scatter_": (("self", "dim", "index", "source", "reduce"), _replaces_along_rows),
    "index_put": (("self", "indices", "source", "accumulate"), _replaces_at_index),
    "index_put_": (("self", "indices", "source", "accumulate"), _replaces_at_index),
    "_unsafe_index_put": (("self", "indices"), _writes_at_index),
    "_index_put_impl_": (("self", "indices"), _writes_at_index),
    "index_copy": (("self", "dim"), _replaces_along_rows),
    "index_copy_": (("self", "dim"), _replaces_along_rows),
    "index_fill": (("self", "dim"), _replaces_along_rows),
    "index_fill_": (("self", "dim"), _replaces_along_rows),
    **dict.fromkeys(("take", "put", "put_", "embedding_bag", "flipud", "msort", "vsplit"), _ALWAYS),
    **dict.fromkeys(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"), _ALWAYS),
    **dict.fromkeys(("select", "select_copy", "narrow", "narrow_copy"), _PICKED),
    **dict.fromkeys(("slice", "slice_copy", "unbind", "unbind_copy"), (("self", "dim"), _along(0))),
    "select_scatter": (("self", "source", "dim"), _along()),
    "slice_scatter": (("self", "source", "dim"), _along(0)),
    **dict.fromkeys(("unfold", "unfold_copy"), (("self", "dimension"), _along(name="dimension"))),
    **dict.fromkeys(("split", "split_copy", "split_with_sizes", "split_with_sizes_copy"), _SPLIT),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"), _SPLIT),
    "tensor_split": _SPLIT,
    "hsplit": (("self",), _splits_columns),
    "flip": (("self", "dims"), _among()),
    "roll": (("self", "shifts", "dims"), _among()),
    "rot90": (("self", "k", "dims"), _among((0, 1))),
    **dict.fromkeys(("sort", "argsort"), _SORTED),
    **dict.fromkeys(("topk", "kthvalue"), (("self", "k", "dim"), _along(-1))),
    "diff": (("self", "n", "dim"), _along(-1)),
    **dict.fromkeys(("cumsum", "cumsum_", "cumprod", "cumprod_"), _CUMULATED),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp"), _CUMULATED),
    **dict.fromkeys(("view", "view_copy", "_unsafe_view", "reshape", "_reshape_alias"), _RESHAPED),
    **dict.fromkeys(("view_as", "reshape_as"), (("self", "other"), _regroups_as)),
    "flatten": (("self", "start_dim", "end_dim"), _flattens),
    "ravel": (("self",), _flattens),
    "unflatten": (("self", "dim"), lambda a: _along()(a) and _REGROUPED),
}
_REFUSALS: dict[Op, _Refusal] = {op: form for name, form in _FAMILIES.items() for op in spellings(name)}
_REFUSALS[torch.Tensor.__setitem__] = (("self", "key", "source"), _replaces_at_key)
_REFUSALS[torch.Tensor.__reversed__] = _ALWAYS
_REFUSALS[torch.nn.functional.embedding_bag] = (("index", "self"), _always)
_SAME_NAMES = {"shape": "size", "axis": "dim"}


def _advice(func: Op, args: Args, kwargs: Kwargs) -> str | None:
    names, judge = _REFUSALS[func]
    named = bind(names, args, {_SAME_NAMES.get(k, k): v for k, v in kwargs.items()})
    return judge({**named, _MORE: args[len(names) :]}) if is_sharded(named.get("self")) else None


def _refuses(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return any_sharded(args, kwargs) and _advice(func, args, kwargs) is not None


def _refuse(func: Op, args: Args, kwargs: Kwargs) -> Any:
    raise SpecError(f"{op_name(func)} along the rows of sharded storage: {_advice(func, args, kwargs)}")


REFUSE = Handler("refuse_sharded", _refuses, _refuse)


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register the refusals."""
    return [registry.register(_REFUSALS, REFUSE)]
