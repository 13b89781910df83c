"""The plugins' tests see the fixtures of the core's tests."""

from __future__ import annotations

from tests.conftest import no_orphans, rank_pool, run_ranks

__all__ = ["no_orphans", "rank_pool", "run_ranks"]
