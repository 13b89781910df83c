"""Where a command's work runs: here, in the group found, or in worker processes started on this machine.

`execute` decides. In a group started by ``torchrun`` or ``srun``, and for one rank, the work runs in this
process. Otherwise torch's elastic launcher starts one worker per rank (`nvdd_core.cli.worker`), each of which
leaves a record of its failure in a launch folder, and `root_cause` makes one error of them.

Invariant: whichever way the work ends, no worker outlives the command and the launch folder is removed.
Layer: cli.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvdd_core import errors
from nvdd_core.cli.config import EvaluateJob, JobConfig, RunJob
from nvdd_core.errors import InputError, NvddError, RankLostError

_KINDS: dict[str, type[JobConfig]] = {kind.__name__: kind for kind in (EvaluateJob, RunJob)}
_RANK = re.compile(r"rank \d+")
_WORKER = Path(__file__).with_name("worker.py")
_JOB_FILE = "job.json"
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


def found_group(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (rank, size) of the group that this process was started in, or None.

    Raises
    ------
    InputError
        When the variables that describe the group are not numbers.
    """
    env = os.environ if env is None else env
    known = [("RANK", "WORLD_SIZE", 1)]
    # The shell of an sbatch script has the variables of a task, too, but srun alone sets a step's.
    if "SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env:
        known.append(("SLURM_PROCID", "SLURM_NTASKS", 2))
    for rank, size, least in known:
        if rank in env and size in env:
            try:
                place, count = int(env[rank]), int(env[size])
            except ValueError:
                raise InputError(
                    f"{rank}={env[rank]!r} and {size}={env[size]!r} should be whole numbers, as torchrun and "
                    "srun set them; unset them to start processes on this machine"
                ) from None
            if count >= least:
                return place, count
    return None


def execute(task: str, job: JobConfig, *, debug: bool = False) -> None:
    """Do a task on as many ranks as its job asks for.

    Parameters
    ----------
    task : str
        ``"module:function"``; the function takes the job. It is named, not passed, because its module imports
        torch, which mistakes in the input should not have to wait for, and because workers import it anew.
    job : JobConfig
    debug : bool
        Show the tracebacks of all ranks and the launcher's own log.

    Raises
    ------
    NvddError
        One error for the whole group, with the exit code that fits; anything a plugin raised is wrapped.
    """
    group, wanted = found_group(), job.wanted_ranks()
    if group is not None:
        if wanted is not None and wanted != group[1]:
            raise InputError(
                f"{wanted} ranks asked for, but the group that this process was started in has {group[1]}; "
                "leave --ranks out or start the group with that size"
            )
        with _environment(slurm_meeting_point(os.environ)):
            perform(task, job, rank=group[0])
    elif wanted is None or wanted == 1:
        with _environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
            perform(task, job)
    else:
        with tempfile.TemporaryDirectory(prefix="nvdd-launch-") as folder:
            _launch(task, job, wanted, Path(folder), debug)


def perform(task: str, job: JobConfig, rank: int | None = None) -> None:
    """Do a task in this process; foreign errors become an `NvddError` of one line."""
    try:
        pkgutil.resolve_name(task)(job)
    except NvddError:
        raise
    except Exception as exc:
        where = "" if rank is None else f"rank {rank}: "
        raise NvddError(f"{where}{type(exc).__name__}: {_first_line(str(exc))}") from exc


# -- the starting process ----------------------------------------------------------------------------------


def _launch(task: str, job: JobConfig, ranks: int, folder: Path, debug: bool) -> None:
    order = {
        "task": task,
        "kind": type(job).__name__,
        "job": job.model_dump(mode="json"),
        "ranks": ranks,
        "parent": os.getpid(),
        "sys_path": [entry or os.getcwd() for entry in sys.path],
    }
    (folder / _JOB_FILE).write_text(json.dumps(order), encoding="utf-8")
    with _environment(worker_environment(ranks, debug)), _quiet(debug), _signals_kept():
        failures = _elastic(ranks, folder)
    if failures is None:
        return
    records = read_records(folder)
    if debug:
        for record in records:
            sys.stderr.write(f"--- rank {record.rank} ---\n{record.traceback}")
    raise root_cause(records, failures)


def _elastic(ranks: int, folder: Path) -> dict[int, tuple[int, float]] | None:
    """Run the workers; return None when all succeeded, else (exit code, time) of those that failed."""
    # Imported here: it brings torch along.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        role="nvdd",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "log")),
        shutdown_timeout=5,
    )
    # Workers are fresh interpreters that run a file of ours: the caller's own main module, which may have no
    # main guard or come from standard input, is never imported again.
    flags = ["-P", *(["-" + "O" * sys.flags.optimize] if sys.flags.optimize else [])]
    try:
        elastic_launch(config, sys.executable)(*flags, str(_WORKER), str(folder))
    except ChildFailedError as exc:
        return {rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in exc.failures.items()}
    except SignalException as exc:
        _show_cursor()
        if exc.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(exc.sigval)) from None
    except (RuntimeError, OSError) as exc:
        raise NvddError(f"could not start {ranks} worker processes: {_first_line(str(exc))}") from exc
    return None


def worker_environment(ranks: int, debug: bool = False) -> dict[str, str]:
    """Return the variables that workers on this machine get where the user has not set them."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    if not debug:  # torch's C++ side reports each lost connection at length; the one line of ours says it all
        wanted["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def slurm_meeting_point(env: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, where missing, from what srun tells; nothing under torchrun."""
    if "RANK" in env:
        return {}
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    # The first host of a list such as "gpu[07-09,12],login1".
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    host = "".join(part or "" for part in first.groups()) if first else nodes
    number = f"{env.get('SLURM_JOB_ID', '0')}{env.get('SLURM_STEP_ID', '0')}"
    port = 20_000 + int(re.sub(r"\D", "", number) or 0) % 20_000
    wanted = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return {name: value for name, value in wanted.items() if name not in env}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    before = logging.root.manager.disable
    if not debug:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    # The launcher leaves its own handlers installed, which would raise its own exception long afterwards.
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [(name, signal.getsignal(name)) for name in names]
    try:
        yield
    finally:
        for name, handler in before:
            try:
                signal.signal(name, handler)
            except ValueError:  # not the main thread; the launcher has not installed any there either
                return


def _show_cursor() -> None:
    # A worker that is ended while it draws a progress bar leaves the terminal without a cursor.
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")


# -- what went wrong -----------------------------------------------------------------------------------------


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
    return NvddError(f"{head}: {record.type}: {_first_line(message)}")


def _killed(rank: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hint = "; the system may have run out of memory" if number == signal.SIGKILL else ""
    return f"rank {rank} was killed by signal {number} ({name}){hint}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "(no message)"


# -- the worker process --------------------------------------------------------------------------------------


def work(folder: Path) -> int:
    """Do the task that a launch folder describes as one rank of the group; return the exit code."""
    order: dict[str, Any] = json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    try:
        pkgutil.resolve_name(order["task"])(_KINDS[order["kind"]].model_validate(order["job"]))
    except BaseException as exc:
        if isinstance(exc, SystemExit) and exc.code in {0, None}:
            return 0
        _write_record(folder, FailureRecord.of(rank, exc))
        _wait_for_records(folder, int(order["ranks"]))
        return max(1, FailureRecord.of(rank, exc).exit_code)
    return 0


def _write_record(folder: Path, record: FailureRecord) -> None:
    path = folder / f"failure-{record.rank}.json"
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
    aside.rename(path)


def _wait_for_records(folder: Path, ranks: int) -> None:
    end = time.monotonic() + _GATHER_S
    while time.monotonic() < end and len(list(folder.glob("failure-*.json"))) < ranks:
        time.sleep(0.02)
