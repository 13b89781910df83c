"""Derivatives of every output with respect to positions, for comparison.

Each output is contracted with fixed numbers that belong to global row ids (or to systems), so that the result is the
same on any number of ranks. For forces this is a second derivative: the one that training on forces needs.

Layer: validate.
"""

from __future__ import annotations

import torch

from nvdd_core.runtime import DistributedModel, ForceStrategy, Outputs, ShardedBatch
from nvdd_core.spec import OutputKind
from nvdd_core.validate.views import as_rows, projection

_ROWS = frozenset({"forces", "node_energy", "node_virial"})


def gradients(
    evaluator: DistributedModel, sharded: ShardedBatch, wanted: frozenset[str]
) -> dict[str, torch.Tensor | None]:
    """Return the gradient (n_owned, 3) of each output's projection, None where it has none (collective).

    The domain must be current; positions in `sharded` are replaced by ones that require a gradient.
    """
    if evaluator.spec.force_strategy is ForceStrategy.DIRECT:
        return dict.fromkeys(wanted)
    positions = sharded.positions.detach().clone().requires_grad_(True)
    sharded.rows["positions"] = positions
    named = _named(evaluator.differentiable(sharded, wanted))
    found: dict[str, torch.Tensor | None] = {}
    for name in sorted(wanted & named.keys()):
        found[name] = _gradient(name, named[name], evaluator, sharded, positions)
    return found


def _named(out: Outputs) -> dict[str, torch.Tensor]:
    named = {"energy": out.energy, "forces": out.forces, "stress": out.stress}
    named |= {"node_energy": out.node_energy, "node_virial": out.node_virial, **out.extra}
    return {name: value for name, value in named.items() if value is not None}


def _gradient(
    name: str,
    value: torch.Tensor,
    evaluator: DistributedModel,
    sharded: ShardedBatch,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    if not (value.is_floating_point() and value.requires_grad):
        return None
    per_node = name in _ROWS or evaluator.spec.output(name).kind is OutputKind.PER_NODE
    numbers = row_numbers(sharded.ids) if per_node else projection(value.shape[0], value.device)
    if not per_node and evaluator.mesh.rank > 0:
        numbers = numbers * 0.0  # the same on every rank, so it counts on one
    flat = as_rows(value).double()
    loss = numbers @ flat @ projection(flat.shape[1], value.device)
    try:
        (gradient,) = torch.autograd.grad(loss, [positions], retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as exc:
        if "derivative" in str(exc) or "backward" in str(exc) or "grad" in str(exc):
            return None  # an operation without a second derivative, on every rank alike
        raise
    return torch.zeros_like(positions).cpu() if gradient is None else gradient.detach().cpu()


def row_numbers(ids: torch.Tensor) -> torch.Tensor:
    """Return a fixed number between -1 and 1 for each global row id."""
    return torch.sin(ids.double() * 12.9898 + 0.7)
