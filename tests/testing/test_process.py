"""Functions in interpreters of their own."""

from __future__ import annotations

import pytest

from nvdd_core.testing.process import run_fresh


def test_a_child_belongs_to_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run_fresh("nvdd_core.environment:found_group") is None
    assert run_fresh("os:getenv", "RANK") is None
