"""Rule W on GPUs for Ewald, PME (both engines) and DFT-D3: one and all GPUs against one CPU process.

``python -m benchmarks.plugin_check FILE`` first writes one CPU process's numbers to FILE if it isn't there, which may
be done on another machine, then prints the worst differences (float64) over the conformance kit's structures and the
strategies, and exits 1 if any is above the rule's tolerance. The CPU's numbers are what the plugins' tests hold to
other people's codes. Layer: none (a script beside the package).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase
import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.mace_check import LIMITS, differences, settled
from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import default_structures

Numbers = tuple[float, torch.Tensor, torch.Tensor]
Case = tuple[Callable[..., Any], dict[str, Any], dict[str, ase.Atoms], set[str]]


def cases() -> dict[str, Case]:
    """Loader, options, structures and outputs of each model."""
    from nvdd_dftd3.conformance import Profile as D3
    from nvdd_dftd3.model import load as load_dftd3
    from nvdd_pme.conformance import EwaldProfile, Profile
    from nvdd_pme.model import load_ewald, load_pme

    def structures(profile: Any) -> dict[str, ase.Atoms]:
        return default_structures(float(profile.options["cutoff"]), profile.symbol, profile.spacing)

    ions = {name: atoms for name, atoms in structures(Profile).items() if atoms.pbc.all()}
    pairs, rows = {"energy", "forces", "stress"}, {"energy", "forces", "stress", "charge_gradient"}
    pme = dict(Profile.options)
    return {
        "ewald": (load_ewald, dict(EwaldProfile.options), ions, pairs),
        "ewald, dE/dq": (load_ewald, dict(EwaldProfile.options), ions, rows),
        "pme replicated": (load_pme, pme | {"engine": "replicated"}, ions, pairs),
        "pme replicated, dE/dq": (load_pme, pme | {"engine": "replicated"}, ions, rows),
        "pme sharded": (load_pme, pme | {"engine": "sharded"}, ions, pairs),
        "pme sharded, dE/dq": (load_pme, pme | {"engine": "sharded"}, ions, rows),
        "dftd3": (load_dftd3, dict(D3.options), structures(D3), pairs),
    }


def evaluate(mesh: Mesh, model: Any, atoms: ase.Atoms, wanted: set[str], strategy: StrategyKind) -> Numbers:
    """Energy, forces (and dE/dq, another column) in the file's order, stress."""
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    wanted = wanted if atoms.pbc.all() else wanted - {"stress"}
    out = settled(DistributedModel(model, DomainConfig(strategy=strategy, skin=0.2), mesh), sharded, wanted)
    columns = torch.zeros(sharded.n_global, 4, dtype=torch.float64, device=mesh.device)
    if out.forces is not None:
        columns[sharded.ids, :3] = out.forces
    if "charge_gradient" in wanted:
        columns[sharded.ids, 3] = out.extra["charge_gradient"]
    mesh.all_reduce_sum_(columns)
    stress = torch.zeros(3, 3) if out.stress is None else out.stress[0].cpu()
    return float(out.energy), columns.cpu(), stress


def write(path: Path) -> None:
    """Write the numbers of one CPU process."""
    alone, found = Mesh.single(), {}
    for name, (load, options, structures, wanted) in cases().items():
        model = load(dtype=torch.float64, device=torch.device("cpu"), **options)
        for label, atoms in structures.items():
            found[f"{name}: {label}"] = evaluate(alone, model, atoms, wanted, StrategyKind.HALO)
    torch.save(found, path)


def on_rank(rank: int, world: int, folder: str, path: Path) -> None:
    """Compare on one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = (
        Mesh.single(device) if world == 1 else Mesh.initialise(rank, world, device, f"file://{folder}/meet")
    )
    right, bad = torch.load(path), 0
    for name, (load, options, structures, wanted) in cases().items():
        worst = np.zeros(3)
        try:
            model = load(dtype=torch.float64, device=device, **options)
            for label, atoms in structures.items():
                for strategy in StrategyKind:
                    found = evaluate(mesh, model, atoms, wanted, strategy)
                    worst = np.maximum(worst, differences(found, right[f"{name}: {label}"], len(atoms)))
        except Exception as error:  # the other models are still worth trying
            print(f"{world} GPU {name}, rank {rank}: {error!r:.1500}", flush=True)
            worst[:] = np.inf
        bad += bool((worst > LIMITS).any())
        if rank == 0:
            print(f"{world} GPU {name}: dE/N {worst[0]:.1e} dF {worst[1]:.1e} dS {worst[2]:.1e}", flush=True)
    mesh.close()
    if bad:
        sys.exit(1)


def main() -> None:
    """Check one GPU, then all."""
    path = Path(sys.argv[1])
    if not path.exists():
        write(path)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for world in sorted({1, torch.cuda.device_count()} - {0}):
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (world, folder, path), world)


if __name__ == "__main__":
    main()
