"""Make ``argon.xyz``: 4,000 atoms of liquid argon at 94.4 K and 1.374 g/cm^3.

A face-centred cubic lattice whose atoms are displaced at random, melted by a Langevin run of nvdd itself::

    python examples/argon/make_structure.py [CELLS] [FILE]

CELLS is the number of cubic cells along each edge (10, hence 4,000 atoms); FILE the output. Thirty
picoseconds take a minute or two on two cores. A liquid forgets rounding errors within some
picoseconds, so another machine makes another configuration of the same liquid.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import bulk

DENSITY = 1.374  # g/cm^3, liquid argon at 94.4 K (Rahman 1964)
DISPLACEMENT = 0.3  # A, standard deviation along each axis
MASS = 39.948  # amu
STEPS = 15_000  # of 2 fs
RUN_FILE = Path(__file__).with_name("argon.toml")


def lattice(cells: int = 10, seed: int = 1964) -> Atoms:
    """Return ``4 * cells**3`` atoms in a periodic cube, near the sites of a lattice."""
    edge = (4 * MASS / (units.mol * DENSITY)) ** (1 / 3) * 1e8  # A
    atoms = bulk("Ar", "fcc", a=edge, cubic=True).repeat(cells)
    atoms.positions += np.random.default_rng(seed).normal(scale=DISPLACEMENT, size=(len(atoms), 3))
    return atoms


def melt(atoms: Atoms, steps: int = STEPS) -> Atoms:
    """Run the demonstration's dynamics from ``atoms`` and return the last positions, folded into the cell."""
    with tempfile.TemporaryDirectory() as folder:
        start, output = Path(folder, "start.xyz"), Path(folder, "run")
        ase.io.write(start, atoms)
        flags = {
            "structure": start,
            "output": output,
            "steps": steps,
            "log-every": 100,
            "trajectory-every": 0,
        }
        command = [sys.executable, "-m", "nvdd_core.cli.main", "run", str(RUN_FILE)]
        subprocess.run([*command, *(f"--{key}={value}" for key, value in flags.items())], check=True)
        last = ase.io.read(output / "final.xyz")
    last.wrap()
    return last


def write(atoms: Atoms, file: Path) -> None:
    """Write species and positions, four decimals to keep the file small."""
    cell = " ".join(f"{x:.6f}" for x in atoms.cell[:].ravel())
    lines = [str(len(atoms)), f'Lattice="{cell}" Properties=species:S:1:pos:R:3 pbc="T T T"']
    lines += [f"Ar {x:.4f} {y:.4f} {z:.4f}" for x, y, z in atoms.positions]
    file.write_text("\n".join(lines) + "\n", encoding="ascii")
    density = len(atoms) * MASS / units.mol / (atoms.get_volume() * 1e-24)
    print(f"{file}: {len(atoms)} atoms, {density:.4f} g/cm^3")


def main() -> None:
    """Write the file named on the command line."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("argon.xyz")
    write(melt(lattice(cells)), file)


if __name__ == "__main__":
    main()
