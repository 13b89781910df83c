"""Standard streams that are closed, full, or in an encoding that lacks a name's letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ase.io
import pytest

from .conftest import Nvdd, fcc

NVDD = f'"{sys.executable}" -m nvdd_core.cli.main'
PLAIN = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ODD = "h\N{LATIN SMALL LETTER A WITH DIAERESIS}.xyz"


def shell(nvdd: Nvdd, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `nvdd` with the redirections of a shell."""
    env = {**os.environ, "PYTHONPATH": str(nvdd.plugin), "OMP_NUM_THREADS": "1", **extra}
    return subprocess.run(
        ["bash", "-c", f"{NVDD} {command}"],
        cwd=nvdd.folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def structure(folder: Path, name: str = "a.xyz") -> None:
    ase.io.write(folder / name, fcc(1), format="extxyz")


EVALUATE = "evaluate a.xyz --model fake --device cpu"


@pytest.mark.parametrize("ranks", [1, 2])
def test_closed_streams(nvdd: Nvdd, ranks: int) -> None:
    structure(nvdd.folder)
    command = f"{EVALUATE} --ranks {ranks} --json out.json"
    assert shell(nvdd, f"{command} <&- >&- 2>&-").returncode == 0
    # had a descriptor been free, what the plugin prints would be in the file
    assert json.loads((nvdd.folder / "out.json").read_text())["n_edges"] == 250
    done = shell(nvdd, f"{EVALUATE} --ranks {ranks} --json - 2>&-")
    assert json.loads(done.stdout)["n_edges"] == 250
    assert shell(nvdd, f"evaluate none.xyz --model fake --ranks {ranks} 2>&-").returncode == 2


def test_closed_streams_of_listings(nvdd: Nvdd) -> None:
    for command in ("plugins", "models --json", "--help", "--version"):
        done = shell(nvdd, f"{command} >&-")
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_json_of_listings_stands_alone(nvdd: Nvdd) -> None:
    for command in ("plugins", "models"):
        done = shell(nvdd, f"{command} --json")
        assert json.loads(done.stdout)["schema"] == 1
        assert "noise of the light module on the descriptor" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(nvdd: Nvdd) -> None:
    structure(nvdd.folder)
    done = shell(nvdd, f"{EVALUATE} --json - > /dev/full")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_that_the_locale_lacks(nvdd: Nvdd, ranks: int) -> None:
    structure(nvdd.folder, ODD)
    flags = f"--model fake --device cpu --ranks {ranks}"
    done = shell(nvdd, f"evaluate {ODD} {flags}", **PLAIN)
    assert done.returncode == 0, done.stderr
    assert "structure  h" in done.stdout
    done = shell(nvdd, f"run {ODD} {flags} --steps 1 --output out-{ODD}", **PLAIN)
    assert done.returncode == 0, done.stderr
    assert ODD in (nvdd.folder / f"out-{ODD}" / "run.toml").read_text(encoding="utf-8")
    done = shell(nvdd, f"evaluate no-{ODD} {flags}", **PLAIN)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "Traceback" not in done.stderr
