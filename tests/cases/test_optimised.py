"""O-49: what is refused is refused under ``python -O`` and ``-OO`` as well, in the same words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests._spawn import ONE_THREAD, ROOT


def _cases(*flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *flags, "-m", "tests.cases.refusals"],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return _cases()


@pytest.mark.distributed
def test_what_the_cases_say(plain: dict[str, Any]) -> None:
    for first, second, refused in plain["tiny_cells"]:
        assert (first, second) == pytest.approx((-29.2501954498, -3.8939922941), abs=2e-9)
        assert refused.startswith(
            "InputError: the cutoff with the skin, 100002 A, reaches over 4.6e+15 periodic"
        )
    for position, infinite, cell, late in plain["not_finite"]:
        for text in (position, infinite):
            assert "InputError" in text
            assert "the position of atom 57 is not finite" in text
        assert "the cell of system 0 holds a value that is not finite" in cell
        assert late.startswith("NumericalError: rank")
        assert "the position of atom 57 is not finite" in late
    for force, same, *wrong in plain["described_models"]:
        assert force == pytest.approx(-0.0102654766, abs=1e-8)
        assert same is True
        assert all(text.startswith("SpecError: ") for text in wrong), wrong
    for texts in plain["uneven_shardings"]:
        assert all(text.startswith("SpecError: ") for text in texts), texts
    for place in ("setup", "backward"):
        assert plain[place] == f"ValueError: rank 1: deliberate failure in {place}"


@pytest.mark.distributed
@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_optimisation_changes_nothing(plain: dict[str, Any], flag: str) -> None:
    assert _cases(flag) == plain
