"""`nvdd validate` as a user sees it: exit codes, text, JSON, saved specs, one line for each mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvdd_core.runtime import MLIPSpec
from nvdd_core.spec import ScatterMode
from tests.validate.conftest import bar

from .conftest import Nvdd

TOYS = "tests.validate.models"


@pytest.fixture
def structure(nvdd: Nvdd, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, str(nvdd.plugin)]))
    path = nvdd.folder / "bar.extxyz"
    bar().write(path)
    return path


@pytest.mark.usefixtures("no_orphans")
def test_an_installed_model_passes(nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert nvdd.here("validate", "fake", structure, "--option", "epsilon=0.5") == 0
    out, err = capfd.readouterr()
    assert "noise" not in out
    told = [line for line in err.splitlines() if line.startswith("nvdd: ")]
    assert told == ["nvdd: evaluating fake in one process", "nvdd: evaluating on 2 ranks and comparing"]
    assert out.startswith("model      fake (float64, cpu, 2 ranks, halo)\n")
    assert "result     passed\n" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("forces")] == [["forces", "ok"]]


def test_a_fault_gives_json_and_the_spec_that_works(
    nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert nvdd.here("validate", f"{TOYS}:Gate", structure, "--json", "--save", "spec.json") == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["passed"], report["cause"], report["ranks"]) == (False, "wrong_scatter", 2)
    assert report["fixes"] == [
        {"field": "distribution.storage.scatter", "before": "refresh", "after": "halo_correction"}
    ]
    saved = MLIPSpec.load(nvdd.folder / "spec.json")
    assert saved.dispatch_rules.scatter is ScatterMode.HALO_CORRECTION
    assert MLIPSpec.from_dict(report["spec"]) == saved
    assert nvdd.here("validate", f"{TOYS}:Gate", structure, "--spec", "spec.json") == 0
    assert "result     passed" in capfd.readouterr().out


def test_what_does_not_work_is_not_saved(
    nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ("validate", f"{TOYS}:Gate", structure, "--no-fix", "--save", "spec.json")
    assert nvdd.here(*args) == 1
    out = capfd.readouterr().out
    assert "result     failed: wrong scatter\n" in out
    assert "models.py:" in out
    assert not (nvdd.folder / "spec.json").exists()


def test_a_loader_that_leaves_is_a_finding(
    nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert nvdd.here("validate", f"{TOYS}:LeavesAtOnce", structure) == 1
    assert "a plugin or library wanted to end the process: SystemExit(0)" in capfd.readouterr().out


def test_the_report_comes_before_a_spec_that_can_not_be_saved(
    nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    assert nvdd.here("validate", "fake", structure, "--json", "--save", "spec.json") == 2
    done = capfd.readouterr()
    assert json.loads(done.out)["passed"]
    assert "spec.json: the spec can't be written: disk full" in done.err


MISTAKES: list[tuple[list[str], str]] = [
    (["fake", "none.xyz"], "no such file"),
    (["fakes", "bar.extxyz"], "Did you mean 'fake'?"),
    (["nowhere.py:load", "bar.extxyz"], "no such file"),
    ([f"{TOYS}:Nothing", "bar.extxyz"], "Nothing"),
    (["fake", "bar.extxyz", "--option", "cutof=3"], "cutof"),
    (["fake", "bar.extxyz", "--ranks", "1"], "at least 2"),
    (["fake", "bar.extxyz", "--spec", "none.json"], "no such file"),
    (["fake", "bar.extxyz", "--spec", "bar.extxyz"], "not a JSON file"),
    (["fake", "bar.extxyz", "--save", "no/such/spec.json"], "a folder that exists"),
    (["fake", "bar.extxyz", "--save", "/dev/null"], "a folder that exists"),
    (["fake", "bar.extxyz", "--save", "/proc/x.json"], "can't be written"),
]


@pytest.mark.parametrize(("args", "said"), MISTAKES, ids=[" ".join(args[-2:]) for args, _ in MISTAKES])
def test_mistakes(
    nvdd: Nvdd, structure: Path, capfd: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert nvdd.here("validate", *args) == 2
    err = [line for line in capfd.readouterr().err.splitlines() if "noise" not in line]
    err = [line for line in err if not line.startswith("nvdd: evaluating")]
    assert len(err) == 1, err
    assert err[0].count("InputError") == 0
    assert said in err[0]


def test_inside_a_group_it_is_refused(
    nvdd: Nvdd, structure: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert nvdd.here("validate", "fake", structure) == 2
    assert "outside torchrun" in capfd.readouterr().err
