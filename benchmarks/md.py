"""One measurement of argon dynamics under nvdd, in processes of its own.

``python benchmarks/md.py --atoms 32000 --ranks 2`` prints one JSON object: steps/s, seconds per phase and rank,
peak memory beyond the interpreter's, collectives a step. `measure` runs that as a subprocess.

Invariant: one thread a rank on a CPU, so that ranks and LAMMPS are compared core for core.
Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LATTICE = 5.26  # A, fcc argon


def measure(atoms: int, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Run one measurement in fresh processes; options are the flags below, with underscores."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, f"--atoms={atoms}", f"--ranks={ranks}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def argon(atoms: int) -> Any:
    """Return fcc argon of about `atoms` atoms as ASE Atoms."""
    import numpy as np
    from ase import Atoms

    n = max(1, round((atoms / 4) ** (1 / 3)))
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    grid = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    pos = ((grid[:, None] + basis).reshape(-1, 3)) * LATTICE
    return Atoms(numbers=np.full(len(pos), 18), positions=pos, cell=np.eye(3) * n * LATTICE, pbc=True)


def peak_mb() -> float:
    """Peak resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def on_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; rank 0 writes the result."""
    import torch

    from nvdd_core.comm import Mesh
    from nvdd_core.runtime import resolve_device

    if args.device == "cpu":
        torch.set_num_threads(1)
    device = resolve_device(args.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.ranks == 1:
        mesh = Mesh.single(device)
    else:
        mesh = Mesh.initialise(rank, args.ranks, device, f"file://{folder}/meet")
    try:
        result = _measure(args, mesh)
    finally:
        mesh.close()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))


def _measure(args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    import torch

    from nvdd_core.dynamics import DomainParallel, VelocityVerlet, initial_velocities
    from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
    from nvdd_lj.model import load

    def start(atoms: Any) -> tuple[Any, Any]:
        sharded = ShardedBatch.scatter(None if atoms is None else Batch.from_ase(atoms), mesh)
        sharded.rows["velocities"] = initial_velocities(
            sharded.masses, sharded.ids, args.temperature, 1, mesh.all_reduce_sum_
        )
        lj = load(
            dtype=getattr(torch, args.dtype),
            device=mesh.device,
            epsilon=args.epsilon,
            sigma=args.sigma,
            cutoff=args.cutoff,
        )
        model = DistributedModel(lj, DomainConfig(skin=args.skin), mesh)
        return sharded, DomainParallel(VelocityVerlet(args.dt), model)

    sharded, runner = start(argon(500) if mesh.rank == 0 else None)
    runner.run(sharded, 5)  # compiles kernels, starts libraries
    before = peak_mb()
    sharded, runner = start(_source(args) if mesh.rank == 0 else None)
    runner.run(sharded, args.warm_up)
    model, rates, tally = runner.model, [], mesh.counter.snapshot()
    rebuilds = model.n_rebuilds
    seconds: list[dict[str, float]] = []
    for _ in range(args.repeats):
        model.timer.reset()
        mesh.barrier()
        begin = time.perf_counter()
        runner.run(sharded, args.steps)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        mesh.barrier()
        rates.append(args.steps / (time.perf_counter() - begin))
        seconds.append(model.timer.seconds())
    best = max(range(args.repeats), key=lambda k: rates[k])
    spent = mesh.counter.since(tally)
    total = args.steps * args.repeats
    mine = {
        "ms_per_step": {name: 1e3 * s / args.steps for name, s in seconds[best].items()},
        "peak_mb": peak_mb() - before,
        "owned": sharded.n_owned,
        "ghost": model.domain.plan.n_ghost,
        "collectives_per_step": {name: n / total for name, n in spent.calls.items()},
        "bytes_per_step": sum(spent.bytes.values()) / total,
    }
    if mesh.device.type == "cuda":
        mine["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return {
        "atoms": sharded.n_global,
        "ranks": mesh.size,
        "device": args.device,
        "dtype": args.dtype,
        "steps_per_s": rates[best],
        "all_steps_per_s": rates,
        "atom_steps_per_s": rates[best] * sharded.n_global,
        "rebuilds_per_step": (model.n_rebuilds - rebuilds) / total,
        "per_rank": mesh.all_gather_objects(mine),
    }


def _source(args: argparse.Namespace) -> Any:
    if not args.file:
        return argon(args.atoms)
    import ase.io

    return ase.io.read(args.file)


def main() -> None:
    """Start the ranks and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atoms", type=int, default=32_000)
    parser.add_argument(
        "--file", default="", help="read the structure from here on rank 0 instead of making it"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--skin", type=float, default=2.0)
    parser.add_argument("--dt", type=float, default=2.0)
    parser.add_argument("--temperature", type=float, default=94.0)
    parser.add_argument("--epsilon", type=float, default=0.0103)
    parser.add_argument("--sigma", type=float, default=3.4)
    parser.add_argument("--cutoff", type=float, default=8.5)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory() as folder:
        if args.ranks == 1:
            on_rank(0, args, folder)
        else:
            from torch.multiprocessing.spawn import spawn

            spawn(on_rank, (args, folder), args.ranks)
        print(Path(folder, "result.json").read_text())


if __name__ == "__main__":
    main()
