"""``--model one+0.5*other`` as a user sees it: sums, options, run files, restarts, what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest

from nvdd_core.cli import output

from .conftest import Nvdd, fcc

LJ = ["--option", "lj.epsilon=1.0", "--option", "lj.sigma=1.0", "--option", "lj.cutoff=1.9"]
BOTH = ["--model", "fake+0.5*lj", *LJ, "--device", "cpu"]


@pytest.fixture
def structure(nvdd: Nvdd) -> Path:
    atoms = fcc(3)
    atoms.set_velocities(np.outer(np.sin(np.arange(len(atoms))), [1.0, -0.5, 0.25]) * 0.01)
    path = nvdd.folder / "argon.xyz"
    ase.io.write(path, atoms, format="extxyz")
    return path


def evaluated(nvdd: Nvdd, capfd: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert nvdd.here("evaluate", "argon.xyz", *args, "--json", "-") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.usefixtures("structure")
def test_results_are_the_weighted_sum(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    fake = evaluated(nvdd, capfd, "--model", "fake", "--device", "cpu")
    alone = [flag.replace("lj.", "") for flag in LJ]
    lj = evaluated(nvdd, capfd, "--model", "lj", *alone, "--device", "cpu")
    both = evaluated(nvdd, capfd, *BOTH)
    for key in ("energy", "forces", "stress"):
        right = np.array(fake[key]) + 0.5 * np.array(lj[key])
        assert np.abs(np.array(both[key]) - right).max() <= 1e-12 * max(1.0, np.abs(right).max())
    assert both["cutoff"] == 2.5
    assert both["plugins"].keys() == {"fake", "lj"}
    assert both["members"] == [
        {"name": "fake", "weight": 1.0, "cutoff": 2.5},
        {"name": "lj", "weight": 0.5, "cutoff": 1.9},
    ]
    assert nvdd.here("evaluate", "argon.xyz", *BOTH) == 0
    assert "member     lj: weight 0.5, cutoff 1.9 A\n" in capfd.readouterr().out
    ranks = nvdd.process("evaluate", "argon.xyz", *BOTH, "--ranks", 2, "--json", "two.json")
    assert ranks.returncode == 0, ranks.stderr
    two = json.loads((nvdd.folder / "two.json").read_text())
    assert np.abs(np.array(two["forces"]) - both["forces"]).max() <= 1e-9


@pytest.mark.usefixtures("structure")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "fake+lk"], "no installed plugin provides the model 'lk'."),
        (["--model", "fake+"], "'' is no model"),
        (["--model", "fake+x*lj"], "the weight 'x' is no finite number"),
        (
            ["--model", "fake+lj", "--option", "cutoff=2"],
            "could be for 'fake' and 'lj': write fake.cutoff or lj.cutoff",
        ),
        (["--model", "fake+fake", "--option", "fake2.far=2"], "model 'fake' has no option 'far'"),
        (["--model", "fake+fake", "--option", "far=2"], "no member of fake+fake2 has an option 'far'"),
        (["--model", "fake+lj", "--option", "lj.cutof=2"], "cutof"),
        (["--model", "fake+lj", "--option", "fake.fail=refuse"], "this model file is not for you"),
    ],
)
def test_mistakes_are_one_line(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert nvdd.here("evaluate", "argon.xyz", *args, "--device", "cpu") == 2
    told = capfd.readouterr().err
    assert message in told
    assert told.count("nvdd: error:") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_restarts_to_the_same_bits(nvdd: Nvdd, structure: Path, ranks: int) -> None:
    (nvdd.folder / "near.txt").write_text("2.2")
    (nvdd.folder / "run.toml").write_text(
        f"""
structure = "{structure.name}"
model = "0.5*lj+fake"
ranks = {ranks}
device = "cpu"
dt = 1.0
skin = 0.2
log_every = 5
checkpoint_every = 10

[option]
fake.cutoff_file = "near.txt"

[option.lj]
epsilon = 1.0
sigma = {{ Ar = 1.0 }}
cutoff = 2.6
"""
    )

    def go(folder: str, *args: object) -> str:
        done = nvdd.process("run", "run.toml", "--output", folder, *args)
        assert done.returncode == 0, done.stderr
        return (nvdd.folder / folder / output.FINAL).read_text()

    whole = go("whole", "--steps", 20)
    go("parts", "--steps", 10)
    assert go("parts", "--steps", 20, "--restart", f"parts/{output.CHECKPOINT}") == whole
    written = tomllib.loads((nvdd.folder / "parts" / output.RESOLVED).read_text())
    assert written["model"] == "0.5*lj+fake"
    assert written["option"]["fake.cutoff_file"] == str(nvdd.folder / "near.txt")
    summary = json.loads((nvdd.folder / "parts" / output.SUMMARY).read_text())
    assert [member["cutoff"] for member in summary["run"]["members"]] == [2.6, 2.2]
    again = nvdd.process("run", f"parts/{output.RESOLVED}", "--output", "again", "--steps", 20)
    assert again.returncode == 0, again.stderr
    assert (nvdd.folder / "again" / output.FINAL).read_text() == whole


@pytest.mark.usefixtures("structure")
def test_a_composition_is_validated(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    assert nvdd.here("validate", "fake+0.5*lj", "argon.xyz", *LJ) == 0
    assert capfd.readouterr().out.startswith("model      fake+0.5*lj (float64, cpu, 2 ranks, halo)\n")
    (nvdd.folder / "spec.json").write_text("{}")
    assert nvdd.here("validate", "fake+lj", "argon.xyz", "--spec", "spec.json") == 2
    assert "validate members alone" in capfd.readouterr().err


def test_adapters_of_all_members_are_listed(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    assert nvdd.here("adapters", "--model", "fake+lj") == 0
    assert nvdd.here("adapters", "--live", "fake+lj", *LJ) == 0
    assert nvdd.here("adapters", "--live", "fake+nobody") != 0
    assert "nobody" in capfd.readouterr().err
