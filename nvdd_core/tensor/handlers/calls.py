"""One form for every spelling of "add these entries into rows".

`scatter_add`, `index_add`, `scatter_reduce`, `index_reduce`, `scatter` with a reduction and `index_put`
with accumulation, each as a function, a method, an op packet and an op overload, in place and out of place:
`parse` turns a call into a `ScatterCall`, or None when it does not combine entries along dim 0.

Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.errors import SpecError
from nvdd_core.tensor.registry import Args, Kwargs, Op
from nvdd_core.tensor.trace import op_name

Apply = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(dest, index, source) -> a new tensor of the shape of dest."""


@dataclass(frozen=True, slots=True)
class ScatterCall:
    """A call that combines entries of `source` into rows of `dest`.

    Attributes
    ----------
    dest : Tensor, shape (rows, *F)
    index : Tensor
        Its dim 0 counts the entries.
    source : Tensor or number
        What is combined into `dest`.
    reduction : str
        ``"sum"``, or the name of another reduction.
    with_self : bool
        Whether the present values of `dest` take part.
    in_place : bool
    apply : callable
        Does the same, out of place, for other tensors.
    """

    dest: torch.Tensor
    index: torch.Tensor
    source: Any
    reduction: str
    with_self: bool
    in_place: bool
    apply: Apply


@dataclass(frozen=True, slots=True)
class _Form:
    """Names of the arguments, in order, and how to read them."""

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any], bool], ScatterCall | None]
    in_place: bool
    required: frozenset[str]


_SUMS = frozenset({"sum", "add"})
_OPTIONAL = frozenset({"alpha", "include_self", "accumulate", "reduce"})
_ALIASES = {
    "input": "self",
    "weight": "self",
    "indices": "index",
    "src": "source",
    "value": "source",
    "values": "source",
}


def along_rows(a: Mapping[str, Any]) -> bool:
    """Whether the dimension of the call is dim 0 of a destination that has rows."""
    dim, n_dims = a.get("dim"), a["self"].dim()
    return n_dims > 0 and dim in (0, -n_dims)


def _scatter_add(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    if not along_rows(a):
        return None
    return ScatterCall(
        a["self"], a["index"], a["source"], "sum", True, in_place, lambda d, i, s: d.scatter_add(0, i, s)
    )


def _index_add(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    if not along_rows(a):
        return None
    alpha = a.get("alpha", 1)
    return ScatterCall(
        a["self"],
        a["index"],
        a["source"],
        "sum",
        True,
        in_place,
        lambda d, i, s: d.index_add(0, i, s, alpha=alpha),
    )


def _scatter_reduce(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    if not along_rows(a):
        return None
    reduce, with_self = a.get("reduce"), a.get("include_self", True)
    return ScatterCall(
        a["self"],
        a["index"],
        a["source"],
        "sum" if reduce in _SUMS else str(reduce),
        with_self,
        in_place,
        lambda d, i, s: d.scatter_reduce(0, i, s, str(reduce), include_self=with_self),
    )


def _index_reduce(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    if not along_rows(a):
        return None
    reduce, with_self = a.get("reduce"), a.get("include_self", True)
    return ScatterCall(
        a["self"],
        a["index"],
        a["source"],
        str(reduce),
        with_self,
        in_place,
        lambda d, i, s: d.index_reduce(0, i, s, str(reduce), include_self=with_self),
    )


def _scatter(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    reduce = a.get("reduce")
    if reduce is None or not along_rows(a):
        return None
    return ScatterCall(
        a["self"],
        a["index"],
        a["source"],
        "sum" if reduce in _SUMS else str(reduce),
        True,
        in_place,
        lambda d, i, s: torch.scatter(d, 0, i, s, reduce=reduce),
    )


def _index_put(a: Mapping[str, Any], in_place: bool) -> ScatterCall | None:
    if not a.get("accumulate", False) or a["self"].dim() == 0:
        return None
    indices = tuple(a["indices"])
    first, rest = indices[0], indices[1:]
    if first is None:
        return None
    return ScatterCall(
        a["self"],
        first,
        a["source"],
        "sum",
        True,
        in_place,
        lambda d, i, s: d.index_put((i, *rest), s, accumulate=True),
    )


_FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], bool], ScatterCall | None]]] = {
    "scatter_add": (("self", "dim", "index", "source"), _scatter_add),
    "index_add": (("self", "dim", "index", "source", "alpha"), _index_add),
    "scatter_reduce": (("self", "dim", "index", "source", "reduce", "include_self"), _scatter_reduce),
    "index_reduce": (("self", "dim", "index", "source", "reduce", "include_self"), _index_reduce),
    "scatter": (("self", "dim", "index", "source", "reduce"), _scatter),
    "index_put": (("self", "indices", "source", "accumulate"), _index_put),
}


def spellings(name: str) -> list[Op]:
    """Return every callable of torch that is known by `name`."""
    found: list[Op] = []
    for owner in (torch, torch.Tensor):
        if name in dir(owner):
            found.append(getattr(owner, name))
    packet = getattr(torch.ops.aten, name)
    found.append(packet)
    found.extend(getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)
    return found


def _forms() -> dict[Op, _Form]:
    forms: dict[Op, _Form] = {}
    for name, (names, read) in _FAMILIES.items():
        for suffix, in_place in (("", False), ("_", True)):
            for op in spellings(name + suffix):
                forms[op] = _Form(names, read, in_place, frozenset(names) - _OPTIONAL)
    return forms


_FORMS = _forms()
SCATTER_OPS: tuple[Op, ...] = tuple(_FORMS)
"""Every spelling of an operation that `parse` understands."""


def bind(names: tuple[str, ...], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by name, whichever way they were given."""
    named = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        named[key if key in names else _ALIASES.get(key, key)] = value
    return named


def parse(func: Op, args: Args, kwargs: Kwargs) -> ScatterCall | None:
    """Return what the call does to the rows of its destination, None when it leaves rows apart.

    Raises
    ------
    SpecError
        When the call names an ``out=`` tensor, which has no place in an autograd graph.
    """
    form = _FORMS[func]
    named = bind(form.names, args, kwargs)
    if named.get("out") is not None:
        raise SpecError(f"{op_name(func)} on a ShardTensor takes no out=; use the in-place form")
    if not named.keys() >= form.required:
        return None  # torch itself names what is missing
    return form.read(named, form.in_place)
