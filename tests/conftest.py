"""Fixtures that every test may use, and the settings that make runs repeatable."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import _spawn

hypothesis.settings.register_profile(
    "nvdd",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("nvdd")

_DISTRIBUTED_FIXTURES = {"run_ranks", "rank_pool"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start several processes."""
    for item in items:
        if _DISTRIBUTED_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.distributed)


def pytest_sessionfinish() -> None:
    """End the ranks that were kept between tests."""
    _spawn.close_all()


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(fn, world, *args, timeout=60)``: call ``fn`` on new processes (``tests/_spawn.py``)."""
    return _spawn.run_ranks


@pytest.fixture
def rank_pool() -> Callable[..., _spawn.RankPool]:
    """``rank_pool(world).run(fn, *args, timeout=60)``: call ``fn`` on processes kept for the session."""
    return _spawn.rank_pool


def _marked(mark: str) -> list[int]:
    """Process ids whose environment carries ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environ:
            found.append(int(entry.name))
    return found


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Fail the test when a process that it started (through any number of others) is left at its end.

    The value is a function that lists those alive now.
    """
    value = uuid.uuid4().hex
    mark = f"{_spawn.TEST_MARK}={value}"
    monkeypatch.setenv(_spawn.TEST_MARK, value)
    yield lambda: _marked(mark)
    end = time.monotonic() + 5.0
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    if left:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]
        pytest.fail(f"processes left behind: {dict(zip(left, commands, strict=True))}")
