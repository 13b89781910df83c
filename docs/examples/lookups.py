"""Sharded storage on two ranks: owned rows only, read and added to by global id.

``python docs/examples/lookups.py``; it starts the two ranks itself.
"""

from __future__ import annotations

import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import WorkerPool
from nvdd_core.spec import DistributionSpec, ShardedStorage
from nvdd_core.tensor import GatherMetadata, ShardTensor

OWNED = [[0, 2, 4], [5, 3, 1]]  # global ids of each rank's rows, in any order
PADDING = 6  # as many as there are rows: reads zero, writes nowhere


def work(mesh: Mesh) -> dict[str, list[float]]:
    """Return what this rank reads and has after each step."""
    ids = torch.tensor(OWNED[mesh.rank])
    meta = GatherMetadata.build(mesh, ids)
    spec = DistributionSpec(storage=ShardedStorage())
    x = ShardTensor.wrap(ids * 10.0, spec=spec, gather_meta=meta)  # row i holds 10 i

    wanted = torch.tensor([[5, 0, PADDING], [0, 1, 0]][mesh.rank])
    read = x.index_select(0, wanted)  # a plain tensor, one entry for each id; x[wanted] is the same
    sums = torch.zeros_like(x).index_add_(0, wanted, torch.ones(3))
    return {"owned": x.to_local().tolist(), "read": read.tolist(), "added": sums.to_local().tolist()}


def main() -> None:
    """Print what each rank owns, reads and gets."""
    with WorkerPool(2) as pool:
        for rank, said in enumerate(pool.run(work)):
            print(f"rank {rank}  " + "  ".join(f"{name} {values}" for name, values in said.items()))


if __name__ == "__main__":
    main()
