"""Structures, what ranks do with them, and s-dftd3 as the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import ase
import ase.build
import numpy as np
import torch
import torch.distributed as dist
from ase.units import Bohr, Hartree

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_dftd3.model import load

TRICLINIC = [[4.3, 0.0, 0.0], [1.2, 4.4, 0.0], [-0.9, 0.8, 4.1]]


@dataclass
class Found:
    """Results of whole systems, atoms in the order of the structure."""

    energy: float
    forces: np.ndarray
    stress: np.ndarray | None = None
    node_energy: np.ndarray | None = None


def structures() -> dict[str, ase.Atoms]:
    """Return small systems of several kinds; positions may lie outside the cell."""
    co2 = ase.Atoms(
        "CO2CO2",
        [[0, 0, 0], [1.16, 0, 0], [-1.16, 0.1, 0], [2.8, 2.8, 0.1], [2.8, 3.96, 0.1], [2.8, 1.64, 0.0]],
        cell=[5.6, 5.6, 5.6],
        pbc=True,
    )
    nacl = ase.build.bulk("NaCl", "rocksalt", a=5.64) * (2, 1, 1)
    nacl.rattle(0.1, seed=3)
    skewed = ase.Atoms(
        "TiOSi",
        np.array([[0.1, 0.2, 0.3], [0.55, 0.5, 0.4], [0.2, 0.7, 0.9]]) @ TRICLINIC,
        cell=TRICLINIC,
        pbc=True,
    )
    slab = co2.copy()
    slab.set_pbc([True, True, False])
    slab.set_cell([5.6, 5.6, 20.0])
    rod = co2 * (1, 1, 6)
    rod.rattle(0.05, seed=5)
    return {
        "ethanol": ase.build.molecule("CH3CH2OH"),
        "c60": ase.build.molecule("C60"),
        "atom": ase.Atoms("U", [[3.0, 2.0, 1.0]]),
        "co2": co2,
        "nacl": nacl,
        "skewed": skewed,
        "slab": slab,
        "rod": rod,
    }


def evaluate(atoms, functional="pbe", strategy="halo", dtype="float64", moves=(), **options) -> list[Found]:
    """Evaluate on all ranks of the group, if there is one, as it is and after each of `moves`."""
    mesh = Mesh.from_process_group() if dist.is_initialized() else Mesh.single()
    model = load(dtype=getattr(torch, dtype), device=torch.device("cpu"), functional=functional, **options)
    config = DomainConfig(strategy=StrategyKind(strategy), skin=0.3)
    distributed = DistributedModel(model, config, mesh)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    found = [_gathered(distributed, sharded, atoms, mesh)]
    for move in moves:
        sharded.positions.add_(torch.as_tensor(move)[sharded.ids])
        found.append(_gathered(distributed, sharded, atoms, mesh))
    return found


def _gathered(distributed, sharded, atoms, mesh) -> Found:
    wanted = {"energy", "forces", "node_energy"} | ({"stress"} if atoms.cell.rank == 3 else set())
    out = distributed(sharded, wanted)
    rows = torch.zeros(len(atoms), 4, dtype=torch.float64)
    rows[sharded.ids] = torch.cat([out.forces, out.node_energy[:, None].double()], dim=1)
    if mesh.size > 1:
        dist.all_reduce(rows)
    stress = None if out.stress is None else out.stress[0].numpy()
    return Found(float(out.energy[0]), rows[:, :3].numpy(), stress, rows[:, 3].numpy())


def s_dftd3(atoms, functional="pbe", cutoff=60.0 * Bohr, cn_cutoff=40.0 * Bohr, **damping) -> Found:
    """Evaluate with s-dftd3 itself; cutoffs in Angstrom."""
    from dftd3.interface import DispersionModel, RationalDampingParam

    periodic = bool(atoms.pbc.any())
    cell = (atoms.cell.array / Bohr, atoms.pbc) if periodic else ()
    model = DispersionModel(atoms.numbers, atoms.positions / Bohr, *cell)
    model.set_realspace_cutoff(cutoff / Bohr, 40.0, cn_cutoff / Bohr)
    parameters = (
        RationalDampingParam(s9=0.0, **damping) if damping else RationalDampingParam(method=functional)
    )
    out = model.get_dispersion(parameters, grad=True)
    stress = out["virial"] * Hartree / atoms.get_volume() if atoms.cell.rank == 3 else None
    return Found(float(out["energy"]) * Hartree, -out["gradient"] * Hartree / Bohr, stress)


def assert_equal(found: Found, truth: Found, energy: float, gradient: float) -> None:
    """Compare energies an atom, forces and stress, and check that shares of atoms add up."""
    n = len(truth.forces)
    assert abs(found.energy - truth.energy) / n < energy
    assert np.abs(found.forces - truth.forces).max() < gradient
    assert abs(found.node_energy.sum() - found.energy) < 1e-9 * n
    if truth.stress is not None and found.stress is not None:
        assert np.abs(found.stress - truth.stress).max() < gradient
