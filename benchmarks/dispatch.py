"""Cost of an operation on a ShardTensor over one on a plain tensor, where no handler applies.

``python -m benchmarks.dispatch`` prints microseconds an operation. Layer: none (a script beside the package).
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

    def cost(t: torch.Tensor) -> float:
        return min(timeit.repeat(lambda: [op(t) for op in ops], number=500, repeat=7)) / (500 * len(ops))

    print(f"plain {cost(plain) * 1e6:.2f} us, ShardTensor {cost(wrapped) * 1e6:.2f} us an operation")


if __name__ == "__main__":
    main()
