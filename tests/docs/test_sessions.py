"""Pages whose commands build on each other: the whole session, in an environment of its own."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
SESSIONS = [p for p in GENERATE["pages"]() if any(b.kind in GENERATE["STEPS"] for b in GENERATE["blocks"](p))]
_TOLD = re.compile(r"^(energy|result|fix|next) .*$", flags=re.MULTILINE)


def told(text: str) -> list[str]:
    """The lines of an output that are the same on every machine, numbers rounded."""
    lines = [found[0] for found in _TOLD.finditer(text)]
    return [re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.6f}", line) for line in lines]


def test_the_tutorial_is_a_session() -> None:
    assert [page.name for page in SESSIONS] == ["plugin-tutorial.md"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_session_says_what_the_page_shows(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("copier")
    seen = 0
    for block, today in GENERATE["played"](page, GENERATE["Session"](tmp_path)):
        seen += 1
        if block.kind == "step":
            assert today == block.body, "run: python docs/generate.py --samples docs/plugin-tutorial.md"
        else:
            assert told(today) == told(block.body), block.what
            assert "error:" not in today, block.what
    assert seen > 8
