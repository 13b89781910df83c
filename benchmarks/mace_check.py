"""Rule W on GPUs for MACE: every interaction, structure and strategy, one and all GPUs, against mace's own calculator.

``python -m benchmarks.mace_check`` prints the worst differences (float64) and exits 1 if any is above the rule's
tolerance. Then ASE's calculator by worker processes, one a GPU. Layer: none (a script beside the package).
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

LIMITS = (1e-11, 1e-9, 1e-9)  # eV/atom, eV/A, eV/A^3
Numbers = tuple[float, Any, Any]


def reference(module: torch.nn.Module, atoms: Any) -> Numbers:
    """Energy, forces and stress by mace's calculator on a GPU."""
    from nvdd_mace.foreign import imported

    calculator = imported("mace.calculators").MACECalculator(
        models=module, device="cuda", default_dtype="float64"
    )
    atoms = atoms.copy()
    atoms.calc = calculator
    stress = atoms.get_stress(voigt=False) if atoms.pbc.all() else np.zeros((3, 3))
    return float(atoms.get_potential_energy()), atoms.get_forces(), stress


def by_nvdd(mesh: Any, model: Any, atoms: Any, strategy: Any) -> Numbers:
    """The same on the ranks of a mesh."""
    from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch

    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    wanted = {"energy", "forces"} | ({"stress"} if atoms.pbc.all() else set())
    out = settled(DistributedModel(model, DomainConfig(strategy=strategy, skin=0.2), mesh), sharded, wanted)
    forces = torch.zeros(sharded.n_global, 3, dtype=torch.float64, device=mesh.device)
    if out.forces is not None:
        forces[sharded.ids] = out.forces
    mesh.all_reduce_sum_(forces)
    stress = np.zeros((3, 3)) if out.stress is None else out.stress[0].cpu().numpy()
    return float(out.energy), forces.cpu().numpy(), stress


def settled(run: Any, sharded: Any, wanted: set[str]) -> Any:
    """Return the outputs of a fourth evaluation, which is captured in a CUDA graph; refuse one that can't be."""
    warnings.filterwarnings("error", message=".*could not be captured")
    with run.steady("on"):
        for _ in range(3):
            run(sharded, wanted)
        return run(sharded, wanted)


def on_rank(rank: int, world: int, folder: str) -> None:
    """Compare on one rank."""
    from nvdd_core.comm import Mesh
    from nvdd_core.spec import StrategyKind
    from nvdd_core.testing import default_structures
    from nvdd_mace.conformance import INTERACTIONS, random_module
    from nvdd_mace.model import load

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = (
        Mesh.single(device) if world == 1 else Mesh.initialise(rank, world, device, f"file://{folder}/meet")
    )
    structures = default_structures(3.0, ("O", "Si"), 1.9)
    bad = False
    for interaction in INTERACTIONS:
        path = Path(folder, f"{interaction}_{rank}.model")
        module = random_module(interaction)
        torch.save(module, path)
        model = load(dtype=torch.float64, device=device, checkpoint=str(path), trust=True)
        worst = np.zeros(3)
        for atoms in structures.values():
            right = reference(module.to(device), atoms)
            for strategy in StrategyKind:
                found = by_nvdd(mesh, model, atoms, strategy)
                worst = np.maximum(worst, differences(found, right, len(atoms)))
        bad |= bool((worst > LIMITS).any())
        if rank == 0:
            print(
                f"{world} GPU {interaction}: dE/N {worst[0]:.1e} dF {worst[1]:.1e} dS {worst[2]:.1e}",
                flush=True,
            )
    mesh.close()
    if bad:
        sys.exit(1)


def differences(found: Numbers, right: Numbers, n: int) -> list[float]:
    """Largest differences of energy an atom, forces and stress."""
    pairs = zip(found[1:], right[1:], strict=True)
    return [abs(found[0] - right[0]) / n, *(float(np.abs(a - b).max()) for a, b in pairs)]


def calculator(world: int, folder: str) -> bool:
    """Compare ASE's calculator by worker processes, one a GPU; return whether it is right."""
    from nvdd_core.interop.ase import DomainCalculator
    from nvdd_core.testing import default_structures
    from nvdd_mace.conformance import random_module

    path = str(Path(folder, "ase.model"))
    module = random_module()
    torch.save(module, path)
    atoms = default_structures(3.0, ("O", "Si"), 1.9)["crystal"]
    right = reference(module.to("cuda"), atoms)
    options = {"checkpoint": path, "trust": True}
    with DomainCalculator("nvdd_mace.model:load", ranks=world, device="cuda", options=options) as found:
        atoms.calc = found
        numbers = float(atoms.get_potential_energy()), atoms.get_forces(), atoms.get_stress(voigt=False)
    worst = differences(numbers, right, len(atoms))
    print(
        f"DomainCalculator, {world} GPU: dE/N {worst[0]:.1e} dF {worst[1]:.1e} dS {worst[2]:.1e}", flush=True
    )
    return all(w < limit for w, limit in zip(worst, LIMITS, strict=True))


def main() -> None:
    """Check one GPU, then all."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    right = True
    for world in sorted({1, torch.cuda.device_count()}):
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (world, folder), world)
            right &= calculator(world, folder)
    if not right:
        sys.exit(1)


if __name__ == "__main__":
    main()
