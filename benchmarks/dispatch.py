"""Cost of an operation on a ShardTensor over one on a plain tensor.

``python -m benchmarks.dispatch`` prints microseconds an operation: for operations that no handler takes, and for a
toy layer of ten operations on 100 rows, two of them handled (an allocation and a scatter).
Layer: none (a script beside the package).
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.runtime import SPEC_MPNN_HALO
from nvdd_core.tensor import ParticleHaloConfig, ParticleHaloMetadata, ShardTensor


def main() -> None:
    """Measure eight ordinary operations on 100 rows."""
    mesh = Mesh.single()
    plain, weight = torch.randn(100, 8), torch.randn(8, 8)
    wrapped = ShardTensor.wrap(
        plain.clone(),
        spec=SPEC_MPNN_HALO,
        meta=ParticleHaloMetadata(HaloPlan.trivial(mesh, 100)),
        config=ParticleHaloConfig(mesh, 1.0),
        n_systems=2,
    )
    ops: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t + 1.0,
        lambda t: t * t,
        torch.tanh,
        lambda t: t.shape,
        lambda t: torch.nn.functional.linear(t, weight),
        lambda t: t.sum(0),
        torch.zeros_like,
        lambda t: torch.cat([t, t], 1),
    ]

    index, edges = torch.randint(100, (400,)), torch.randn(400, 8)

    def layer(t: torch.Tensor) -> torch.Tensor:
        summed = t.new_zeros(100, 8)
        summed.index_add_(0, index, edges)
        mixed = torch.tanh(summed * 0.1) + t
        gathered = t[index] * t.sum(0)
        return torch.cat([mixed, mixed * t], 1).sum() + gathered.sum()

    def cost(calls: list[Callable[[torch.Tensor], Any]], count: int, t: torch.Tensor) -> float:
        once = min(timeit.repeat(lambda: [call(t) for call in calls], number=500, repeat=7)) / 500
        return 1e6 * once / count

    whole: list[Callable[[torch.Tensor], Any]] = [layer]
    for name, calls, count in (("unhandled operations", ops, len(ops)), ("layer of ten", whole, 10)):
        before, after = cost(calls, count, plain), cost(calls, count, wrapped)
        print(
            f"{name}: plain {before:.2f} us, ShardTensor {after:.2f} us, {after - before:.2f} us more an operation"
        )


if __name__ == "__main__":
    main()
