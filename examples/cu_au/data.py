"""Copper, gold and their alloys with energies and forces of ASE's EMT: what `train.py` learns from.

EMT (effective medium theory) is a classical potential that ASE computes itself. Here it plays the part of a
quantum-chemistry program: cheap enough to make hundreds of structures in a minute or two.
``python examples/cu_au/data.py`` writes ``crystal.xyz``, where the demonstration's dynamics starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import ase.build
import numpy as np
from ase import Atoms, units
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.cluster import Octahedron
from ase.md.langevin import Langevin

LATTICE = {"Cu": 3.59, "Au": 4.06}  # A, of EMT
GOLD = (0.0, 0.25, 0.5, 0.75, 1.0)  # fractions of atoms
TEMPERATURES = (300.0, 800.0, 1500.0, 2500.0)  # K
TIMESTEP = 4.0  # fs


def mixed(atoms: Atoms, gold: float, rng: np.random.Generator) -> Atoms:
    """Make that fraction of the atoms gold, chosen at random."""
    chosen = rng.permutation(len(atoms))[: round(gold * len(atoms))]
    atoms.symbols[:] = "Cu"
    atoms.symbols[chosen] = "Au"
    return atoms


def lattice_constant(gold: float) -> float:
    """Return that between copper's and gold's, in proportion."""
    return (1.0 - gold) * LATTICE["Cu"] + gold * LATTICE["Au"]


def crystal(gold: float, rng: np.random.Generator, cells: int = 2, scale: float = 1.0) -> Atoms:
    """Return a face-centred cubic crystal whose lattice constant is `scale` times the usual one."""
    atoms = ase.build.bulk("Cu", "fcc", a=scale * lattice_constant(gold), cubic=True).repeat(cells)
    return mixed(atoms, gold, rng)


def slab(gold: float, rng: np.random.Generator) -> Atoms:
    """Return four layers in vacuum."""
    atoms = ase.build.fcc111("Cu", (3, 3, 4), a=lattice_constant(gold), vacuum=6.0, periodic=True)
    return mixed(atoms, gold, rng)


def cluster(gold: float, rng: np.random.Generator) -> Atoms:
    """Return 38 atoms in open space."""
    atoms = Octahedron("Cu", 4, cutoff=1, latticeconstant=lattice_constant(gold))
    return mixed(Atoms(atoms.symbols, atoms.positions), gold, rng)


def labelled(atoms: Atoms) -> Atoms:
    """Return a copy that knows its energy and forces."""
    atoms = atoms.copy()
    atoms.calc = EMT()
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


def heated(
    atoms: Atoms, temperature: float, rng: np.random.Generator, frames: int, every: int = 50
) -> Iterator[Atoms]:
    """Yield frames of Langevin dynamics that starts on the lattice; it melts where it is hot."""
    atoms = atoms.copy()
    atoms.calc = EMT()
    noise = np.random.RandomState(int(rng.integers(2**31)))
    dynamics = Langevin(
        atoms,
        TIMESTEP * units.fs,
        temperature_K=temperature,
        friction=0.03 / units.fs,
        fixcm=False,
        rng=noise,
    )
    for _ in range(frames):
        dynamics.run(every)
        yield labelled(atoms)


def strained(gold: float, rng: np.random.Generator) -> Atoms:
    """Return a crystal with a strain of some percent and atoms off their sites."""
    atoms = crystal(gold, rng, scale=rng.uniform(0.94, 1.07))
    strain = rng.normal(scale=0.03, size=(3, 3))
    atoms.set_cell(atoms.cell @ (np.eye(3) + (strain + strain.T) / 2.0), scale_atoms=True)
    atoms.positions += rng.normal(scale=rng.choice([0.0, 0.02, 0.1]), size=(len(atoms), 3))
    return labelled(atoms)


def pushed(gold: float, rng: np.random.Generator) -> Atoms:
    """Return a crystal in which two neighbours are closer than dynamics brings them, so that they learn to part."""
    atoms = crystal(gold, rng)
    atoms.positions += rng.normal(scale=0.1, size=(len(atoms), 3))
    gaps = atoms.get_distances(0, range(1, len(atoms)), mic=True, vector=True)
    nearest = int(np.linalg.norm(gaps, axis=1).argmin())
    gap = gaps[nearest]
    atoms.positions[1 + nearest] += gap * (rng.uniform(1.5, 2.1) / np.linalg.norm(gap) - 1.0)
    return labelled(atoms)


def training(seed: int = 1) -> list[Atoms]:
    """Return crystals and melts, some with a vacancy, strained cells, collisions, slabs, clusters, pairs."""
    rng = np.random.default_rng(seed)
    found: list[Atoms] = []
    for gold, temperature, scale in itertools.product(GOLD, TEMPERATURES, (0.98, 1.02, 1.06)):
        atoms = crystal(gold, rng, scale=scale)
        if rng.random() < 0.3:
            del atoms[0]
        found += heated(atoms, temperature, rng, frames=2)
    for gold in GOLD:
        found += [strained(gold, rng) for _ in range(12)]
        found += [pushed(gold, rng) for _ in range(4)]
        for temperature in (300.0, 1000.0):
            found += heated(slab(gold, rng), temperature, rng, frames=2)
            found += heated(cluster(gold, rng), temperature, rng, frames=2)
    for pair in ("Cu2", "CuAu", "Au2"):
        found += [labelled(Atoms(pair, [[0, 0, 0], [d, 0, 0]])) for d in np.arange(2.1, 4.5, 0.2)]
    return found


def held_out(temperature: float, seed: int = 2) -> list[Atoms]:
    """Return frames of larger crystals, or liquids, that no training saw."""
    rng = np.random.default_rng(seed)
    found: list[Atoms] = []
    for gold in (0.0, 0.5, 1.0):
        found += heated(crystal(gold, rng, cells=3, scale=1.02), temperature, rng, frames=2, every=100)
    return found


def write_crystal(file: Path) -> None:
    """Write 500 atoms, half of them gold, at a volume between that of the crystal and of its melt."""
    atoms = crystal(0.5, np.random.default_rng(5), cells=5, scale=1.03)
    edge = atoms.cell[0, 0]
    lines = [
        str(len(atoms)),
        f'Lattice="{edge:.6f} 0 0 0 {edge:.6f} 0 0 0 {edge:.6f}" Properties=species:S:1:pos:R:3 pbc="T T T"',
    ]
    lines += [f"{a.symbol} {a.x:.4f} {a.y:.4f} {a.z:.4f}" for a in atoms]
    file.write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    write_crystal(Path(__file__).with_name("crystal.xyz"))
