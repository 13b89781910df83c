"""What is hooked into a live MACE model while several ranks evaluate it: torch's own forward hooks, no patch.

Key objects: `REFRESH`, `PRODUCTS`, `READOUTS`, `narrow_refresh`. Edges belong to the rank that owns their receiver,
so an interaction is complete on owned rows and says nothing of ghost rows. Products and readouts work row by row, so
they get owned rows only; the rows that they are padded with are constants, through which no gradient flows. What
neighbours read in the next layer is refreshed by one exchange.

Invariant: hooks look at rows only, never at what a block computes; every rank makes the same exchanges, also one
without rows or edges. Layer: plugin.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd_core.adapters import ModuleHookAdapter
from nvdd_core.runtime import current_dd_context, refresh_neighbors

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _counts() -> tuple[int, int] | None:
    """Return owned and local rows of the evaluation under way."""
    context = current_dd_context()
    return None if context.plan is None else (context.plan.n_owned, context.plan.n_local)


def _owned(value: Any, n_owned: int, n_local: int) -> Any:
    """Cut a tensor of local rows to the owned ones; leave anything else."""
    rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == n_local
    return value[:n_owned] if rows else value


def owned_rows(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Give a row-wise block owned rows only; a forward pre-hook."""
    counts = _counts()
    if counts is None:
        return None
    return tuple(_owned(a, *counts) for a in args), {name: _owned(a, *counts) for name, a in kwargs.items()}


def padded_rows(module: torch.nn.Module, args: Args, kwargs: Kwargs, output: torch.Tensor) -> torch.Tensor:
    """Give the caller local rows again, ghosts' being constant zeros; a forward hook."""
    counts = _counts()
    if counts is None or output.shape[0] == counts[1]:
        return output
    ghosts = output.new_zeros((counts[1] - counts[0], *output.shape[1:]))
    return torch.cat([output, ghosts])


def refreshed_features(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Give ghosts their owners' features before a layer reads them; a forward pre-hook of an interaction.

    mace passes the features by keyword in every release that this plugin takes; by position they would be second.
    """
    if "node_feats" in kwargs:
        return args, {**kwargs, "node_feats": refresh_neighbors(kwargs["node_feats"])}
    return (args[0], refresh_neighbors(args[1]), *args[2:]), kwargs


def refreshed_output(
    module: torch.nn.Module, args: Args, kwargs: Kwargs, output: torch.Tensor
) -> torch.Tensor:
    """Give ghosts their owners' rows of what a linear layer made of owned ones; a forward hook."""
    return refresh_neighbors(output)


REFRESH = ModuleHookAdapter("interactions.[1-9]*", before=refreshed_features)
"""One exchange of a layer's input features, before every layer but the first."""

PRODUCTS = ModuleHookAdapter("products.*", before=owned_rows, after=padded_rows)
"""Products on owned rows."""

READOUTS = ModuleHookAdapter("readouts.*", before=owned_rows, after=padded_rows)
"""Readouts on owned rows."""


def refresh_of(layer: int) -> ModuleHookAdapter:
    """Return the adapter that refreshes the input of one layer."""
    return ModuleHookAdapter(f"interactions.{layer}", before=refreshed_features)


def narrow_refresh(layer: int) -> ModuleHookAdapter:
    """Return the adapter that refreshes what ``linear_up`` of one layer makes: fewer numbers than its input."""
    return ModuleHookAdapter(f"interactions.{layer}.linear_up", before=owned_rows, after=refreshed_output)


def last_product(layer: int) -> ModuleHookAdapter:
    """Return the adapter for the last product alone, all that a wide halo can spare."""
    return ModuleHookAdapter(f"products.{layer}", before=owned_rows, after=padded_rows)
