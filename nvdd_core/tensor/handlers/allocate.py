"""Allocators, copies and moves: results that have the rows of their input keep its class and fields.

``zeros_like`` and its kin, ``clone``, ``detach``, ``to`` and the casts give a tensor of the same rows.
``new_zeros`` and its kin name a size: the same length is taken for the same rows, the number of segments for
segments, and a length that fits both is left open until use; any other length gives a plain tensor.

Layer: tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd_core.errors import SpecError
from nvdd_core.tensor.modes import RowKind
from nvdd_core.tensor.registry import Args, Handler, HandlerRegistry, Kwargs, Op, Registration
from nvdd_core.tensor.shard_tensor import ShardTensor, inherit

_LIKE = ("zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_empty", "new_ones", "new_full")
_SAME_ROWS = (
    "clone",
    "detach",
    "to",
    "contiguous",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "bool",
    "cpu",
    "cuda",
    "pin_memory",
)


def _named(names: tuple[str, ...]) -> tuple[Op, ...]:
    """Return the functions of torch and methods of Tensor with these names."""
    found = [getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in names]
    return tuple(op for op in found if callable(op))  # torch.float is a dtype, torch.cpu a module


def _template(args: Args, kwargs: Kwargs) -> ShardTensor | None:
    """Return the tensor whose rows the result has, when it is a ShardTensor."""
    first = args[0] if args else kwargs.get("input")
    return first if isinstance(first, ShardTensor) else None


def _has_template(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return _template(args, kwargs) is not None


def _keep(func: Op, args: Args, kwargs: Kwargs) -> Any:
    result = func(*args, **kwargs)
    like = _template(args, kwargs)
    if (
        like is None or type(result) is not torch.Tensor
    ):  # the tensor itself (nothing to do), or no tensor at all
        return result
    return inherit(result, like)


def _new(func: Op, args: Args, kwargs: Kwargs) -> torch.Tensor:
    result: torch.Tensor = func(*args, **kwargs)
    like = _template(args, kwargs)
    if like is None or like.row_layout is None or result.dim() == 0:
        return result
    layout = like.row_layout
    rows = result.shape[0]
    if like._kind is RowKind.LOCAL and rows == layout.n_owned != layout.n_padded:
        # A rank without ghosts can't tell these from local rows, and would exchange them all alone.
        raise SpecError(
            f"{rows} rows are this rank's owned rows, but a buffer made from a ShardTensor of local rows has all "
            f"{layout.n_padded} of them: use new_zeros(x.shape[0], ...), or x.to_local().new_zeros(...) for a "
            "buffer that no handler should touch"
        )
    same, segments = rows == like.shape[0], rows == like._n_systems
    if not same and not segments:
        return result
    out = inherit(result, like)
    if like._kind is RowKind.SEGMENTS or not same:
        out._open = rows == layout.n_padded
        out._kind = layout.ROW_KIND if out._open else RowKind.SEGMENTS
    else:
        out._open = segments
    return out


LIKE = Handler("allocate_like", _has_template, _keep)
NEW = Handler("allocate_new", _has_template, _new)
SAME_ROWS = Handler("same_rows", _has_template, _keep)


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register the allocators, copies and moves."""
    return [
        registry.register(_named(_LIKE), LIKE),
        registry.register(_named(_NEW), NEW),
        registry.register(_named(_SAME_ROWS), SAME_ROWS),
    ]
