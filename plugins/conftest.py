"""The plugins' tests see the fixtures of the core's tests; those of a plugin that isn't installed here are left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import no_orphans, rank_pool, run_ranks

__all__ = ["no_orphans", "rank_pool", "run_ranks"]

_FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/pyproject.toml"))
ABSENT = [folder for folder in _FOLDERS if importlib.util.find_spec(folder.name) is None]
collect_ignore = [str(folder) for folder in ABSENT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which of the tests that were asked for are left out, and how they are run."""
    config = terminalreporter.config
    asked = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    for folder in ABSENT:
        if not any(folder.is_relative_to(path.resolve()) for path in asked):
            continue
        terminalreporter.write_line(
            f"left out: {folder.parent.name}/{folder.name}/tests, since {folder.name} is not installed here; "
            f"run them by: make conform PLUGIN={folder.name.removeprefix('nvdd_')}"
        )
