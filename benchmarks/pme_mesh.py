"""Memory, time and traffic of PME's mesh engines: ``python -m benchmarks.pme_mesh --mesh 256 --ranks 1 2 4``.

Each line is one number of ranks: the most that the resident memory of a rank rose above what it was before the
evaluation (energy, forces and stress, shared memory between ranks included), in MB and in units of the rank's part of
the mesh; seconds of the forward and of the backward pass, the best of a few; calls and sent bytes an evaluation.
Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn


def peak_mb() -> float:
    """Return the most resident memory since it was last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def on_rank(rank: int, world: int, folder: str, args: argparse.Namespace, name: str) -> None:
    """Evaluate one engine on one rank; rank 0 prints."""
    from nvdd_core.comm import Mesh
    from nvdd_core.runtime.context import DomainContext, enter_context
    from nvdd_pme.reciprocal import ReplicatedMesh
    from nvdd_pme.sharded import ShardedMesh

    torch.set_num_threads(1)
    mesh = Mesh.single() if world == 1 else Mesh.initialise(rank, world, init_method=f"file://{folder}/meet")
    engines = {points: ShardedMesh() if name == "sharded" else ReplicatedMesh() for points in (16, args.mesh)}
    generator = torch.Generator().manual_seed(0)
    length, n = 100.0, args.charges
    positions = length * torch.rand(n, 3, dtype=torch.float64, generator=generator)
    charges = torch.randn(n, dtype=torch.float64, generator=generator)
    mine = (positions[:, 2] * world / length).long() == rank  # by place, but not as the slabs lie

    def evaluate(points: int) -> tuple[float, float]:
        x = positions[mine].requires_grad_()
        cell = (length * torch.eye(3, dtype=torch.float64)).requires_grad_()
        mesh.barrier()
        begun = time.perf_counter()
        share = engines[points](x, charges[mine], cell, alpha=0.4, mesh=(points,) * 3, order=5)
        between = time.perf_counter()
        torch.autograd.grad(share, (x, cell))
        mesh.barrier()
        return between - begun, time.perf_counter() - between

    with enter_context(DomainContext(is_distributed=world > 1, mesh=mesh)):
        evaluate(16)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
        before, tally = peak_mb(), mesh.counter.snapshot()
        times = [evaluate(args.mesh)]
        counted, risen = mesh.counter.since(tally), peak_mb() - before
        times += [evaluate(args.mesh) for _ in range(args.repeat - 1)]
    worst = mesh.all_reduce_max_(torch.tensor([risen], dtype=torch.float64))
    if rank == 0:
        part = args.mesh**3 * 8 / world / 2**20
        forward, backward = min(times, key=sum)
        calls = {k: (counted.calls[k], round(counted.bytes.get(k, 0) / 1e6, 2)) for k in counted.calls}
        print(
            f"{name:10s} {world} ranks: {float(worst):6.0f} MB ({float(worst) / part:4.1f} parts), "
            f"{forward:.3f} + {backward:.3f} s, calls and MB: {calls}",
            flush=True,
        )
    mesh.close()


def main() -> None:
    """Measure each engine on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=int, default=256)
    parser.add_argument("--charges", type=int, default=20000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", nargs="+", default=["sharded", "replicated"])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"mesh {args.mesh}^3 ({args.mesh**3 * 8 / 2**20:.0f} MB), {args.charges} charges, order 5")
    for name in args.engines:
        for world in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                spawn(on_rank, (world, folder, args, name), world)


if __name__ == "__main__":
    main()
