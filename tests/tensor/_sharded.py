"""Eleven rows in sharded storage, for the tests of reading and adding by global id."""

from __future__ import annotations

from typing import Any

import torch

from nvdd_core.comm import Mesh
from nvdd_core.tensor import GatherMetadata, RowKind, ShardTensor, StorageKind
from tests.tensor._rows import Rules

T = torch.Tensor

N, F = 11, 3
SPEC = Rules(storage=StorageKind.SHARDED)
ORDER = torch.randperm(N, generator=torch.Generator().manual_seed(5))  # ids lie in no order anywhere
WORLDS = [1, 2, 3]


def share(size: int, rank: int) -> T:
    """Ids of a rank: uneven, and none on the last of three ranks."""
    owner = torch.arange(N) % max(size - 1, 1) if size == 3 else (torch.arange(N) * size // (N + 2))
    return ORDER[owner == rank]


def directory(mesh: Mesh | None = None) -> GatherMetadata:
    mesh = mesh or Mesh.from_process_group()
    return GatherMetadata.build(mesh, share(mesh.size, mesh.rank))


def shard(
    t: T, meta: GatherMetadata, spec: Rules | None = SPEC, n_systems: int | None = None, **options: Any
) -> ShardTensor:
    kind = options.pop("kind", RowKind.OWNED)
    return ShardTensor.wrap(t, spec=spec, gather_meta=meta, n_systems=n_systems, kind=kind, **options)


def wanted(rank: int, shape: tuple[int, ...], seed: int = 3, ids: int = N) -> T:
    """An index of this rank alone, with repetitions; ids up to ``N`` (exclusive), or with padding."""
    g = torch.Generator().manual_seed(seed + rank)
    return torch.randint(ids, shape, generator=g)


def gap(found: T, expected: T) -> float:
    found = found.detach().as_subclass(T)
    return float((found - expected).abs().max()) if found.numel() else 0.0
