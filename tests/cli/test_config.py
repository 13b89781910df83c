"""Run files and flags: what is accepted, and what a mistake is told."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nvdd_core.cli.config import (
    RUN_FILE_KEYS,
    EvaluateJob,
    RunJob,
    build,
    read_run_file,
    run_toml,
)
from nvdd_core.errors import InputError

MINIMAL: dict[str, Any] = {"structure": Path("argon.xyz"), "model": "lj"}


def run_job(**values: Any) -> RunJob:
    return build(RunJob, {**MINIMAL, **values}, {})


def test_defaults() -> None:
    job = run_job()
    assert (job.ensemble, job.dt, job.steps, job.dtype, job.strategy) == ("nve", 1.0, 1000, "float64", "halo")
    assert job.wanted_ranks() is None
    assert job.output_folder() == Path("runs/argon")


def test_grid_gives_the_ranks() -> None:
    assert run_job(grid=[2, 3, 1]).wanted_ranks() == 6
    assert run_job(grid=[2, 3, 1], ranks=6).wanted_ranks() == 6
    assert run_job(grid="2,3,1").grid == (2, 3, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ranks": 0}, ["ranks", "greater than or equal to 1", "found 0"]),
        ({"ranks": 2.5}, ["ranks", "found 2.5"]),
        ({"steps": True}, ["steps", "found True"]),
        ({"dt": 0.0}, ["dt", "greater than 0"]),
        ({"dt": float("nan")}, ["dt"]),
        ({"temperature": -1.0}, ["temperature"]),
        ({"ensemble": "npt"}, ["ensemble", "'nve' or 'nvt-langevin'", "found 'npt'"]),
        ({"ensemble": "nvt-langevin"}, ["nvt-langevin needs a temperature"]),
        ({"strategy": "halos"}, ["strategy", "wide-halo"]),
        ({"device": "tpu"}, ["device", "'cpu' or 'cuda'"]),
        ({"dtype": "float16"}, ["dtype"]),
        ({"grid": [2, 2]}, ["grid"]),
        ({"grid": "2,2"}, ["grid: expected three whole numbers, as in 2,2,1, found '2,2'"]),
        ({"grid": [2, 0, 1]}, ["grid[1]", "found 0"]),
        ({"grid": [2, 2, 1], "ranks": 3}, ["2 x 2 x 1 needs 4 ranks", "ranks = 3"]),
        ({"grid": [2, 1, 1], "strategy": "graph-partition"}, ["grid", "graph-partition"]),
        ({"log_every": 0}, ["log_every"]),
        ({"seed": -1}, ["seed"]),
        ({"model": ""}, ["model"]),
        ({"model": None}, ["no model given", "--model"]),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        run_job(**values)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_mistake_is_told_with_its_source() -> None:
    with pytest.raises(InputError) as caught:
        build(RunJob, {**MINIMAL, "ranks": 0, "dt": -1.0}, {"ranks": "--ranks", "dt": "run.toml: dt"})
    assert "--ranks: " in str(caught.value)
    assert "run.toml: dt: " in str(caught.value)


@pytest.mark.parametrize("index", ["0", "-1", ":", "::2", "1:", ":-3", "2:9:3"])
def test_index_as_ase_has_it(index: str) -> None:
    assert build(EvaluateJob, {**MINIMAL, "index": index}, {}).index == index


@pytest.mark.parametrize("index", ["x", "1,2", "", "1:2:3:4"])
def test_index_of_another_form(index: str) -> None:
    with pytest.raises(InputError, match="index"):
        build(EvaluateJob, {**MINIMAL, "index": index}, {})


def test_run_file_paths_are_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('structure = "in/argon.xyz"\noutput = "/abs/out"\nmodel = "lj"\n')
    values = read_run_file(file)
    assert values["structure"] == str(tmp_path / "in/argon.xyz")
    assert values["output"] == "/abs/out"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature = 94.4\n", ["unknown key 'temprature'", "did you mean temperature?"]),
        ("options = {}\n", ["did you mean option?"]),
        ("overwrite = true\n", ["unknown key 'overwrite'"]),
        ("steps = = 3\n", ["not readable as TOML", "line 1"]),
    ],
)
def test_run_file_mistakes(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_run_file(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)


def test_run_file_missing_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_run_file(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is a folder"):
        read_run_file(tmp_path)


def test_resolved_file_gives_the_same_job(tmp_path: Path) -> None:
    job = run_job(
        structure=tmp_path / 'odd "name" \u00e9.xyz',
        output=tmp_path / "out",
        option={"cutoff": 8.5, "tiny": 1e-300, "shift": "force", "pair": {"Ar": [1, 2.5], "K r": True}},
        ensemble="nvt-langevin",
        temperature=94.4,
        ranks=2,
        grid=[2, 1, 1],
        overwrite=True,
    )
    file = tmp_path / "run.toml"
    file.write_text(run_toml(job), encoding="utf-8")
    again = build(RunJob, read_run_file(file), {})
    assert again == job.model_copy(update={"overwrite": False})
    assert set(tomllib.loads(run_toml(job))) <= set(RUN_FILE_KEYS)


def test_checks_need_nothing_heavy() -> None:
    code = (
        "import sys; import nvdd_core.cli.run_cmd, nvdd_core.cli.evaluate_cmd;"
        "sys.exit(' '.join({'torch', 'numpy', 'ase'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
