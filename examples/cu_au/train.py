"""Train a small MACE on EMT: writes ``cu_au.model`` and ``report.json`` beside this file.

    python examples/cu_au/train.py [FOLDER]

Data, training and report take seven minutes of one CPU core. It is an ordinary training by mace-torch's own
modules in plain torch and knows nothing of nvdd; a file of ``mace_run_train`` is used in the same way.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.emt import EMT
from data import held_out, training
from mace import data, modules
from mace.tools import torch_geometric
from mace.tools.utils import AtomicNumberTable

SEED = 3
CUTOFF = 4.5  # A
EPOCHS = 60
BATCH = 4  # structures
RATE = 0.01
ENERGY_WEIGHT = 10.0  # of (eV/atom)^2 against (eV/A)^2
ELEMENTS = {"Cu": 29, "Au": 79}


def isolated(symbol: str) -> float:
    """Return the energy of an atom alone."""
    return float(EMT().get_potential_energy(Atoms(symbol)))


def graphs(structures: list[Atoms]) -> list[data.AtomicData]:
    """Return what mace's loader reads; the cutoff is the model's."""
    table = AtomicNumberTable(sorted(ELEMENTS.values()))
    keys = data.KeySpecification(info_keys={"energy": "energy"}, arrays_keys={"forces": "forces"})
    found = []
    for atoms in structures:
        bare = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        bare.info["energy"], bare.arrays["forces"] = atoms.get_potential_energy(), atoms.get_forces()
        configuration = data.config_from_atoms(bare, key_specification=keys)
        found.append(data.AtomicData.from_config(configuration, z_table=table, cutoff=CUTOFF))
    return found


def make_model(structures: list[Atoms], training: list[data.AtomicData]) -> torch.nn.Module:
    """Return a model whose output begins at the mean binding energy and the forces' usual size."""
    from e3nn import o3  # after mace, without which e3nn 0.4.4 can't read its tables

    alone = {number: isolated(symbol) for symbol, number in ELEMENTS.items()}
    bound = sum(a.get_potential_energy() - sum(alone[z] for z in a.numbers) for a in structures)
    forces = np.concatenate([a.get_forces() for a in structures])
    n_atoms = len(forces)
    return modules.ScaleShiftMACE(
        r_max=CUTOFF,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=len(ELEMENTS),
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([alone[z] for z in sorted(ELEMENTS.values())]),
        atomic_numbers=sorted(ELEMENTS.values()),
        avg_num_neighbors=sum(g.edge_index.shape[1] for g in training) / n_atoms,
        correlation=2,
        radial_MLP=[32, 32],
        atomic_inter_scale=float(np.median(np.linalg.norm(forces, axis=1))),
        atomic_inter_shift=bound / n_atoms,
        pair_repulsion=True,  # atoms that collide part, whatever the rest makes of distances it never saw
    )


def loader(graphs: list[data.AtomicData], *, shuffle: bool = False) -> Any:
    """Return batches, in an order that torch's seed decides."""
    return torch_geometric.dataloader.DataLoader(graphs, batch_size=BATCH, shuffle=shuffle)


def errors(model: torch.nn.Module, batch: Any, *, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return errors of energies per atom, eV, and of forces, eV/A."""
    found = model(batch.to_dict(), training=training)
    sizes = batch.ptr[1:] - batch.ptr[:-1]
    return (found["energy"] - batch.energy) / sizes, found["forces"] - batch.forces


def huber(errors: torch.Tensor) -> torch.Tensor:
    """Return a mean square in which the large errors of rare collisions count by size only."""
    return 2.0 * torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), delta=0.5)


def fit(model: torch.nn.Module, graphs: list[data.AtomicData]) -> None:
    """Adam with a rate that falls to zero by a cosine."""
    batches = loader(graphs, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            energy, forces = errors(model, batch, training=True)
            loss = ENERGY_WEIGHT * huber(energy) + huber(forces)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        seconds = time.perf_counter() - start
        print(
            f"epoch {epoch + 1}/{EPOCHS}  loss {torch.stack(losses).mean():.5f}  {seconds:.0f} s", flush=True
        )


def rmse(model: torch.nn.Module, structures: list[Atoms]) -> dict[str, float]:
    """Return root mean square errors over all atoms and structures."""
    found = [errors(model, batch, training=False) for batch in loader(graphs(structures))]
    energy, forces = (torch.cat(part).detach() for part in zip(*found, strict=True))
    reference = np.concatenate([a.get_forces() for a in structures])
    return {
        "energy_mev_per_atom": round(1e3 * float(energy.square().mean().sqrt()), 2),
        "forces_mev_per_a": round(1e3 * float(forces.square().mean().sqrt()), 1),
        "rms_force_mev_per_a": round(1e3 * float(np.sqrt((reference**2).mean())), 1),
    }


def main() -> None:
    """Train and write."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(SEED)
    structures = training()
    known = graphs(structures)
    model = make_model(structures, known)
    print(
        f"{len(structures)} structures, {sum(p.numel() for p in model.parameters())} parameters", flush=True
    )
    fit(model, known)
    torch.save(model, folder / "cu_au.model")
    report = {f"{t} K": rmse(model, held_out(t)) for t in (300, 1000, 1500, 2000)}
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="ascii")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
