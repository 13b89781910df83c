"""A structure with known answers, and `nvdd` as a user calls it, with a plugin on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ase
import numpy as np
import pytest

from nvdd_core.cli.main import main
from nvdd_core.plugins import PluginManager, use_manager

from .fake_plugin import install


def fcc(n: int, a: float = 1.6) -> ase.Atoms:
    """The perturbed lattice of the acceptance cases (reduced units, labelled argon)."""
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    corners = [np.array([x, y, z]) for x in range(n) for y in range(n) for z in range(n)]
    points = np.array([(corner + b) * a for corner in corners for b in basis])
    k = np.arange(len(points))
    points += 0.05 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1)
    return ase.Atoms(f"Ar{len(points)}", positions=points, cell=[n * a] * 3, pbc=True)


@dataclass(frozen=True)
class Nvdd:
    """Ways to call the command line in a folder that has the fake plugin."""

    folder: Path
    plugin: Path

    def here(self, *args: object) -> int:
        """Run in this process, one rank; return the exit code."""
        return main([str(arg) for arg in args])

    def process(
        self, *args: object, limit: float = 120.0, flags: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run as a process of its own."""
        env = {**os.environ, "PYTHONPATH": str(self.plugin), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *flags, "-m", "nvdd_core.cli.main", *map(str, args)]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=limit
        )


@pytest.fixture
def nvdd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvdd]:
    """``nvdd.here(...)`` and ``nvdd.process(...)``, with the model ``fake``."""
    plugin = install(tmp_path / "plugin")
    monkeypatch.syspath_prepend(str(plugin))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "NVDD_"))]:
        if name != "NVDD_TEST_MARK":
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "fake_x"]:
        monkeypatch.delitem(sys.modules, name)
    with use_manager(PluginManager()):
        yield Nvdd(tmp_path, plugin)
    for name in [name for name in sys.modules if name.split(".")[0] == "fake_x"]:
        del sys.modules[name]
