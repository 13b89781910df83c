"""Whether a model can take the rows at hand, said alike by any number of ranks.

Key object: `check_rows`. Invariant: elements that a model lacks are told as one process would tell them: the first
row of all ranks and their number, not those of one rank. Layer: runtime.
"""

from __future__ import annotations

import torch

from nvdd_core.comm import agreed
from nvdd_core.errors import InputError
from nvdd_core.runtime.model_api import Model
from nvdd_core.runtime.sharded import ShardedBatch


def check_rows(model: Model, sharded: ShardedBatch) -> None:
    """Refuse rows on another device than the model's, and elements that it lacks (collective).

    Raises
    ------
    InputError
        On every rank.
    """
    mesh = sharded.mesh
    try:
        with agreed(mesh):
            _check_device(model, sharded)
            model.check(sharded.numbers, sharded.ids)
    except InputError:  # the first rank's, which knows of its own rows only
        if mesh.size > 1:
            numbers, ids = _refused_rows(model, sharded)
            with agreed(mesh):
                if mesh.rank == 0 and ids.numel():
                    model.check(numbers, ids)
        raise


def _check_device(model: Model, sharded: ShardedBatch) -> None:
    if not _on_one_device(model, sharded):
        raise InputError(
            f"the model is on {model.device}, the atoms on {sharded.positions.device}; load both on the same device"
        )


def _on_one_device(model: Model, sharded: ShardedBatch) -> bool:
    return torch.device(model.device).type == sharded.positions.device.type


def _refused_rows(model: Model, sharded: ShardedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return on rank 0 numbers and ids of all rows whose element the model lacks, by id (collective)."""
    numbers, ids, mesh = sharded.numbers, sharded.ids, sharded.mesh
    kinds = torch.unique(numbers) if _on_one_device(model, sharded) else numbers[:0]
    lacking = [kind for kind in kinds.split(1) if _refuses(model, kind)]
    mine = torch.isin(numbers, torch.cat(lacking)) if lacking else torch.zeros_like(numbers, dtype=torch.bool)
    counts = [n for (n,) in mesh.all_gather_ints([int(mine.sum())])]
    send = [counts[mesh.rank], *[0] * (mesh.size - 1)]
    receive = counts if mesh.rank == 0 else [0] * mesh.size
    rows = mesh.all_to_all_rows(torch.stack([ids[mine], numbers[mine]], 1), send, receive, kind="gather")
    ids, numbers = rows[torch.argsort(rows[:, 0])].T.contiguous()
    return numbers, ids


def _refuses(model: Model, number: torch.Tensor) -> bool:
    try:
        model.check(number, torch.zeros_like(number))
    except InputError:
        return True
    return False
