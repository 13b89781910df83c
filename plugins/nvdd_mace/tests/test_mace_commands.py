"""What a user types, with a file in the current folder: commands, a restart from elsewhere, a script of ASE."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import ase.io
import numpy as np
import pytest
from mace_ranks import oracle

from nvdd_core.interop.ase import DomainCalculator

PLACED = ["--model", "mace", "--option", "checkpoint=my.model", "--device", "cpu"]


def nvdd(folder, *args):
    done = subprocess.run(
        [sys.executable, "-m", "nvdd_core.cli.main", *map(str, args)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made, structures):
    """A folder with a model file and a structure, and another beside it."""
    found = tmp_path_factory.mktemp("commands") / "job"
    (found.parent / "elsewhere").mkdir(parents=True)
    found.mkdir()
    shutil.copy(made()[0], found / "my.model")
    ase.io.write(found / "rod.xyz", structures["rod"])
    return found


def test_evaluate_on_two_ranks(folder, made):
    found = json.loads(nvdd(folder, "evaluate", "rod.xyz", *PLACED, "--ranks", 2, "--json", "-"))
    atoms = ase.io.read(folder / "rod.xyz")
    true = oracle(made()[1], atoms)
    np.testing.assert_allclose(np.array(found["forces"]).reshape(-1, 3), true.forces, rtol=0, atol=1e-9)


def test_a_run_is_repeated_and_continued_from_elsewhere(folder):
    """The file of the model is found from anywhere, since what a run writes has its whole path."""
    steps = ["--dt", 0.5, "--temperature", 100, "--checkpoint-every", 2, "--output", "out"]
    nvdd(folder, "run", "rod.xyz", *PLACED, *steps, "--steps", 4, "--ranks", 2)
    assert f'checkpoint = "{folder}/my.model"' in (folder / "out" / "run.toml").read_text()
    elsewhere = folder.parent / "elsewhere"
    again = ["../job/out/run.toml", "--restart", "../job/out/checkpoint.safetensors", "--steps", 6]
    nvdd(elsewhere, "run", *again)
    assert (folder / "out" / "log.csv").read_text().splitlines()[-1].startswith("6,")
    (elsewhere / "own.toml").write_text(
        'structure = "../job/rod.xyz"\nmodel = "mace"\nsteps = 0\ndevice = "cpu"\noutput = "own"\n'
        '[option]\ncheckpoint = "../job/my.model"\n'
    )
    nvdd(folder, "run", "../elsewhere/own.toml")
    assert (elsewhere / "own" / "summary.json").is_file()


def test_validate(folder):
    placed = ["--option", "checkpoint=my.model"]
    report = json.loads(nvdd(folder, "validate", "mace", "rod.xyz", *placed, "--json"))
    assert report["passed"] is True


def test_live_adapters_of_a_model_with_one_layer(folder, made):
    shutil.copy(made(layers=1)[0], folder / "one.model")
    live = nvdd(folder, "adapters", "--live", "mace", "--option", "checkpoint=one.model", "--json")
    found = {row["name"]: row["runtime"] for row in json.loads(live)["adapters"]}
    assert found["mace/refresh"] == "unused"
    assert found["mace/products"] == found["mace/readouts"] == "restored"
    assert set(found.values()) == {"unused", "restored"}


def test_a_calculator_of_ase(folder, made, monkeypatch):
    """On two processes, which start after the script has left the folder."""
    atoms = ase.io.read(folder / "rod.xyz")
    true = oracle(made()[1], atoms)
    monkeypatch.chdir(folder)
    with DomainCalculator("mace", ranks=2, device="cpu", options={"checkpoint": "my.model"}) as calc:
        monkeypatch.chdir(folder.parent)
        atoms.calc = calc
        assert abs(atoms.get_potential_energy() - true.energy[0]) < 1e-11 * len(atoms)
        np.testing.assert_allclose(atoms.get_forces(), true.forces, rtol=0, atol=1e-9)
