"""`nvdd evaluate` as a user sees it: numbers, JSON, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ase
import ase.io
import numpy as np
import pytest
from ase.constraints import FixAtoms

from .conftest import Nvdd, fcc

# Brute force over images in numpy, with the kit of the acceptance cases (whose text has the energy 4e-7 off).
ENERGY, EDGES = -790.8744958858, 6502
STRESS = [2.2779588, -0.0621236, -0.0626148, 1.9347130, -0.0805869, 1.9295340]
KEYS = {"energy", "forces", "stress", "n_atoms", "n_edges", "ranks", "model", "cutoff", "plugins", "units"}


def precise(nvdd: Nvdd, name: str, atoms: ase.Atoms | list[ase.Atoms]) -> Path:
    """Write a file whose numbers read back exactly (extended XYZ rounds)."""
    path = nvdd.folder / name
    frames = [atoms] if isinstance(atoms, ase.Atoms) else atoms
    lines = []
    for frame in frames:
        cell = " ".join(repr(float(x)) for x in np.array(frame.cell).ravel())
        pbc = " ".join("T" if flag else "F" for flag in frame.pbc)
        lines += [str(len(frame)), f'Lattice="{cell}" Properties=species:S:1:pos:R:3 pbc="{pbc}"']
        rows = zip(frame.symbols, frame.positions.tolist(), strict=True)
        lines += [f"{symbol} " + " ".join(map(repr, row)) for symbol, row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def report(nvdd: Nvdd, *args: object) -> dict[str, Any]:
    """Evaluate in this process and return the JSON."""
    assert nvdd.here("evaluate", *args, "--device", "cpu", "--json", "report.json") == 0
    found: dict[str, Any] = json.loads((nvdd.folder / "report.json").read_text())
    return found


def test_numbers_and_keys(nvdd: Nvdd) -> None:
    found = report(nvdd, precise(nvdd, "a.xyz", fcc(3)), "--model", "fake")
    assert set(found) == KEYS
    assert found["energy"] == pytest.approx(ENERGY, abs=1e-9)
    assert (found["n_atoms"], found["n_edges"], found["model"]) == (108, EDGES, "fake")
    assert found["cutoff"] == 2.5
    assert np.array(found["stress"])[np.triu_indices(3)] == pytest.approx(STRESS, abs=1e-6)
    assert np.shape(found["forces"]) == (108, 3)
    assert np.abs(np.sum(found["forces"], axis=0)).max() < 1e-9
    assert found["ranks"] == [{"rank": 0, "owned": 108, "ghost": 0, "edges": EDGES}]
    assert found["plugins"] == {"fake": "1.5"}
    assert found["units"]["stress"].startswith("eV/Angstrom^3")


def test_forces_are_in_the_order_of_the_file(nvdd: Nvdd) -> None:
    order = np.random.default_rng(3).permutation(108)
    forces = np.array(report(nvdd, precise(nvdd, "a.xyz", fcc(3)), "--model", "fake")["forces"])
    mixed = np.array(report(nvdd, precise(nvdd, "b.xyz", fcc(3)[order]), "--model", "fake")["forces"])
    assert np.abs(mixed - forces[order]).max() < 1e-9


def test_stress_where_asked_for(nvdd: Nvdd) -> None:
    slab = fcc(3)
    slab.pbc = (True, True, False)
    path = precise(nvdd, "slab.xyz", slab)
    assert report(nvdd, path, "--model", "fake")["stress"] is None
    assert np.shape(report(nvdd, path, "--model", "fake", "--stress")["stress"]) == (3, 3)
    bulk = precise(nvdd, "bulk.xyz", fcc(3))
    assert report(nvdd, bulk, "--model", "fake", "--no-stress")["stress"] is None


def test_batch(nvdd: Nvdd) -> None:
    alone = ase.Atoms("Ar", positions=[[0.0, 0.0, 0.0]])
    path = precise(nvdd, "batch.xyz", [fcc(3), alone, fcc(1)])
    found = report(nvdd, path, "--model", "fake", "--batch")
    assert found["energy"] == pytest.approx([ENERGY, 0.0, -29.2501954498], abs=1e-9)
    assert [len(forces) for forces in found["forces"]] == [108, 1, 4]
    assert found["stress"][1] is None
    assert np.array(found["stress"][0])[np.triu_indices(3)] == pytest.approx(STRESS, abs=1e-6)
    assert (found["n_atoms"], found["n_edges"]) == (113, EDGES + 250)
    single = report(nvdd, path, "--model", "fake", "--index", "0")
    assert np.abs(np.array(single["forces"]) - np.array(found["forces"][0])).max() < 1e-9
    some = report(nvdd, path, "--model", "fake", "--batch", "--index", "1:")
    assert some["energy"] == pytest.approx(found["energy"][1:], abs=1e-12)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_warning_is_one_note(nvdd: Nvdd, ranks: int) -> None:
    charged = fcc(3)
    charged.set_array("charges", np.ones(108))
    ase.io.write(nvdd.folder / "columns.xyz", [charged, fcc(1)], format="extxyz")
    done = nvdd.process("evaluate", "columns.xyz", "--model", "fake", "--batch", "--ranks", ranks)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "column" in line]
    assert [line[:29] for line in lines] == ["nvdd: charges: not a column o"]


def test_the_last_system_is_taken(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = precise(nvdd, "two.xyz", [fcc(3), fcc(1)])
    assert report(nvdd, path, "--model", "fake")["n_atoms"] == 4
    capfd.readouterr()
    assert nvdd.here("evaluate", path, "--model", "fake", "--device", "cpu") == 0
    out = capfd.readouterr().out
    assert "(system: last)" in out
    assert "fake (float64, cpu, 1 rank), cutoff 2.5 A" in out
    assert "-29.2501954498 eV" in out
    assert "rank     owned     ghost      edges" in out


def test_options_reach_the_model(nvdd: Nvdd) -> None:
    found = report(nvdd, precise(nvdd, "a.xyz", fcc(3)), "--model", "fake", "--option", "epsilon=2.0")
    assert found["energy"] == pytest.approx(2 * ENERGY, abs=1e-8)


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_files_are_read_under_optimisation(nvdd: Nvdd, flag: str) -> None:
    """ASE's reader of extended XYZ takes lines in an assert statement."""
    path = precise(nvdd, "two.xyz", [fcc(3), fcc(1)])
    args = ["evaluate", path, "--model", "fake", "--device", "cpu", "--batch", "--json", "-"]
    done = nvdd.process(*args, flags=(flag,))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["energy"] == pytest.approx([ENERGY, -29.2501954498], abs=1e-9)
    done = nvdd.process("evaluate", path, "--model", "fake", "--index", "7", flags=(flag,))
    assert done.returncode == 2
    assert "could not read system 7 of it: StopIteration" in done.stderr


def test_constraints_are_told(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    atoms = fcc(1)
    atoms.set_constraint(FixAtoms([0]))
    ase.io.write(nvdd.folder / "held.traj", atoms)
    assert nvdd.here("evaluate", "held.traj", "--model", "fake", "--device", "cpu") == 0
    assert "forces are without the constraints of the structure file (FixAtoms)" in capfd.readouterr().err
    assert nvdd.here("run", "held.traj", "--model", "fake", "--device", "cpu", "--steps", "1") == 2
    assert "it holds constraints (FixAtoms), which nvdd run does not apply" in capfd.readouterr().err
    assert not (nvdd.folder / "runs").exists()


def test_two_ranks_write_json_alone(nvdd: Nvdd) -> None:
    path = precise(nvdd, "a.xyz", fcc(3))
    one = report(nvdd, path, "--model", "fake")
    done = nvdd.process("evaluate", path, "--model", "fake", "--grid", "2,1,1", "--json", "-")
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)  # the plugin's own noise went elsewhere
    assert "noise on the descriptor" in done.stderr
    assert "noise of the light module on the descriptor" in done.stderr
    assert "noise of C code" in done.stderr
    assert two["energy"] == pytest.approx(one["energy"], abs=1e-9)
    assert np.abs(np.array(two["forces"]) - np.array(one["forces"])).max() < 1e-9
    assert np.abs(np.array(two["stress"]) - np.array(one["stress"])).max() < 1e-9
    assert two["n_edges"] == EDGES
    assert sum(rank["owned"] for rank in two["ranks"]) == 108
    assert [rank["rank"] for rank in two["ranks"]] == [0, 1]


def test_json_alone_on_standard_output_of_one_rank(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = precise(nvdd, "a.xyz", fcc(1))
    assert nvdd.here("evaluate", path, "--model", "fake", "--device", "cpu", "--json", "-") == 0
    assert json.loads(capfd.readouterr().out)["n_edges"] == 250


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("refuse", 2, "rank 1: this model file is not for you"),
        ("forward", 1, "rank 1: ValueError: forward went wrong"),
        ("kill", 1, "rank 1 was killed by signal 9 (SIGKILL)"),
        ("exit", 1, "rank 1: a plugin or library wanted to end the process: SystemExit(0)"),
        ("quit", 1, "rank 1: a plugin or library wanted to end the process: SystemExit('tired')"),
        ("stop", 1, "rank 1: a plugin or library wanted to end the process: Stop('enough')"),
    ],
)
def test_one_rank_fails(nvdd: Nvdd, how: str, code: int, said: str) -> None:
    path = precise(nvdd, "a.xyz", fcc(3))
    options = ["--option", f"fail={how}", "--option", "on=1"]
    done = nvdd.process("evaluate", path, "--model", "fake", "--ranks", "2", "--json", "out.json", *options)
    assert done.returncode == code
    errors = [line for line in done.stderr.splitlines() if line and "noise" not in line]
    assert len(errors) == 1, done.stderr
    assert said in errors[0]
    assert not (nvdd.folder / "out.json").exists()


MISTAKES: list[tuple[list[str], int, str]] = [
    (["none.xyz", "--model", "fake"], 2, "no such file"),
    ([".", "--model", "fake"], 2, "is not a file"),
    (["a.xyz"], 2, "no model given"),
    (
        ["a.xyz", "--model", "fakes"],
        2,
        "no installed plugin provides the model 'fakes'. Did you mean 'fake'?",
    ),
    (["a.xyz", "--model", "fake", "--option", "cutof=3"], 2, "has no option 'cutof' (did you mean cutoff?)"),
    (["a.xyz", "--model", "fake", "--option", "cutoff"], 2, "KEY=VALUE"),
    (["a.xyz", "--model", "fake", "--ranks", "-1"], 2, "--ranks"),
    (["a.xyz", "--model", "fake", "--grid", "2,x,1"], 2, "three whole numbers"),
    (["a.xyz", "--model", "fake", "--index", ":"], 2, "add --batch"),
    (["a.xyz", "--model", "fake", "--index", "7"], 2, "could not read system 7"),
    (["a.xyz", "--model", "fake", "--json", "no/such/folder.json"], 2, "there is no folder"),
    (["a.xyz", "--model", "fake", "--json", "."], 2, "is a folder"),
    (["empty.xyz", "--model", "fake"], 2, "could not read"),
    (["nan.xyz", "--model", "fake"], 2, "position of atom 57 is not finite"),
    (["carbon.xyz", "--model", "fake"], 2, "atom 5 is not argon"),
    (["open.xyz", "--model", "fake", "--stress"], 2, "has no volume"),
    (["flat.xyz", "--model", "fake"], 2, "system 0: the cell is singular along its periodic axes [0, 1, 2]"),
    (
        ["a.xyz", "--model", "fake", "--option", "dtype=float32"],
        2,
        "'dtype' is no option of a model; give --dtype",
    ),
    (["a.xyz", "--model", "fake", "--option", "cutoff=1e300"], 2, "neighbour lists reach up to"),
    (["a.xyz", "--model", "fake", "--option", "cutoff=1e5"], 2, "periodic images of each atom (system 0)"),
    (["collapsed.xyz", "--model", "fake"], 2, "periodic images of each atom (system 0)"),
    (["a.xyz", "--model", "fake", "--ranks", "1000000"], 2, "more than this machine can start"),
    (["a.xyz", "--model", "fake", "--option", "fail=exit"], 1, "wanted to end the process: SystemExit(0)"),
    (["a.xyz", "--model", "fake", "--option", "fail=load"], 1, "ValueError: cannot load"),
    (["a.xyz", "--model", "fake", "--option", "fail=blow"], 1, "not finite"),
    (["a.xyz", "--model", "fake", "--device", "cuda"], 2, "GPU"),
]


@pytest.mark.parametrize(("args", "code", "said"), MISTAKES, ids=[said for _, _, said in MISTAKES])
def test_mistakes(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    if "cuda" in args and _has_gpu():
        pytest.skip("this machine has a GPU")
    _write_inputs(nvdd)
    device = [] if "--device" in args else ["--device", "cpu"]
    assert nvdd.here("evaluate", *args, *device) == code
    err = [line for line in capfd.readouterr().err.splitlines() if "noise" not in line]
    assert len(err) == 1, err
    assert said in err[0]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _write_inputs(nvdd: Nvdd) -> None:
    precise(nvdd, "a.xyz", fcc(3))
    bad = fcc(3)
    bad.positions[57, 1] = np.nan
    precise(nvdd, "nan.xyz", bad)
    carbon = fcc(3)
    carbon.numbers[5] = 6
    precise(nvdd, "carbon.xyz", carbon)
    precise(nvdd, "open.xyz", ase.Atoms("Ar2", positions=[[0, 0, 0], [1.1, 0, 0]]))
    flat = fcc(3)
    flat.cell[2] = flat.cell[0] + flat.cell[1]
    precise(nvdd, "flat.xyz", flat)
    collapsed = fcc(1)
    collapsed.cell[2] = 0.0, 0.0, 1e-6
    precise(nvdd, "collapsed.xyz", collapsed)
    (nvdd.folder / "empty.xyz").write_text("")


def test_debug_shows_the_traceback(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = precise(nvdd, "a.xyz", fcc(1))
    args = ["--model", "fake", "--device", "cpu", "--option", "fail=load", "--debug"]
    assert nvdd.here("evaluate", path, *args) == 1
    assert "Traceback" in capfd.readouterr().err
