"""The documentation against the program: help texts, links, keys, tables, and that the example runs."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvdd_core import errors
from nvdd_core.cli import output
from nvdd_core.cli.config import RUN_FILE_KEYS, RunJob, build
from nvdd_core.dynamics import RankReport, build_summary
from nvdd_core.partition import Bisection
from nvdd_core.plugins import PluginStatus
from nvdd_core.runtime import PHASES
from tests.architecture._sources import APART, PLUGINS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLE = DOCS / "examples" / "crowded.py"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
PAGES: list[Path] = GENERATE["pages"]()
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("plugins/*/README.md"))]
BLOCKS = [block for page in PAGES for block in GENERATE["blocks"](page)]
CURRENT = [block for block in BLOCKS if block.kind in GENERATE["CHECKED"]]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def fences(path: Path, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall(path.read_text(encoding="utf-8")) if found == language]


def table_rows(text: str) -> dict[str, list[str]]:
    """First cells of all tables' rows, without backticks, to the other cells; the first table counts."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            first, *rest = [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
            rows.setdefault(first.strip("`"), rest)
    return rows


# -- what is written by docs/generate.py --


def _only_this_checkout() -> bool:
    """Whether the installed plugins are exactly those that `make` installs, on which listings depend."""
    found = json.loads(GENERATE["output"]("nvdd plugins --json"))["plugins"]
    shared = [plugin for plugin in PLUGINS if plugin not in APART]
    metadata = [(plugin / "pyproject.toml").read_text(encoding="utf-8") for plugin in shared]
    expected = {tomllib.loads(text)["project"]["name"] for text in metadata}
    return {plugin["distribution"] for plugin in found} == expected


@pytest.mark.parametrize("block", CURRENT, ids=lambda block: f"{block.path.name}: {block.what}")
def test_block_is_current(block: Any) -> None:
    is_listing = block.what in {"nvdd plugins", "nvdd models"}
    if is_listing and not _only_this_checkout():
        pytest.skip("other plugins are installed than `make` installs")
    assert block.body == GENERATE["body"](block.kind, block.what), "run: python docs/generate.py"


def test_blocks_are_found() -> None:
    marks = sum(len(re.findall(r"^<!-- /", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    assert len(BLOCKS) == marks  # a misspelt mark would be skipped without a word
    commands = {block.what for block in CURRENT}
    assert {"nvdd run --help", "nvdd evaluate --help", "nvdd plugins --help", "nvdd plugins"} <= commands


def test_a_stale_block_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n<!-- generated: echo new -->\nold\n<!-- /generated -->\n\n<!-- sample: echo x -->\nkept\n"
    )
    with page.open("a") as file:
        file.write("<!-- /sample -->\n")
    assert GENERATE["rewrite"](page, samples=False)
    assert "```text\n$ echo new\nnew\n```\n<!-- /generated -->" in page.read_text()
    assert "kept" in page.read_text()
    assert not GENERATE["rewrite"](page, samples=False)
    assert GENERATE["rewrite"](page, samples=True)
    assert "kept" not in page.read_text()


def test_samples_were_written() -> None:
    for block in BLOCKS:
        assert block.body.startswith(("```text\n$ ", "```python\n", "```toml\n", "```diff\n")), (
            f"{block.path}:{block.line}"
        )
        if block.kind != "step":  # a step may show what is refused; its session is played by test_sessions
            assert "nvdd: error:" not in block.body, f"{block.path}:{block.line}"
        assert not re.search(r"^\d+ failed", block.body, re.MULTILINE), f"{block.path}:{block.line}"


# -- links and text --


def slugs(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST make them."""
    found = set()
    for line in _FENCE.sub("", path.read_text(encoding="utf-8")).splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_exist(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in slugs(file), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    linked = set(_LINK.findall(text_of("index.md")))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(re.findall(r"^# ", _FENCE.sub("", text), re.MULTILINE)) == 1


def test_python_blocks_are_python() -> None:
    for page in PAGES:
        for code in fences(page, "python"):
            ast.parse(code)


def test_json_blocks_are_json() -> None:
    for page in PAGES:
        for code in fences(page, "json"):
            json.loads(code)


# -- tables against the program --


def test_run_keys_and_defaults() -> None:
    rows = table_rows(text_of("run.md"))
    for key in RUN_FILE_KEYS:
        flag, unit, default, _ = rows[key]
        assert f"--{key.replace('_', '-')}" in flag, key
        field = RunJob.model_fields[key]
        if field.is_required():
            assert default == "required", key
        elif field.default in (None, {}):
            assert default == "none", key
        else:
            assert default == f"`{field.default}`", key
        assert unit in {"", "K", "fs", "1/fs", "Angstrom", "steps"}, key


def test_run_files_are_valid() -> None:
    found = 0
    for page in (DOCS / "run.md", DOCS / "tutorial.md", DOCS / "pme.md"):
        for code in fences(page, "toml"):
            values = tomllib.loads(code)
            assert set(values) <= set(RUN_FILE_KEYS)
            build(RunJob, values, {})
            found += 1
    assert found >= 2


def test_output_files_and_summary_keys() -> None:
    text = text_of("run.md")
    rows = table_rows(text)
    assert set(output.OURS) <= set(rows)
    assert set(PHASES) <= set(rows)
    report = RankReport(rank=0, owned=1, ghost=0, edges=0, wall_s=1.0, phases={})
    summary: dict[str, Any] = build_summary([report], steps=1, dt_fs=1.0)
    names = {*summary, *summary["imbalance"], *summary["communication"], *summary["ranks"][0]}
    for name in names:
        assert f"`{name}`" in text, name


def test_evaluate_keys() -> None:
    text = text_of("evaluate.md")
    (example,) = fences(DOCS / "evaluate.md", "json")
    shown = json.loads(example)
    assert set(shown) <= set(table_rows(text))
    source = (ROOT / "nvdd_core" / "cli" / "evaluate_task.py").read_text(encoding="utf-8")
    (head,) = [
        node.value
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and function.name == "report_head"
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
    ]
    keys = {key.value for key in head.keys if isinstance(key, ast.Constant)}
    assert keys | {"forces"} == set(shown)


def test_errors_and_states() -> None:
    rows = table_rows(text_of("errors.md"))
    names = {part.strip(" `") for row in rows for part in row.split(",")}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.NvddError)]
    for cls in classes:
        assert cls.__name__ in names, cls.__name__
        if cls.__name__ in rows and rows[cls.__name__][0]:
            assert rows[cls.__name__][0] == f"`{cls.__mro__[1].__name__}`"
    assert {status.value for status in PluginStatus} <= set(table_rows(text_of("plugins.md")))


def test_switches_are_documented() -> None:
    documented = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in (ROOT / "nvdd_core").rglob("*.py"):
        for name in re.findall(r'"(NVDD_[A-Z_]+)"', path.read_text(encoding="utf-8")):
            assert name in documented, f"{path}: {name}"


def test_refit_threshold_is_the_codes() -> None:
    percent = round(100 * (Bisection(1, 1, 1).refit_above() - 1))
    assert f"exceeds the mean by more than {percent} %" in (ROOT / "ARCHITECTURE.md").read_text("utf-8")


# -- the example --


def _run_example() -> str:
    """Run the example in this process and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def _numbers(text: str) -> np.ndarray[Any, Any]:
    return np.array([float(word) for word in re.findall(r"-?\d+\.\d+", text)])


@pytest.fixture(scope="module")
def shown() -> str:
    """What the page says that the example prints."""
    (block,) = [block for block in BLOCKS if block.what == "python docs/examples/crowded.py"]
    return str(block.body)


@pytest.mark.parametrize("world", [1, 2])
def test_example_runs(run_ranks: Callable[..., list[str]], shown: str, world: int) -> None:
    first, *others = run_ranks(_run_example, world, group=False, timeout=120)
    assert others == [""] * (world - 1)
    expected, found = _numbers(shown), _numbers(first)
    assert len(found) == len(expected) > 10
    assert np.abs(found - expected).max() < 2e-6


def test_example_as_a_plugin(tmp_path: Path) -> None:
    """The light module and the loader of docs/plugins.md, found as an installed distribution is."""
    info = tmp_path / "nvdd_crowded-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvdd-crowded\nVersion: 0.1\n")
    (project,) = [tomllib.loads(code)["project"] for code in fences(DOCS / "plugins.md", "toml")]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["nvdd.plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[nvdd.plugins]", *lines]) + "\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLE.parent)])}
    command = [sys.executable, "-m", "nvdd_core.cli.main", "plugins", "check", "crowded", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (plugin,) = json.loads(done.stdout)["plugins"]
    assert plugin["status"] == "ok"
    assert [model["name"] for model in plugin["models"]] == ["crowded"]
