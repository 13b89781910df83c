"""What one rank does in Rule W tests; imported by path on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ase
import numpy as np
import torch
import torch.distributed as dist

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from tests.cases.oracle import Array


@dataclass(frozen=True)
class System:
    """A structure as plain arrays, so that it can travel to ranks."""

    pos: Array
    cell: Array
    pbc: tuple[bool, bool, bool]
    symbol: str = "Ar"

    def atoms(self) -> ase.Atoms:
        return ase.Atoms(f"{self.symbol}{len(self.pos)}", positions=self.pos, cell=self.cell, pbc=self.pbc)


@dataclass
class Result:
    """Everything an evaluation gives, in the file's order."""

    energy: Array
    forces: Array
    stress: Array | None
    owned: list[int]
    ghosts: list[int]
    n_edges: int
    calls: dict[str, int] = field(default_factory=dict)


def mesh() -> Mesh:
    """The mesh of the ranks that the harness started, or of this process alone."""
    return Mesh.from_process_group() if dist.is_initialized() else Mesh.single()


def share(systems: Sequence[System], group: Mesh) -> ShardedBatch:
    """Scatter systems from rank 0."""
    batch = Batch.from_ase([s.atoms() for s in systems]) if group.rank == 0 else None
    return ShardedBatch.scatter(batch, group)


def collect(rows: torch.Tensor, ids: torch.Tensor, n: int, group: Mesh) -> Array:
    """Rows of all ranks in the order of ids, on every rank."""
    out = torch.zeros(n, *rows.shape[1:], dtype=torch.float64)
    out[ids] = rows.double()
    return group.all_reduce_sum_(out).numpy()


def evaluate(
    make_model: Any,
    systems: Sequence[System],
    config: DomainConfig | None = None,
    stress: bool = True,
    group: Mesh | None = None,
) -> Result:
    """Evaluate once on `group`, by default the ranks of the harness (or here, without ranks)."""
    group = mesh() if group is None else group
    sharded = share(systems, group)
    model = DistributedModel(make_model(), config, group)
    wanted = {"energy", "forces"} | ({"stress"} if stress else set())
    before = group.counter.snapshot()
    out = model(sharded, wanted)
    calls = dict(group.counter.since(before).calls)
    report = model.report()
    forces = collect(out.forces, sharded.ids, sharded.n_global, group)
    return Result(
        out.energy.numpy(),
        forces,
        None if out.stress is None else out.stress.numpy(),
        [r["owned"] for r in report],
        [r["ghost"] for r in report],
        sum(r["edges"] for r in report),
        calls,
    )


def assert_same(found: Result, right: Result, label: str, *, edges: bool = True) -> None:
    """Rule W in float64: 1e-11 an atom in energy, 1e-9 in forces and stress."""
    n = len(right.forces)
    assert np.abs(found.energy - right.energy).max() / n <= 1e-11, (label, found.energy, right.energy)
    assert np.abs(found.forces - right.forces).max() <= 1e-9, label
    if right.stress is not None:
        assert np.abs(found.stress - right.stress).max() <= 1e-9, label
    assert sum(found.owned) == n, label
    if edges:  # a list with a skin holds more
        assert found.n_edges == right.n_edges, label
