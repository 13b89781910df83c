"""The trained model of examples/cu_au against mace, EMT and ASE's own methods; and the example's run files."""

from __future__ import annotations

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import ase.build
import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.phonons import Phonons

from nvdd_core.cli.config import RunJob, build, read_run_file
from nvdd_core.interop.ase import DomainCalculator

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "cu_au"
CHECKPOINT = FOLDER / "cu_au.model"
EMT_COPPER = 3.5900  # A


@pytest.fixture(scope="module")
def module():
    return torch.load(CHECKPOINT, weights_only=False)  # our own file


@pytest.fixture(scope="module")
def data():
    return runpy.run_path(str(FOLDER / "data.py"))


@pytest.fixture(scope="module")
def nvdd():
    """The calculator under test; the file is read safely."""
    with DomainCalculator("mace", ranks=2, device="cpu", options={"checkpoint": str(CHECKPOINT)}) as calc:
        yield calc


@pytest.fixture(scope="module")
def mace(module):
    from mace.calculators import MACECalculator

    return MACECalculator(models=module, device="cpu", default_dtype="float64")


def alloy(cells=2, a=3.85, rattle=0.08):
    """Copper and gold in turn by planes, off their sites, in a cell that is not at rest."""
    atoms = ase.build.bulk("Cu", "fcc", a=a, cubic=True).repeat(cells)
    atoms.symbols[np.isclose(atoms.positions[:, 2] % a, 0.0)] = "Au"
    atoms.rattle(rattle, seed=4)
    return atoms


def test_the_file_is_small():
    assert CHECKPOINT.stat().st_size < 2_000_000


@pytest.mark.parametrize(("world", "strategy"), [(1, "halo"), (2, "halo"), (2, "wide-halo")])
def test_numbers_are_mace_s(mace, world, strategy):
    """Read without trust, in float64, on a crystal smaller than two cutoffs and on a cluster."""
    options = {"checkpoint": str(CHECKPOINT)}
    with DomainCalculator("mace", ranks=world, device="cpu", strategy=strategy, options=options) as calc:
        for pbc in (True, False):
            atoms = alloy()
            atoms.pbc = pbc
            calc.calculate(atoms)
            mace.calculate(atoms)
            assert abs(calc.results["energy"] - mace.results["energy"]) / len(atoms) < 1e-11
            for name in ("forces", "energies", *(["stress"] if pbc else [])):
                np.testing.assert_allclose(calc.results[name], mace.results[name], rtol=0, atol=1e-9)


def rms(values):
    return 1e3 * float(np.sqrt(np.square(values).mean()))


@pytest.mark.parametrize("temperature", [300, 1500, 2000])
def test_forces_are_emt_s(nvdd, data, temperature):
    """A crystal and a melt that neither training nor report saw: within 1.5 times the errors that the report states."""
    stated = json.loads((FOLDER / "report.json").read_text())[f"{temperature} K"]
    rng = np.random.default_rng(11)
    start = data["crystal"](0.5, rng, cells=3, scale=1.02)
    force, energy = [], []
    for atoms in data["heated"](start, temperature, rng, frames=3):
        forces, total = atoms.get_forces(), atoms.get_potential_energy()
        atoms.calc = nvdd
        force.append(atoms.get_forces() - forces)
        energy.append((atoms.get_potential_energy() - total) / len(atoms))
    assert rms(force) < 1.5 * stated["forces_mev_per_a"]
    assert rms(energy) < 3.0 * stated["energy_mev_per_atom"]
    assert stated["forces_mev_per_a"] < 0.1 * stated["rms_force_mev_per_a"]


@pytest.mark.parametrize("gold", [0.0, 0.5, 1.0])
def test_neighbours_that_collide_part(nvdd, data, gold):
    """Energy falls from 1.4 A, where it is out of reach, to 2.1 A: no hole in which a pair of a melt is caught.

    Dynamics in such a hole conserves energy as well as any other.
    """
    atoms = data["crystal"](gold, np.random.default_rng(5))
    atoms.calc = nvdd
    gaps = atoms.get_distances(0, range(1, len(atoms)), mic=True, vector=True)
    nearest = 1 + int(np.linalg.norm(gaps, axis=1).argmin())
    along = gaps[nearest - 1] / np.linalg.norm(gaps[nearest - 1])
    energies = []
    for distance in np.arange(1.4, 2.2, 0.1):
        atoms.positions[nearest] = atoms.positions[0] + distance * along
        energies.append(atoms.get_potential_energy())
    assert np.diff(energies).max() < 0.0
    assert energies[0] - energies[-1] > 10.0  # 60 kT at 2000 K


# -- methods of ASE, with this calculator and with mace's --


def relaxed(optimizer, calc):
    atoms = alloy(rattle=0.05)
    atoms.calc = calc
    run = optimizer(FrechetCellFilter(atoms), logfile=None)
    assert run.run(fmax=0.02, steps=200)
    return atoms, run.nsteps


@pytest.mark.parametrize("optimizer", [BFGS, FIRE])
def test_relaxations_of_atoms_and_cell(nvdd, mace, optimizer):
    (ours, steps), (true, expected) = relaxed(optimizer, nvdd), relaxed(optimizer, mace)
    assert steps == expected
    assert ours.get_potential_energy() == pytest.approx(true.get_potential_energy(), rel=0, abs=1e-8)
    np.testing.assert_allclose(ours.cell, true.cell, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.positions, true.positions, rtol=0, atol=1e-6)


def test_copper_has_emt_s_lattice_constant(nvdd):
    found = {}
    for name, calc in {"nvdd": nvdd, "emt": EMT()}.items():
        atoms = ase.build.bulk("Cu", "fcc", a=3.7, cubic=True)
        atoms.calc = calc
        assert BFGS(FrechetCellFilter(atoms, hydrostatic_strain=True), logfile=None).run(fmax=1e-3, steps=100)
        found[name] = atoms.cell.lengths()
    assert found["emt"] == pytest.approx(EMT_COPPER, abs=0.01)
    np.testing.assert_allclose(found["nvdd"], found["emt"], rtol=0.01)


def frequencies(folder, calc):
    crystal = ase.build.bulk("Cu", "fcc", a=EMT_COPPER)
    phonons = Phonons(crystal, calc, supercell=(3, 3, 3), delta=0.02, name=str(folder))
    phonons.run()
    phonons.read(acoustic=True)
    return phonons.band_structure([[1 / 3, 0, 1 / 3], [1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 1 / 2]])


def test_phonons(nvdd, mace, tmp_path):
    """The same bands as mace's, eV; copper is stable, and its highest frequency is EMT's to a tenth."""
    ours, true = frequencies(tmp_path / "nvdd", nvdd), frequencies(tmp_path / "mace", mace)
    np.testing.assert_allclose(ours, true, rtol=0, atol=1e-8)
    emt = frequencies(tmp_path / "emt", EMT())
    assert ours.min() > 0.0
    assert ours.max() == pytest.approx(emt.max(), rel=0.1)


def barrier(calc, steps):
    start = ase.build.bulk("Cu", "fcc", a=EMT_COPPER, cubic=True).repeat(2)
    end = start.copy()
    neighbour = int(np.argsort(start.get_distances(0, range(len(start)), mic=True))[1])
    end.positions[neighbour] -= start.get_distance(0, neighbour, mic=True, vector=True)
    images = [start.copy() for _ in range(4)] + [end]
    images = [image[1:] for image in images]
    for image in images:
        image.calc = calc
    band = NEB(images, climb=True, method="improvedtangent", allow_shared_calculator=True)
    band.interpolate(mic=True)
    BFGS(band, logfile=None).run(fmax=0.05, steps=steps)
    return np.array([image.get_potential_energy() for image in images])


def test_a_vacancy_hops(nvdd, mace):
    """Some steps of a nudged elastic band give mace's energies along the way."""
    ours, true = barrier(nvdd, 5), barrier(mace, 5)
    np.testing.assert_allclose(ours, true, rtol=0, atol=1e-7)
    assert ours[0] == pytest.approx(ours[-1], abs=1e-6)  # both ends are the same vacancy
    assert 0.3 < ours.max() - ours[0] < 2.0


# -- the run files --


@pytest.mark.parametrize("name", ["melt", "nve"])
def test_run_files_are_valid(name):
    values = read_run_file(FOLDER / f"{name}.toml")
    job = build(RunJob, values, {})
    assert job.wanted_ranks() == 2
    assert job.output_folder().resolve() == ROOT / "runs" / "cu_au" / name
    assert (FOLDER / values["option"]["checkpoint"]).resolve() == CHECKPOINT


def test_dynamics_conserve_energy(tmp_path):
    """Two ranks, an alloy at 2000 K: the total energy stays while kinetic energy goes to and fro."""
    command = [sys.executable, "-m", "nvdd_core.cli.main", "run", str(FOLDER / "nve.toml")]
    flags = {
        "structure": FOLDER / "crystal.xyz",
        "output": tmp_path / "run",
        "temperature": 2000,
        "steps": 100,
        "dt": 2.0,
        "log-every": 2,
    }
    command += [f"--{key}={value}" for key, value in flags.items()]
    subprocess.run(command, check=True, cwd=ROOT, timeout=280, capture_output=True)
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    n_atoms = json.loads((tmp_path / "run" / "summary.json").read_text())["n_atoms"]
    total = np.array([float(row["total"]) for row in rows]) / n_atoms
    kinetic = np.array([float(row["kinetic"]) for row in rows]) / n_atoms
    assert np.ptp(kinetic) > 0.1  # half of it becomes potential energy
    assert np.ptp(total) < 2e-3
    end = ase.io.read(tmp_path / "run" / "final.xyz").get_all_distances(mic=True)
    assert end[np.triu_indices(n_atoms, 1)].min() > 1.8
