"""What a run cost: ``summary.json`` from the ranks' own tallies.

Each rank fills a `RankReport`; rank 0 gathers them (``mesh.all_gather_objects``) and `build_summary` turns
them into one plain dictionary, `write_summary` into a file.

Invariant: the dictionary holds JSON values only, and every rank lists every phase, so that files compare.
Layer: dynamics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvdd_core.dynamics.files import write_json
from nvdd_core.dynamics.units import FS_PER_NS, SECONDS_PER_DAY
from nvdd_core.runtime.timer import PHASES

_WORK = ("neighbor_list", "model", "integrate")


@dataclass(frozen=True)
class RankReport:
    """One rank's tally of a run.

    Attributes
    ----------
    rank : int
        The rank.
    owned, ghost, edges : int
        Rows and directed edges in the lists at the end of the run, the skin's among them.
    wall_s : float
        Wall time of the run in seconds.
    phases : Mapping[str, float]
        Seconds by phase; phases that are missing count as zero.
    calls, bytes : Mapping[str, int]
        Collectives and sent bytes by kind (`comm.CommTally`).
    rebuilds : int
        How often neighbour lists and ghosts were made anew.
    peak_memory_bytes : int or None
        Largest resident size, where known.
    """

    rank: int
    owned: int
    ghost: int
    edges: int
    wall_s: float
    phases: Mapping[str, float]
    calls: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    rebuilds: int = 0
    peak_memory_bytes: int | None = None

    @property
    def all_phases(self) -> dict[str, float]:
        """Seconds of every known phase, then of others that were timed, then of the rest of the wall time."""
        seconds = {phase: float(self.phases.get(phase, 0.0)) for phase in PHASES}
        seconds.update({name: float(value) for name, value in self.phases.items() if name not in seconds})
        seconds["other"] = max(0.0, self.wall_s - sum(seconds.values()))
        return seconds

    @property
    def work_s(self) -> float:
        """Seconds of work that grows with the rank's own rows, without waiting for others."""
        return sum(self.phases.get(phase, 0.0) for phase in _WORK)


def build_summary(
    reports: Sequence[RankReport], *, steps: int, dt_fs: float, run: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Put the ranks' reports together.

    Parameters
    ----------
    reports : sequence of RankReport
        One of each rank.
    steps : int
        Steps of this run.
    dt_fs : float
        Time step in fs.
    run : Mapping[str, object], optional
        What was run (structure, model, integrator, versions); JSON values.

    Returns
    -------
    dict
        JSON values; times in seconds, rates per second of the slowest rank's wall time.
    """
    ranks = sorted(reports, key=lambda report: report.rank)
    n_rows = sum(report.owned for report in ranks)
    wall = max((report.wall_s for report in ranks), default=0.0)
    rate = _ratio(steps, wall)
    return {
        "format": "nvdd-summary",
        "version": 1,
        "run": dict(run or {}),
        "n_atoms": n_rows,
        "n_listed_edges": sum(report.edges for report in ranks),
        "n_ranks": len(ranks),
        "steps": steps,
        "dt_fs": dt_fs,
        "wall_s": wall,
        "steps_per_s": rate,
        "atom_steps_per_s": rate * n_rows,
        "ns_per_day": rate * dt_fs / FS_PER_NS * SECONDS_PER_DAY,
        "ghost_ratio": _ratio(sum(report.ghost for report in ranks), n_rows),
        "imbalance": {
            "owned": _imbalance([report.owned for report in ranks]),
            "listed_edges": _imbalance([report.edges for report in ranks]),
            "work": _imbalance([report.work_s for report in ranks]),
        },
        "phases_s": _spread(ranks),
        "communication": _communication(ranks, steps),
        "ranks": [_rank_entry(report) for report in ranks],
    }


def write_summary(path: Path | str, summary: Mapping[str, object]) -> None:
    """Write `summary` as JSON, aside and then renamed.

    Raises
    ------
    NvddError
        If the file can't be written.
    """
    write_json(Path(path), summary)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _imbalance(values: Sequence[float]) -> float:
    """Return the largest over the mean: 1 is even, 2 means that half the machine waits."""
    return _ratio(max(values) * len(values), sum(values)) if values else 0.0


def _spread(ranks: Sequence[RankReport]) -> dict[str, dict[str, float]]:
    """Return mean and extremes over ranks of every phase."""
    phases = [report.all_phases for report in ranks]
    names = dict.fromkeys(name for entry in phases for name in entry)
    out = {}
    for name in names:
        values = [entry.get(name, 0.0) for entry in phases]
        out[name] = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return out


def _communication(ranks: Sequence[RankReport], steps: int) -> dict[str, object]:
    """Return collectives of the busiest rank and bytes over all ranks."""
    calls = [sum(report.calls.values()) for report in ranks]
    sent = [sum(report.bytes.values()) for report in ranks]
    return {
        "collectives_per_rank": max(calls, default=0),
        "collectives_per_step": _ratio(max(calls, default=0), steps),
        "bytes_sent": sum(sent),
        "bytes_sent_per_step": _ratio(sum(sent), steps),
    }


def _rank_entry(report: RankReport) -> dict[str, object]:
    return {
        "rank": report.rank,
        "owned": report.owned,
        "ghost": report.ghost,
        "listed_edges": report.edges,
        "ghost_ratio": _ratio(report.ghost, report.owned),
        "rebuilds": report.rebuilds,
        "wall_s": report.wall_s,
        "phases_s": report.all_phases,
        "collectives": dict(report.calls),
        "bytes_sent": dict(report.bytes),
        "peak_memory_bytes": report.peak_memory_bytes,
    }
