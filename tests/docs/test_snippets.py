"""Interactive snippets of the pages: what they show is what the program answers."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SNIPPET = re.compile(r"^```pycon\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
WITH_SNIPPETS = [page for page in sorted(DOCS.glob("*.md")) if _SNIPPET.search(page.read_text("utf-8"))]


def test_there_are_snippets() -> None:
    assert {"distribution.md", "adapters.md", "spec.md"} <= {page.name for page in WITH_SNIPPETS}


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_answer_as_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page are one session, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS / "examples"))  # the pages' own modules
    text = page.read_text(encoding="utf-8")
    # Everything but the snippets becomes empty lines, so that a failure names the page's own line.
    kept, end = [], 0
    for found in _SNIPPET.finditer(text):
        kept += ["\n" * text.count("\n", end, found.start(1)), found[1]]
        end = found.end(1)
    session = doctest.DocTestParser().get_doctest("".join(kept), {}, page.name, str(page), 0)
    report: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    results = doctest.DocTestRunner(optionflags=flags).run(session, out=report.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(report)
