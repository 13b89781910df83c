"""The summary adds up and is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvdd_core.dynamics import RankReport, build_summary, write_summary
from nvdd_core.dynamics.summary import PHASES
from nvdd_core.errors import NvddError


def _reports() -> list[RankReport]:
    return [
        RankReport(
            rank=1,
            owned=1000,
            ghost=300,
            edges=50_000,
            wall_s=10.0,
            phases={"model": 6.0, "exchange": 1.5, "own_phase": 0.5},
            calls={"forward": 100, "all_reduce": 200},
            bytes={"forward": 5000, "all_reduce": 80},
            rebuilds=7,
        ),
        RankReport(
            rank=0,
            owned=3000,
            ghost=100,
            edges=150_000,
            wall_s=9.9,
            phases={"model": 8.0, "neighbor_list": 1.0},
            calls={"all_reduce": 200},
            bytes={"all_reduce": 80},
            peak_memory_bytes=123,
        ),
    ]


def test_numbers() -> None:
    summary = build_summary(_reports(), steps=1000, dt_fs=2.0, run={"model": "lj"})
    assert summary["n_atoms"] == 4000
    assert summary["n_listed_edges"] == 200_000
    assert summary["wall_s"] == 10.0
    assert summary["steps_per_s"] == 100.0
    assert summary["atom_steps_per_s"] == 400_000.0
    assert summary["ns_per_day"] == pytest.approx(100.0 * 86400 * 2e-6)
    assert summary["ghost_ratio"] == 0.1
    assert summary["imbalance"] == {"owned": 1.5, "listed_edges": 1.5, "work": pytest.approx(9.0 / 7.5)}
    assert summary["communication"] == {
        "collectives_per_rank": 300,
        "collectives_per_step": 0.3,
        "bytes_sent": 5160,
        "bytes_sent_per_step": 5.16,
    }
    assert summary["run"] == {"model": "lj"}


def test_every_rank_lists_every_phase_and_its_wall_time_is_whole() -> None:
    summary = build_summary(_reports(), steps=1000, dt_fs=2.0)
    assert [entry["rank"] for entry in summary["ranks"]] == [0, 1]
    for entry in summary["ranks"]:
        assert list(entry["phases_s"])[: len(PHASES)] == list(PHASES)
        assert sum(entry["phases_s"].values()) == pytest.approx(entry["wall_s"])
    assert summary["phases_s"]["model"] == {"mean": 7.0, "min": 6.0, "max": 8.0}
    assert summary["phases_s"]["own_phase"] == {"mean": 0.25, "min": 0.0, "max": 0.5}


def test_nothing_done() -> None:
    summary = build_summary([RankReport(0, 0, 0, 0, 0.0, {})], steps=0, dt_fs=1.0)
    assert summary["steps_per_s"] == 0.0
    assert summary["ghost_ratio"] == 0.0
    assert build_summary([], steps=0, dt_fs=1.0)["n_ranks"] == 0


def test_file(tmp_path: Path) -> None:
    summary = build_summary(_reports(), steps=1000, dt_fs=2.0)
    path = tmp_path / "out" / "summary.json"
    write_summary(path, summary)
    assert json.loads(path.read_text()) == summary
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]
    write_summary(path, {"format": "new"})
    assert json.loads(path.read_text()) == {"format": "new"}


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"a": 1})
    with pytest.raises(TypeError):
        write_summary(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(NvddError, match="can't write"):
        write_summary(path / "below", {"a": 1})
