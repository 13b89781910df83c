"""`nvdd run` as a user sees it: the files it leaves, what it refuses, and that the rank count changes nothing."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import ase.io
import ase.units
import numpy as np
import pytest
import torch

from nvdd_core.cli import output, session
from nvdd_core.cli.config import EvaluateJob, build
from nvdd_core.cli.main import main
from nvdd_core.cli.progress import ProgressHook, ns_per_day
from nvdd_core.plugins import PluginManager, use_manager
from tests import _spawn

from .conftest import Nvdd, fcc

QUICK = ["--model", "fake", "--dt", "0.2", "--skin", "0.3", "--device", "cpu"]


def structure(nvdd: Nvdd, *, moving: bool = False) -> Path:
    atoms = fcc(2)
    if moving:
        atoms.set_velocities(np.outer(np.sin(np.arange(len(atoms))), [1.0, -0.5, 0.25]) * 0.01)
    path = nvdd.folder / "argon.xyz"
    ase.io.write(path, atoms, format="extxyz")
    return path


def log_of(folder: Path) -> list[dict[str, float]]:
    with (folder / output.LOG).open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def run(nvdd: Nvdd, *args: object) -> Path:
    """Run in this process into ``out`` and return that folder."""
    assert nvdd.here("run", "--structure", structure(nvdd), *QUICK, "--output", "out", *args) == 0
    return nvdd.folder / "out"


def test_files_of_a_run(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    every = ["--log-every", 10, "--trajectory-every", 10, "--checkpoint-every", 20]
    folder = run(nvdd, "--steps", 25, "--temperature", 60.0, *every)
    assert {path.name for path in folder.iterdir()} == set(output.OURS)
    assert [row["step"] for row in log_of(folder)] == [0, 10, 20, 25]
    assert log_of(folder)[0]["temperature"] == pytest.approx(60.0, rel=1e-12)
    frames = ase.io.read(folder / output.TRAJECTORY, index=":")
    assert len(frames) == 3
    final = ase.io.read(folder / output.FINAL)
    assert len(final) == 32
    assert np.abs(final.positions - frames[-1].positions).max() > 0.0
    assert (folder / output.PLOT).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / output.SUMMARY).read_text())
    phases = {"rebuild", "neighbor_list", "exchange", "model", "reduce", "integrate", "write"}
    assert phases <= set(summary["ranks"][0]["phases_s"])
    assert (summary["steps"], summary["n_atoms"], summary["run"]["model"]) == (25, 32, "fake")
    assert summary["ranks"][0]["phases_s"]["model"] > 0.0
    said = capfd.readouterr()
    assert "25 steps" in said.out
    assert "step 25/25" in said.err


def test_capture_that_can_not_be_is_told(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    run(nvdd, "--steps", 2, "--capture", "on")
    assert "--capture on captures nothing: there is no GPU" in capfd.readouterr().err
    run(nvdd, "--steps", 2, "--overwrite")
    assert "captures" not in capfd.readouterr().err


def test_run_file_and_flags(nvdd: Nvdd) -> None:
    structure(nvdd)
    (nvdd.folder / "job").mkdir()
    (nvdd.folder / "job" / "run.toml").write_text(
        'structure = "../argon.xyz"\nmodel = "fake"\noutput = "out"\nsteps = 50\ndt = 0.2\nskin = 0.3\n'
        'device = "cpu"\ntemperature = 30.0\n[option]\ncutoff = 2.0\nepsilon = 0.5\n'
    )
    assert nvdd.here("run", "job/run.toml", "--steps", 5, "--option", "cutoff=2.2") == 0
    folder = nvdd.folder / "job" / "out"
    summary = json.loads((folder / output.SUMMARY).read_text())
    assert summary["steps"] == 5
    assert summary["run"]["option"] == {"cutoff": 2.2, "epsilon": 0.5}
    # The resolved file repeats the run, bit by bit.
    assert nvdd.here("run", folder / output.RESOLVED, "--output", "again") == 0
    assert (nvdd.folder / "again" / output.LOG).read_text() == (folder / output.LOG).read_text()


def test_an_option_that_is_a_path_counts_from_where_it_was_written(
    nvdd: Nvdd, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run file's from its folder, a flag's from the current one; the resolved file and a restart from anywhere."""
    structure(nvdd)
    job, elsewhere = nvdd.folder / "job", nvdd.folder / "else" / "where"
    job.mkdir()
    elsewhere.mkdir(parents=True)
    for folder, cutoff in ((nvdd.folder, 2.1), (job, 2.2)):
        (folder / "cut").write_text(str(cutoff))
    (job / "run.toml").write_text(
        'structure = "../argon.xyz"\nmodel = "fake"\noutput = "out"\nsteps = 4\ncheckpoint_every = 2\n'
        'dt = 0.2\nskin = 0.3\ndevice = "cpu"\ntemperature = 30.0\n[option]\ncutoff_file = "cut"\n'
    )

    def cutoff_of(folder: Path) -> float:
        return float(json.loads((folder / output.SUMMARY).read_text())["run"]["cutoff"])

    assert nvdd.here("run", "job/run.toml") == 0
    assert cutoff_of(job / "out") == 2.2
    assert nvdd.here("run", "job/run.toml", "--option", "cutoff_file=cut", "--output", "flag") == 0
    assert cutoff_of(nvdd.folder / "flag") == 2.1
    done = nvdd.process("run", "job/run.toml", "--option", "cutoff_file=cut", "--output", "two", "--ranks", 2)
    assert done.returncode == 0, done.stderr
    assert cutoff_of(nvdd.folder / "two") == 2.1
    monkeypatch.chdir(elsewhere)
    assert nvdd.here("run", job / "out" / output.RESOLVED, "--output", "again") == 0
    assert cutoff_of(elsewhere / "again") == 2.2
    again = ["--restart", nvdd.folder / "flag" / output.CHECKPOINT, "--steps", 6]
    assert nvdd.here("run", nvdd.folder / "flag" / output.RESOLVED, *again) == 0
    assert [row["step"] for row in log_of(nvdd.folder / "flag")][-1] == 6.0
    assert cutoff_of(nvdd.folder / "flag") == 2.1
    assert (
        nvdd.here("evaluate", "../../argon.xyz", "--model", "fake", "--option", "cutoff_file=../../cut") == 0
    )
    assert "cutoff 2.1 A" in capfd.readouterr().out


def test_velocities_of_the_file_are_used(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = structure(nvdd, moving=True)
    assert (
        nvdd.here("run", "--structure", path, *QUICK, "--steps", 0, "--temperature", 9.0, "--output", "out")
        == 0
    )
    atoms = ase.io.read(path)
    assert log_of(nvdd.folder / "out")[0]["kinetic"] == pytest.approx(atoms.get_kinetic_energy(), rel=1e-6)
    assert "velocities come from the structure file" in capfd.readouterr().err


def test_without_velocities_and_temperature_atoms_start_at_rest(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str]
) -> None:
    assert log_of(run(nvdd, "--steps", 0))[0]["kinetic"] == 0.0
    assert "start at rest" in capfd.readouterr().err


def test_rank_count_changes_nothing(nvdd: Nvdd) -> None:
    args = ["--ensemble", "nvt-langevin", "--temperature", 60.0, "--steps", 60, "--seed", 5]
    one = run(nvdd, *args)
    done = nvdd.process(
        "run", "--structure", "argon.xyz", *QUICK, "--output", "two", "--ranks", 2, *args
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout
    two = nvdd.folder / "two"
    for a, b in zip(log_of(one), log_of(two), strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
    difference = ase.io.read(one / output.FINAL).positions - ase.io.read(two / output.FINAL).positions
    assert np.abs(difference).max() < 1e-7
    ranks = json.loads((two / output.SUMMARY).read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert sum(rank["owned"] for rank in ranks) == 32


def test_output_is_not_overwritten_unasked(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    folder = run(nvdd, "--steps", 2)
    mine = folder / "notes.txt"
    mine.write_text("keep me")
    before = (folder / output.LOG).read_bytes()
    capfd.readouterr()
    args = ["run", "--structure", "argon.xyz", *QUICK, "--output", "out", "--steps", 3]
    assert nvdd.here(*args) == 2
    assert "--overwrite" in capfd.readouterr().err
    assert (folder / output.LOG).read_bytes() == before
    assert nvdd.here(*args, "--overwrite", "--trajectory-every", 0) == 0
    assert mine.read_text() == "keep me"
    assert not (folder / output.TRAJECTORY).exists()


def test_a_run_never_deletes_its_own_input(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    folder = run(nvdd, "--steps", 2)
    final = folder / output.FINAL
    assert nvdd.here("run", "--structure", final, *QUICK, "--output", "out", "--overwrite") == 2
    assert "holds the structure file" in capfd.readouterr().err
    assert final.exists()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--ensemble", "nvt-langevin"], 2, "needs a temperature"),
        (["--steps", "-1"], 2, "--steps"),
        (["--option", "fail=blow"], 1, "not finite"),
        (["--option", "fail=refuse"], 2, "not for you"),
        (["--output", "argon.xyz"], 2, "is not a folder"),
    ],
)
def test_mistakes(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    structure(nvdd)
    assert nvdd.here("run", "--structure", "argon.xyz", *QUICK, *args) == code
    assert said in capfd.readouterr().err
    assert not (nvdd.folder / "runs").exists()  # what can't be run leaves no output


def test_what_blows_up_says_so(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    structure(nvdd)
    args = ["--steps", 500, "--temperature", 1e9, "--dt", 50.0]
    assert nvdd.here("run", "--structure", "argon.xyz", "--model", "fake", "--device", "cpu", *args) == 1
    assert "not finite" in capfd.readouterr().err


@pytest.mark.parametrize(
    "command", [["evaluate", "argon.xyz", "--json", "-"], ["run", "argon.xyz", "--steps", 1, "--dt", 1e-9]]
)
def test_atoms_that_are_too_close_are_told(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str], command: list[object]
) -> None:
    structure(nvdd)
    atoms = ase.io.read(nvdd.folder / "argon.xyz")
    for place, told in ((0.2, False), (0.05, True)):
        atoms.positions[1] = atoms.positions[6] + [0.0, 0.0, place]
        atoms.write(nvdd.folder / "argon.xyz")
        assert (
            nvdd.here(*command, "--model", "fake", "--device", "cpu", *["--overwrite"][: command[0] == "run"])
            == 0
        )
        err = capfd.readouterr().err
        assert ("nvdd: atoms 1 and 6 are 0.05 A apart; is the structure" in err) is told


def test_a_structure_as_the_argument(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = structure(nvdd)
    assert nvdd.here("run", path, *QUICK, "--steps", 1, "--output", "out") == 0
    said = capfd.readouterr().err
    assert "32 atoms, fake (float64, cpu, 1 rank), cutoff 2.5 A" in said
    assert nvdd.here("run", path, "--structure", path, *QUICK) == 2
    assert "two structures" in capfd.readouterr().err
    assert nvdd.here("run", "none.tml", *QUICK) == 2
    assert "structure file none.tml: no such file" in capfd.readouterr().err


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, 1), ("3", 3)])
def test_threads_of_a_single_rank(
    nvdd: Nvdd, monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, expected: int
) -> None:
    """One thread, unless OMP_NUM_THREADS says otherwise; a caller's own setting comes back."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    job = build(EvaluateJob, {"structure": "x.xyz", "model": "fake", "device": "cpu"}, {})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with session.group(job):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# -- restart --

MOVING = [
    "--temperature",
    3000.0,
    "--friction",
    0.05,
    "--dt",
    2.0,
    "--skin",
    0.2,
    "--seed",
    5,
    "--device",
    "cpu",
]
EVERY = ["--log-every", 10, "--trajectory-every", 10, "--checkpoint-every", 50]


def _on_a_rank(plugin: str, args: list[str]) -> int:
    """The command on one rank of a group that something else has started."""
    sys.path.insert(0, plugin)
    with use_manager(PluginManager()):
        return main(args)


def start(nvdd: Nvdd, ranks: int, output_name: str, *args: object) -> None:
    """Run some of the hot system on `ranks`."""
    command = ["run", "argon.xyz", "--model", "fake", *MOVING, *EVERY, "--output", output_name, *args]
    if ranks == 1:
        assert nvdd.here(*command) == 0
    else:
        text = [str(arg) for arg in command]
        assert _spawn.run_ranks(_on_a_rank, ranks, str(nvdd.plugin), text, group=False) == [0] * ranks


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("ensemble", ["nve", "nvt-langevin"])
def test_a_restart_gives_the_same_bits(nvdd: Nvdd, ensemble: str, ranks: int) -> None:
    """100 steps, and 50 that went on for 50 more: the same files, byte for byte."""
    ase.io.write(nvdd.folder / "argon.xyz", fcc(3), format="extxyz")
    start(nvdd, ranks, "whole", "--ensemble", ensemble, "--steps", 100)
    start(nvdd, ranks, "parts", "--ensemble", ensemble, "--steps", 50)
    whole, parts = nvdd.folder / "whole", nvdd.folder / "parts"
    again = ["--ensemble", ensemble, "--restart", f"parts/{output.CHECKPOINT}"]
    if ranks == 1:  # as after a kill: log and trajectory are ahead of the checkpoint
        checkpoint = (parts / output.CHECKPOINT).read_bytes()
        start(nvdd, ranks, "parts", *again, "--steps", 64)
        (parts / output.CHECKPOINT).write_bytes(checkpoint)
        with (parts / output.LOG).open("a") as file:
            file.write("70,1")
    start(nvdd, ranks, "parts", *again, "--steps", 100)
    for name in (output.LOG, output.TRAJECTORY, output.FINAL, output.CHECKPOINT):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert [row["step"] for row in log_of(parts)] == list(range(0, 101, 10))
    summary = json.loads((parts / output.SUMMARY).read_text())
    assert (summary["steps"], summary["run"]["steps"]) == (50, 100)
    assert summary["ranks"][0]["rebuilds"] > 2


@pytest.mark.distributed
def test_restart_elsewhere_and_on_other_ranks(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    path = structure(nvdd)
    start(nvdd, 1, "one", "--steps", 50)
    path.unlink()  # a restart doesn't need it
    checkpoint = f"one/{output.CHECKPOINT}"
    start(nvdd, 2, "two", "--steps", 60, "--restart", checkpoint)
    assert "other than" not in capfd.readouterr().err
    start(nvdd, 1, "one", "--steps", 60, "--restart", checkpoint, "--dt", 1.0, "--dtype", "float32")
    assert [row["step"] for row in log_of(nvdd.folder / "two")] == [60]
    assert (
        "other than before the restart: dtype float64 -> float32, dt 2.0 -> 1.0\n" in capfd.readouterr().err
    )
    assert len(ase.io.read(nvdd.folder / "one" / output.TRAJECTORY, index=":")) == 7


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--steps", 50], "it is at step 50 already"),
        (["--steps", 60, "--restart", "none"], "checkpoint none: no such file"),
        (["--steps", 60, "--restart", f"out/{output.LOG}"], "is not a checkpoint"),
        (["--steps", 60, "--output", "full"], "is not empty"),
    ],
)
def test_restarts_that_are_refused(
    nvdd: Nvdd, capfd: pytest.CaptureFixture[str], args: list[object], said: str
) -> None:
    structure(nvdd)
    start(nvdd, 1, "out", "--steps", 50)
    (nvdd.folder / "full").mkdir()
    (nvdd.folder / "full" / "notes.txt").touch()
    before = {path.name: path.read_bytes() for path in (nvdd.folder / "out").iterdir()}
    capfd.readouterr()
    checkpoint = ["--restart", f"out/{output.CHECKPOINT}"]
    assert (
        nvdd.here(
            "run", "argon.xyz", "--model", "fake", *MOVING, *EVERY, "--output", "out", *checkpoint, *args
        )
        == 2
    )
    assert said in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in (nvdd.folder / "out").iterdir()} == before


def test_wide_systems_and_unread_velocities_are_told(nvdd: Nvdd, capfd: pytest.CaptureFixture[str]) -> None:
    wide = ase.Atoms("Ar2", positions=[[0, 0, 0], [1.1, 0, 0]], cell=[2e4, 10, 10], pbc=[True, True, False])
    wide.set_array("velocities", np.ones((2, 3)))
    ase.io.write(nvdd.folder / "wide.xyz", wide, format="extxyz")
    args = ["--structure", "wide.xyz", *QUICK, "--steps", 1, "--overwrite"]
    assert nvdd.here("run", *args, "--dtype", "float32") == 0
    said = capfd.readouterr().err
    assert "float32 coordinates are 0.001 A apart in a system 2e+04 A wide" in said
    assert "velocities is taken for data" in said
    assert nvdd.here("run", *args) == 0
    assert "float32" not in capfd.readouterr().err


def test_speed() -> None:
    assert ns_per_day(100.0, 2.0) == pytest.approx(17.28)


def test_progress_needs_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hook = ProgressHook(10, 1.0, 5, sys.stderr)
    hook.close()
    assert capsys.readouterr().err == ""
