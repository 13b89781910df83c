"""Draw what melt.toml and nve.toml gave: writes ``melt.png`` beside this file and prints the energy's drift.

    python examples/cu_au/plot.py [RUNS] [FILE]

RUNS is the folder that holds ``melt`` and ``nve``; default ``runs/cu_au`` in the checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ase.io
import matplotlib as mpl
import numpy as np
from ase import Atoms

mpl.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).resolve().parent


def log(run: Path) -> dict[str, np.ndarray]:
    """Return the columns of a run's log, the time in ps."""
    table = np.genfromtxt(run / "log.csv", delimiter=",", names=True)
    columns = {name: table[name] for name in table.dtype.names}
    return {"ps": 1e-3 * columns.pop("time_fs"), **columns}


def mean_square_displacement(frames: list[Atoms], start: Atoms) -> np.ndarray:
    """Return the mean over atoms, A^2, for each frame; positions in a trajectory are not folded."""
    return np.array([np.square(f.positions - start.positions).sum(axis=1).mean() for f in frames])


def radial_distribution(
    frames: list[Atoms], reach: float = 8.0, bins: int = 160
) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and the density of atoms at them over the mean density, in a cubic cell."""
    edges = np.linspace(0.0, reach, bins + 1)
    counts = np.zeros(bins)
    for frame in frames:
        edge = frame.cell[0, 0]
        gaps = frame.positions[:, None] - frame.positions[None]
        gaps -= edge * np.round(gaps / edge)
        distances = np.linalg.norm(gaps, axis=-1)[np.triu_indices(len(frame), 1)]
        counts += np.histogram(distances, edges)[0]
    shells = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    n_atoms = len(frames[0])
    ideal = 0.5 * n_atoms * n_atoms / frames[0].get_volume() * shells * len(frames)
    return 0.5 * (edges[1:] + edges[:-1]), counts / ideal


def closest(frame: Atoms) -> float:
    """Return the distance of the closest pair: two atoms that fell into each other would have a small one."""
    distances = frame.get_all_distances(mic=True)
    return float(distances[np.triu_indices(len(frame), 1)].min())


def drift(table: dict[str, np.ndarray], n_atoms: int) -> tuple[float, float]:
    """Return slope, meV/atom/ps, and spread, meV/atom, of the total energy."""
    total = 1e3 * table["total"] / n_atoms
    return float(np.polyfit(table["ps"], total, 1)[0]), float(np.ptp(total))


def draw(runs: Path, file: Path) -> None:
    """Draw temperature, energies, displacements and distances into one picture."""
    melt, nve = log(runs / "melt"), log(runs / "nve")
    heating: list[Atoms] = ase.io.read(runs / "melt" / "trajectory.xyz", ":")
    liquid: list[Atoms] = ase.io.read(runs / "nve" / "trajectory.xyz", ":")
    n_atoms, end = len(heating[0]), melt["ps"][-1]
    slope, spread = drift(nve, n_atoms)
    print(f"total energy without thermostat: {slope:+.4f} meV/atom/ps, within {spread:.3f} meV/atom")

    print(f"closest pair of atoms in any frame: {min(map(closest, [*heating, *liquid])):.2f} A")

    figure, ((top, energy), (moved, pairs)) = plt.subplots(2, 2, figsize=(9.0, 6.4), layout="constrained")
    for table, start, label in ((melt, 0.0, "Langevin, 2000 K"), (nve, end, "NVE")):
        top.plot(start + table["ps"], table["temperature"], label=label)
    top.set(xlabel="time (ps)", ylabel="temperature (K)")
    top.legend()

    for name, label in (("energy", "potential"), ("kinetic", "kinetic"), ("total", "total")):
        shift = nve[name][0]
        energy.plot(nve["ps"], 1e3 * (nve[name] - shift) / n_atoms, label=label)
    energy.set(xlabel="time of NVE (ps)", ylabel="change of energy (meV/atom)")
    energy.set_title(f"drift {slope:+.3f} meV/atom/ps", fontsize="medium")
    energy.legend()

    times: Any = [0.001 * frame.info["time_fs"] for frame in heating]
    moved.plot(times, mean_square_displacement(heating, heating[0]), label="Langevin, 2000 K")
    times = [end + 0.001 * frame.info["time_fs"] for frame in liquid]
    moved.plot(times, mean_square_displacement(liquid, heating[0]), label="NVE")
    moved.set(xlabel="time (ps)", ylabel=r"mean square displacement ($\mathrm{\AA}^2$)")
    moved.legend()

    pairs.plot(
        *radial_distribution(heating[1:4]), label=f"first {1e3 * 0.001 * heating[3].info['time_fs']:.0f} fs"
    )
    pairs.plot(*radial_distribution(liquid), label="NVE: melt")
    pairs.set(xlabel=r"distance ($\mathrm{\AA}$)", ylabel="radial distribution")
    pairs.legend()
    figure.savefig(file, dpi=90)


def main() -> None:
    """Draw the runs of the folder named on the command line."""
    runs = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER.parents[1] / "runs" / "cu_au"
    draw(runs, Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER / "melt.png")


if __name__ == "__main__":
    main()
