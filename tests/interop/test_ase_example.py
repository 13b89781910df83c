"""The example of docs/ase.md, and what a call costs beyond its evaluation."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.interop.conftest import crystal, new_calculator

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "docs/examples/relax.py"


def _numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.?\d*", text)]


def test_the_example_prints_what_the_page_shows() -> None:
    blocks = runpy.run_path(str(ROOT / "docs" / "generate.py"))["blocks"](ROOT / "docs" / "ase.md")
    (shown,) = [block.body for block in blocks if block.what == f"python {SCRIPT}"]
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = shown.splitlines()[2:-1]  # without the fence and the command
    found = done.stdout.splitlines()
    assert len(found) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert re.sub(r"[\d.-]+", "#", ours) == re.sub(r"[\d.-]+", "#", theirs)
        assert np.allclose(_numbers(ours), _numbers(theirs), rtol=0, atol=2e-4)


@pytest.mark.alone
def test_a_call_costs_little_beyond_the_evaluation() -> None:
    """0.8 ms were measured for 4,000 atoms on a busy machine; 4 ms are refused."""
    atoms = crystal(10, 10, 10)
    rng = np.random.default_rng(seed=1)
    beyond = []
    with new_calculator(1) as calc:
        atoms.calc = calc
        atoms.get_forces()
        for _ in range(60):
            atoms.positions += 1e-4 * rng.normal(size=atoms.positions.shape)
            begin = time.perf_counter()
            atoms.get_forces()
            beyond.append(time.perf_counter() - begin - calc.evaluation_s)
        assert calc.n_rebuilds == 1
        assert calc.n_evaluations == 61
    assert min(beyond) < 4e-3
