"""What went wrong in a group of worker processes, and one error made of it.

A rank that fails leaves a `FailureRecord` in the launch folder; `root_cause` weighs the records of all ranks with
the way their processes ended and returns the error that started it.

Invariant: whatever is known, the outcome is one error of one line that names a rank. Layer: cli.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nvdd_core import errors
from nvdd_core.errors import NvddError, RankLostError

_RANK = re.compile(r"rank \d+")
# A worker that failed waits this long for the others' records, so that --debug shows every rank's traceback.
_GATHER_S = 1.0
# The launcher resorts to SIGKILL only after this long, so an earlier one came from elsewhere.
_LAUNCHER_PATIENCE_S = 15.0


@dataclass(frozen=True)
class FailureRecord:
    """How the work failed on one rank."""

    rank: int
    type: str
    message: str
    exit_code: int
    traceback: str
    time: float

    @classmethod
    def of(cls, rank: int, exc: BaseException) -> FailureRecord:
        """Describe `exc` as raised on `rank`."""
        code = exc.exit_code if isinstance(exc, NvddError) else 1
        text = "".join(traceback.format_exception(exc))
        return cls(rank, type(exc).__name__, str(exc), code, text, time.time())

    def is_echo(self) -> bool:
        """Return whether this rank only repeats what happened on another one."""
        head = self.message.partition(": ")[0]
        repeats = _RANK.fullmatch(head) is not None and head != f"rank {self.rank}"
        return repeats or self.type in {"RankLostError", "PeerError"}


def read_records(folder: Path) -> list[FailureRecord]:
    """Return the records of failed ranks in a launch folder, by rank."""
    records = [FailureRecord(**json.loads(path.read_text("utf-8"))) for path in folder.glob("failure-*.json")]
    return sorted(records, key=lambda record: record.rank)


def root_cause(records: Sequence[FailureRecord], failures: Mapping[int, tuple[int, float]]) -> NvddError:
    """Make one error of what is known about a failed group.

    Parameters
    ----------
    records : sequence of FailureRecord
        What the ranks themselves wrote.
    failures : mapping
        Rank to (exit code, time); a negative code is the number of the signal that ended the rank.

    Returns
    -------
    NvddError
        Of the recorded type where that is one of nvdd's own.
    """
    by_time = sorted(records, key=lambda record: record.time)
    first = next((record for record in by_time if not record.is_echo()), None)
    recorded = {record.rank for record in records}
    silent = {rank: end for rank, end in failures.items() if rank not in recorded}
    # SIGTERM is what the launcher sends to the others once one rank has failed.
    killed = {rank: end for rank, end in silent.items() if end[0] < 0 and -end[0] != signal.SIGTERM}
    if killed:
        rank, (code, when) = min(killed.items(), key=lambda item: (item[1][1], item[0]))
        if first is None or first.time + _LAUNCHER_PATIENCE_S > when:
            return RankLostError(_killed(rank, -code))
    left = {rank: end for rank, end in silent.items() if end[0] > 0}
    if first is None and left:
        rank = min(left)
        return RankLostError(
            f"rank {rank}: the process ended with exit code {left[rank][0]} and gave no reason"
        )
    if first is None and by_time:
        first = by_time[0]
    if first is not None:
        return rebuilt(first)
    rank = min(silent, default=0)
    return RankLostError(_killed(rank, -silent[rank][0]) if silent else "a worker process failed")


def rebuilt(record: FailureRecord) -> NvddError:
    """Return a record as an error of one line that names the rank."""
    own = vars(errors).get(record.type)
    head, _, message = record.message.partition(": ")
    if not _RANK.fullmatch(head):
        head, message = f"rank {record.rank}", record.message
    if isinstance(own, type) and issubclass(own, NvddError):
        return own(f"{head}: {' '.join(message.split())}")
    return NvddError(f"{head}: {record.type}: {first_line(message)}")


def _killed(rank: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hint = "; the system may have run out of memory" if number == signal.SIGKILL else ""
    return f"rank {rank} was killed by signal {number} ({name}){hint}"


def first_line(text: str) -> str:
    """Return the first line of an error's text."""
    return text.strip().splitlines()[0] if text.strip() else "(no message)"


def write_record(folder: Path, record: FailureRecord) -> None:
    """Leave `record` in the launch folder, complete or not at all."""
    path = folder / f"failure-{record.rank}.json"
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
    aside.rename(path)


def wait_for_records(folder: Path, ranks: int) -> None:
    """Wait a moment for the records of all `ranks`."""
    end = time.monotonic() + _GATHER_S
    while time.monotonic() < end and len(list(folder.glob("failure-*.json"))) < ranks:
        time.sleep(0.02)
