"""An ordinary ASE script whose forces come from two processes.

``python docs/examples/relax.py``: no launcher and no main guard.
"""

from __future__ import annotations

import ase.build
import numpy as np
from ase import units
from ase.filters import FrechetCellFilter
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

from nvdd_core.interop.ase import DomainCalculator

# Argon that is a little wide and lacks one atom
atoms = ase.build.bulk("Ar", "fcc", a=5.35, cubic=True) * (4, 4, 4)
del atoms[0]

options = {"sigma": 3.4, "epsilon": 0.0104, "cutoff": 8.5, "shift": "force"}
with DomainCalculator("lj", ranks=2, device="cpu", options=options) as calc:
    atoms.calc = calc

    run = BFGS(FrechetCellFilter(atoms), logfile=None)
    run.run(fmax=0.001)
    print(f"relaxed in {run.nsteps} steps: {atoms.get_potential_energy():.6f} eV")
    print(f"cell {atoms.cell.lengths().round(4)} A")

    atoms.set_velocities(0.01 * np.random.default_rng(seed=1).normal(size=(len(atoms), 3)))
    before, lists = atoms.get_total_energy(), calc.n_rebuilds
    VelocityVerlet(atoms, timestep=2.0 * units.fs).run(100)
    print(f"total energy {before:.4f} eV, 200 fs later {atoms.get_total_energy():.4f} eV")
    print(f"neighbour lists made in these 100 steps: {calc.n_rebuilds - lists}")
