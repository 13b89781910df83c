"""What is hooked into a live MACE model while several ranks evaluate it: torch's own forward hooks, no patch.

Key objects: `REFRESH`, `FEATURES`, `MESSAGES`, `SKIPS`, `PRODUCTS`, `READOUTS`, `of_layer`. Edges belong
to the rank that owns their receiver, so sums over edges are complete on owned rows and say nothing of ghost rows. What
works row by row gets owned rows only, up to the next layer, where one exchange gives ghosts what neighbours read.

Invariant: hooks look at rows only, never at what a block computes; every rank makes the same exchanges, also one
without rows or edges. Layer: plugin.
"""

from __future__ import annotations

import dataclasses
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


def summed_rows(local: int) -> int:
    """Return how many of `local` rows edges enter: the owned ones, except under a wide halo and outside a run."""
    counts = _counts()
    exchanges = current_dd_context().exchanges
    return counts[0] if exchanges and counts is not None and local == counts[1] else local


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


def owned_messages(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Have an interaction drop ghosts' rows once it has summed over edges; a forward pre-hook.

    Every interaction of mace can: it cuts messages and what joins them to ``lammps_natoms[0]`` rows where a
    ``lammps_class`` is given, which it uses for nothing else in a first layer, where mace exchanges nothing.
    """
    counts = _counts()
    if counts is None:
        return None
    natoms = counts[0], counts[1] - counts[0]
    return args, {**kwargs, "lammps_class": True, "lammps_natoms": natoms, "first_layer": True}


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


REFRESH = ModuleHookAdapter("interactions.[1-9]*.linear_up", after=refreshed_output)
"""One exchange before each layer but the first: of what ``linear_up`` makes of owned rows, all that neighbours read."""

FEATURES = ModuleHookAdapter("interactions.[1-9]*", before=refreshed_features)
"""The same of a layer's input, for layers in which neighbours read more than that, or ``linear_up`` widens it."""

MESSAGES = ModuleHookAdapter("interactions.*", before=owned_messages)
"""All that an interaction does after its sum over edges on owned rows."""

SKIPS = ModuleHookAdapter("interactions.*.[ls]*_[lrt]*", before=owned_rows)
"""Skip connections (``skip_tp``, ``skip_linear``, ``linear_res``), which interactions compute before that sum."""

PRODUCTS = ModuleHookAdapter("products.*", before=owned_rows)
"""Products on owned rows: the interactions give them no other, but elements are those of local rows."""

PADDED_PRODUCTS = ModuleHookAdapter("products.*", before=owned_rows, after=padded_rows)
"""Products on owned rows where other layers' features, which mace joins to theirs, have local rows."""

READOUTS = ModuleHookAdapter("readouts.*", before=owned_rows, after=padded_rows)
"""Readouts on owned rows; mace indexes their energies, one number a head, by local row."""


def of_layer(adapter: ModuleHookAdapter, layer: int) -> ModuleHookAdapter:
    """Return an adapter of all layers for one layer alone."""
    return dataclasses.replace(adapter, pattern=adapter.pattern.replace("*", str(layer), 1))
