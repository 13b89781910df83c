"""A small system spread over the ranks of a test by hand: plans, and the same computation in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.tensor import (
    DispatchRules,
    ParticleHaloConfig,
    ParticleHaloMetadata,
    RowKind,
    ScatterMode,
    ShardTensor,
    StorageKind,
)


@dataclass(frozen=True)
class Rules:
    """A spec that is nothing but its rules."""

    scatter: ScatterMode = ScatterMode.HALO_CORRECTION
    system_reductions: bool = False
    storage: StorageKind = StorageKind.HALO

    @property
    def dispatch_rules(self) -> DispatchRules:
        return DispatchRules(self.storage, self.scatter, self.system_reductions)


def single(n: int) -> ParticleHaloMetadata:
    """Metadata of ``n`` rows on a mesh of one rank."""
    return ParticleHaloMetadata(HaloPlan.trivial(Mesh.single(), n))


def rows(
    t: torch.Tensor,
    meta: ParticleHaloMetadata,
    rules: Rules | None = None,
    n_systems: int | None = None,
    kind: RowKind | None = None,
) -> ShardTensor:
    """Wrap ``t`` with everything."""
    return ShardTensor.wrap(
        t,
        spec=rules or Rules(),
        meta=meta,
        config=ParticleHaloConfig(meta.plan.mesh, 1.0),
        n_systems=n_systems,
        kind=kind,
    )


@dataclass(frozen=True)
class Spread:
    """Rows of a global system on this rank: ``ids`` are the global ids of ``[owned | ghost]``."""

    mesh: Mesh
    meta: ParticleHaloMetadata
    ids: torch.Tensor

    @property
    def n_owned(self) -> int:
        return self.meta.n_owned

    @property
    def owned_ids(self) -> torch.Tensor:
        return self.ids[: self.n_owned]

    def local_of(self, global_rows: torch.Tensor) -> torch.Tensor:
        """Local row of each global row; -1 where this rank has none."""
        table = torch.full((64,), -1)
        table[self.ids] = torch.arange(len(self.ids))
        return table[global_rows]


def spread(owner: Sequence[int], ghosts: Sequence[Sequence[int]] | None = None) -> Spread:
    """Spread row ``i`` to rank ``owner[i]``; ``ghosts[r]`` are the global ids that rank ``r`` copies.

    Without ``ghosts`` each rank copies every row that it doesn't own.
    """
    mesh = Mesh.from_process_group()
    n = len(owner)
    mine = [[i for i in range(n) if owner[i] == r] for r in range(mesh.size)]
    if ghosts is None:
        ghosts = [[i for i in range(n) if owner[i] != r] for r in range(mesh.size)]
    by_owner = [[[i for i in ghosts[r] if owner[i] == s] for s in range(mesh.size)] for r in range(mesh.size)]
    me = mesh.rank
    send = [by_owner[r][me] for r in range(mesh.size)]
    index = torch.tensor([mine[me].index(i) for block in send for i in block], dtype=torch.int64)
    plan = HaloPlan(
        mesh, len(mine[me]), index, tuple(len(b) for b in send), tuple(len(b) for b in by_owner[me])
    )
    ids = torch.tensor([*mine[me], *(i for block in by_owner[me] for i in block)], dtype=torch.int64)
    return Spread(mesh, ParticleHaloMetadata(plan), ids)


def total(value: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, outside autograd."""
    out = value.detach().clone()
    dist.all_reduce(out)
    return out


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same float64 numbers on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def caught(call: Any) -> str:
    """Return the type and message of what ``call`` raises, "" when it returns."""
    try:
        call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""
