"""Fixtures for tests of the plugin machinery."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins._fake import Fakes


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    """Fake plugins that other processes see."""
    (tmp_path / "site").mkdir()
    return Fakes(tmp_path)


@pytest.fixture
def here(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Fake plugins that this very process sees, with no switch set; modules are forgotten afterwards."""
    for name in ("NVDD_PLUGINS", "NVDD_DISABLE_PLUGINS", "NVDD_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(fakes.root / "site"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield fakes
    for name in fakes.names:
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]
