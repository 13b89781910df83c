"""The demonstration's files: the run file is valid and the structure is what its script makes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import units

from nvdd_core.cli.config import RunJob, build, read_run_file

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "argon"


def test_structure_is_liquid_like_argon() -> None:
    atoms = ase.io.read(FOLDER / "argon.xyz")
    assert len(atoms) >= 4000
    assert set(atoms.symbols) == {"Ar"}
    assert atoms.pbc.all()
    density = atoms.get_masses().sum() / units.mol / (atoms.get_volume() * 1e-24)
    assert density == pytest.approx(1.374, abs=1e-3)
    fractions = atoms.get_scaled_positions(wrap=False)
    assert fractions.min() >= 0.0
    assert fractions.max() <= 1.0
    first = atoms[:200].get_all_distances(mic=True)
    assert first[np.triu_indices(200, 1)].min() > 2.0


def test_structure_is_a_liquid() -> None:
    atoms = ase.io.read(FOLDER / "argon.xyz")
    sites = 4000 ** (1 / 3) / 4 ** (1 / 3)  # cubic cells along an edge of the lattice that it was melted from
    phases = 2.0 * np.pi * sites * atoms.get_scaled_positions() @ np.array([1.0, 1.0, 1.0])
    assert abs(np.exp(1j * phases).mean()) < 0.1  # one on the lattice


@pytest.mark.distributed
def test_script_makes_a_structure(
    tmp_path: Path, no_orphans: Callable[[], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(FOLDER / "make_structure.py"))
    start = script["lattice"](3)
    end = script["melt"](start, steps=4)
    script["write"](end, tmp_path / "argon.xyz")
    kept = ase.io.read(tmp_path / "argon.xyz")
    moved = kept.positions - start.positions
    moved -= np.round(moved / start.cell[0, 0]) * start.cell[0, 0]
    assert 0.0 < np.abs(moved).max() < 0.5
    assert "108 atoms" in capfd.readouterr().out


def test_run_file_is_valid() -> None:
    job = build(RunJob, read_run_file(FOLDER / "argon.toml"), {})
    assert job.structure.resolve() == FOLDER / "argon.xyz"
    assert job.wanted_ranks() == 2
    assert job.output_folder().resolve() == FOLDER.parents[1] / "runs" / "argon"
