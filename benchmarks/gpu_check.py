"""Rule W on GPUs: every structure of the tests, LJ plugin and Toy2, one and all GPUs against one CPU process.

``python -m benchmarks.gpu_check`` prints the worst differences and exits 1 if any is above the rule's tolerance.
Layer: none (a script beside the package).
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import DomainParallel, Langevin, initial_velocities
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, Model, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_lj.model import load
from tests.cases import oracle
from tests.cases.models import Gate, TorchLJ, Toy2
from tests.cases.ranks import System
from tests.cases.test_rule_w import SYSTEMS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / name / "src") for name in ("toy2", "mpnn", "warp_kernel")]
LJ = {"epsilon": 1.0, "sigma": 1.0, "cutoff": 2.5}


def models(device: torch.device) -> dict[str, Model]:
    """The models to compare; Lennard-Jones is a plain torch one on the CPU, the plugin's on a GPU."""
    toy, gate = Toy2(), Gate()
    toy.device = gate.device = device
    where = {"dtype": torch.float64, "device": device}
    examples = {
        "inplace": import_module("nvdd_toy2.model").load(**where, style="inplace"),
        "mpnn": import_module("nvdd_mpnn.model").load(**where, cutoff=2.5),
    }
    if device.type == "cpu":  # the second layer in Warp, checked against the same in torch
        return {"lj": TorchLJ(), "toy2": toy, "gate": gate, "lj32": TorchLJ(), **examples, "warp": Toy2()}
    examples["warp"] = import_module("nvdd_warp_kernel.model").load(**where)
    double = load(dtype=torch.float64, device=device, **LJ)
    single = load(dtype=torch.float32, device=device, **LJ)
    return {"lj": double, "toy2": toy, "gate": gate, "lj32": single, **examples}


def one(
    mesh: Mesh, model: Model, system: System, config: DomainConfig
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Energy, forces in the file's order, stress."""
    sharded = ShardedBatch.scatter(Batch.from_ase(system.atoms()) if mesh.rank == 0 else None, mesh)
    periodic = all(system.pbc)
    out = DistributedModel(model, config, mesh)(
        sharded, {"energy", "forces"} | ({"stress"} if periodic else set())
    )
    forces = torch.zeros(sharded.n_global, 3, dtype=torch.float64, device=mesh.device)
    if out.forces is not None:
        forces[sharded.ids] = out.forces
    mesh.all_reduce_sum_(forces)
    stress = torch.zeros(1, 3, 3).double() if out.stress is None else out.stress.cpu()
    return float(out.energy), forces.cpu(), stress


def langevin(mesh: Mesh, device: torch.device, steps: int) -> torch.Tensor:
    """Positions after some Langevin steps."""
    pos, cell = oracle.fcc(6, 6, 6)
    system = System(pos, cell, (True, True, True))
    sharded = ShardedBatch.scatter(Batch.from_ase(system.atoms()) if mesh.rank == 0 else None, mesh)
    sharded.rows["masses"] = torch.ones_like(sharded.masses)
    sharded.rows["velocities"] = 1e-2 * initial_velocities(
        sharded.masses, sharded.ids, 300.0, 3, mesh.all_reduce_sum_
    )
    lj = models(device)["lj"]
    model = DistributedModel(lj, DomainConfig(skin=0.3), mesh)
    DomainParallel(Langevin(0.05, 300.0, 0.01, 5), model).run(sharded, steps)
    out = torch.zeros(sharded.n_global, 3, dtype=torch.float64, device=mesh.device)
    out[sharded.ids] = sharded.positions
    return mesh.all_reduce_sum_(out).cpu()


def on_rank(rank: int, world: int, folder: str) -> None:
    """Compare on one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = (
        Mesh.single(device) if world == 1 else Mesh.initialise(rank, world, device, f"file://{folder}/meet")
    )
    cpu, alone = torch.device("cpu"), Mesh.single()
    bad = 0
    references, tested = models(cpu), models(device)
    for name, reference in references.items():
        worst = [0.0, 0.0, 0.0]
        for label, system in SYSTEMS.items():
            right = one(alone, reference, system, DomainConfig())
            for config in [DomainConfig(skin=0.2, strategy=s) for s in StrategyKind] + [DomainConfig()]:
                found = one(mesh, tested[name], system, config)
                scale = 1.0 if name != "lj32" else max(1.0, float(right[1].abs().max()))
                diff = [
                    abs(found[0] - right[0])
                    / len(system.pos)
                    / (1.0 if name != "lj32" else max(1, abs(right[0]) / len(system.pos))),
                    float((found[1] - right[1]).abs().max()) / scale,
                    float((found[2] - right[2]).abs().max()) / scale,
                ]
                limits = (1e-11, 1e-9, 1e-9) if name != "lj32" else (1e-6, 1e-4, 1e-4)
                if any(d > limit for d, limit in zip(diff, limits, strict=True)):
                    bad += 1
                    print("WRONG", rank, name, label, config, diff, flush=True)
                worst = [max(a, b) for a, b in zip(worst, diff, strict=True)]
        if rank == 0:
            print(
                f"{world} GPU {name}: worst dE/N {worst[0]:.1e}, dF {worst[1]:.1e}, dS {worst[2]:.1e}",
                flush=True,
            )
    drift = float((langevin(mesh, device, 50) - langevin(alone, cpu, 50)).abs().max())
    if rank == 0:
        print(f"{world} GPU Langevin, 50 steps: worst dx {drift:.1e}", flush=True)
    bad += drift > 1e-6
    if mesh.size > 1:
        mesh.close()
    if bad:
        sys.exit(1)


def main() -> None:
    """Check one GPU, then all."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for world in sorted({1, torch.cuda.device_count()}):
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (world, folder), world)


if __name__ == "__main__":
    main()
