"""Derivatives of every output with respect to positions, for comparison.

Each output is contracted with fixed numbers that belong to global row ids (or to systems), so that the result is the
same on any number of ranks. For forces this is a second derivative: the one that training on forces needs.

Layer: validate.
"""

from __future__ import annotations

import re

import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import DistributedModel, ForceStrategy, ShardedBatch
from nvdd_core.validate.views import as_rows, projection

# How torch says that an operation has no derivative, or none of its derivative.
_LACKING = re.compile(
    r"derivative for '?[\w:.]+'? is not implemented"
    r"|marked with @once_differentiable"
    r"|no autograd formula was registered"
    r"|implement either the backward or vjp method"
    r"|double backwards? (?:is |are )?(?:not |currently not )?(?:supported|implemented|unsupported)"
    r"|(?:not|n't)(?: currently)? support double backward",
    re.IGNORECASE,
)


def lacks_derivative(error: BaseException) -> bool:
    """Tell whether an error is autograd's word that an operation has no derivative; any other is a fault."""
    return isinstance(error, RuntimeError) and _LACKING.search(str(error)) is not None


def gradients(
    evaluator: DistributedModel, sharded: ShardedBatch, wanted: frozenset[str]
) -> dict[str, torch.Tensor | None]:
    """Return the gradient (n_owned, 3) of each output's projection, None where it has none (collective).

    All ranks have one or none has.

    The domain must be current; positions in `sharded` are replaced by ones that require a gradient.
    """
    if evaluator.spec.force_strategy is not ForceStrategy.AUTOGRAD:
        return dict.fromkeys(wanted)
    positions = sharded.positions.detach().clone().requires_grad_(True)
    sharded.rows["positions"] = positions
    named = evaluator.differentiable(sharded, wanted).named()
    found: dict[str, torch.Tensor | None] = {}
    for name in sorted(wanted & named.keys()):
        found[name] = _gradient(name, named[name], evaluator, sharded, positions)
    return found


def everywhere(mesh: Mesh, here: bool) -> bool:
    """Tell whether something holds on every rank (collective)."""
    return all(flag for (flag,) in mesh.all_gather_ints([int(here)]))


def _gradient(
    name: str,
    value: torch.Tensor,
    evaluator: DistributedModel,
    sharded: ShardedBatch,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    if not everywhere(evaluator.mesh, value.is_floating_point() and value.requires_grad):
        return None
    per_node = evaluator.spec.per_row(name)
    flat = as_rows(value).double()
    numbers = row_numbers(sharded.ids) if per_node else projection(flat.shape[0], value.device)
    if not per_node and evaluator.mesh.rank > 0:
        numbers = numbers * 0.0  # the same on every rank, so it counts on one
    loss = numbers @ flat @ projection(flat.shape[1], value.device)
    gradient, lacking = None, False
    try:
        (gradient,) = torch.autograd.grad(loss, [positions], retain_graph=True, allow_unused=True)
    except RuntimeError as exc:
        if not lacks_derivative(exc):
            raise
        lacking = True
    if not everywhere(evaluator.mesh, not lacking):
        return None
    return torch.zeros_like(positions).cpu() if gradient is None else gradient.detach().cpu()


def row_numbers(ids: torch.Tensor) -> torch.Tensor:
    """Return a fixed number between -1 and 1 for each global row id."""
    return torch.sin(ids.double() * 12.9898 + 0.7)
