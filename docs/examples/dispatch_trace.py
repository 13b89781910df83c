"""What each operation on a ShardTensor met: a handler, or nothing. Also a sum by segment over ranks.

``python docs/examples/dispatch_trace.py``; it starts the two ranks itself.
"""

from __future__ import annotations

import rows  # the chain of six rows
import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import WorkerPool
from nvdd_core.spec import DistributionSpec, HaloStorage
from nvdd_core.tensor import DispatchTrace, ParticleHaloConfig, ParticleHaloMetadata, ShardTensor

SEGMENT = torch.tensor([0, 0, 1, 1, 1, 1])  # of each row: two rows in segment 0, four in segment 1


def work(mesh: Mesh, everywhere: bool) -> tuple[str, list[float]]:
    """Return the table of operations and the sums by segment as this rank sees them."""
    plan = rows.plan_of(mesh)
    ids = torch.tensor(rows.OWNED[mesh.rank] + rows.GHOST[mesh.rank])
    spec = DistributionSpec(storage=HaloStorage(scatter="halo_correction"), system_reductions=everywhere)
    meta, config = ParticleHaloMetadata(plan), ParticleHaloConfig(mesh, ghost_width=1.0)
    x = ShardTensor.wrap(ids.double() + 1, spec=spec, meta=meta, config=config, n_systems=2)
    sender, receiver = rows.edges(mesh.rank, "half")
    with DispatchTrace() as trace:
        message = x[sender] * 0.5  # a plain tensor: one entry an edge
        h = torch.zeros_like(x).index_add_(0, receiver, message)  # rows into rows
        squares = ShardTensor.promote((h * h).sqrt(), like=h)  # plain again, so say that these are rows
        total = torch.zeros(2, dtype=torch.float64).index_add_(0, SEGMENT[ids], squares)  # rows into segments
    return trace.table(), total.tolist()


def main() -> None:
    """Print the table of rank 0, then the sums of both ranks for both values of ``system_reductions``."""
    with WorkerPool(2) as pool:
        (table, shared), (_, same) = pool.run(work, True)
        (_, mine), (_, theirs) = pool.run(work, False)
    print(table)
    print(f"\nsystem_reductions=True   rank 0 {shared}  rank 1 {same}")
    print(f"system_reductions=False  rank 0 {mine}  rank 1 {theirs}")


if __name__ == "__main__":
    main()
