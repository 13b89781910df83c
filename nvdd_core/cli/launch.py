"""Where a command's work runs: here, in the group found, or in worker processes started on this machine.

`execute` decides. In a group started by ``torchrun`` or ``srun``, and for one rank, the work runs in this
process. Otherwise torch's elastic launcher starts one worker per rank (`nvdd_core.cli.worker`), each of which
leaves a record of its failure in a launch folder, from which `failures.root_cause` makes one error.

Invariant: whichever way the work ends, no worker outlives the command and the launch folder is removed.
Layer: cli.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvdd_core.cli.config import EvaluateJob, JobConfig, RunJob
from nvdd_core.cli.failures import (
    FailureRecord,
    first_line,
    read_records,
    root_cause,
    wait_for_records,
    write_record,
)
from nvdd_core.environment import found_group, interpreter_command, search_path
from nvdd_core.errors import InputError, NvddError

_KINDS: dict[str, type[JobConfig]] = {kind.__name__: kind for kind in (EvaluateJob, RunJob)}
_WORKER = Path(__file__).with_name("worker.py")
_RANKS_A_CORE, _RANKS_BESIDE_CORES = 16, 64  # far above what is of use, far below what brings a machine down
_JOB_FILE = "job.json"


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
        _tell_start(job, *group)
        perform(task, job, rank=group[0])
    elif wanted is None or wanted == 1:
        _tell_start(job)
        perform(task, job)
    else:
        most = _RANKS_BESIDE_CORES + _RANKS_A_CORE * (os.cpu_count() or 1)
        if wanted > most:
            raise InputError(
                f"{wanted} ranks are more than this machine can start (at most {most}); give fewer --ranks"
            )
        _tell_start(job, ranks=wanted)
        with tempfile.TemporaryDirectory(prefix="nvdd-launch-") as folder:
            _launch(task, job, wanted, Path(folder), debug)


def _tell_start(job: JobConfig, rank: int = 0, ranks: int = 1) -> None:
    """Say what takes the seconds before the first result: importing torch, making the model on every rank.

    A run says so wherever its progress goes; an evaluation, whose standard error means that something is odd, only to
    somebody at a terminal.
    """
    if rank == 0 and (isinstance(job, RunJob) or sys.stderr.isatty()):
        sys.stderr.write(f"nvdd: starting {job.model} on {ranks} rank{'' if ranks == 1 else 's'}\n")
        sys.stderr.flush()


def perform(task: str, job: JobConfig, rank: int | None = None) -> None:
    """Do a task in this process; foreign errors become an `NvddError` of one line."""
    try:
        pkgutil.resolve_name(task)(job)
    except NvddError:
        raise
    except Exception as exc:
        where = "" if rank is None else f"rank {rank}: "
        raise NvddError(f"{where}{type(exc).__name__}: {first_line(str(exc))}") from exc


# -- the starting process ----------------------------------------------------------------------------------


def _launch(task: str, job: JobConfig, ranks: int, folder: Path, debug: bool) -> None:
    order = {
        "task": task,
        "kind": type(job).__name__,
        "job": job.model_dump(mode="json"),
        "ranks": ranks,
        "parent": os.getpid(),
        "sys_path": search_path(),
    }
    (folder / _JOB_FILE).write_text(json.dumps(order), encoding="utf-8")
    with _environment(worker_environment(debug)), _quiet(debug), _signals_kept():
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
    program, *arguments = interpreter_command(str(_WORKER), str(folder))
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as exc:
        return {rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in exc.failures.items()}
    except SignalException as exc:
        _show_cursor()
        if exc.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.stderr.write(f"nvdd: error: ended by {signal.Signals(exc.sigval).name}\n")
        raise SystemExit(128 + int(exc.sigval)) from None
    except (RuntimeError, OSError) as exc:
        raise NvddError(f"could not start {ranks} worker processes: {first_line(str(exc))}") from exc
    return None


def worker_environment(debug: bool = False) -> dict[str, str]:
    """Return the variables that workers on this machine get where the user has not set them."""
    wanted = {"OMP_NUM_THREADS": "1"}  # as torchrun does, and as `session.group` does for a single rank
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    if not debug:  # torch's C++ side reports each lost connection at length; the one line of ours says it all
        wanted["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    return {name: value for name, value in wanted.items() if name not in os.environ}


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
        write_record(folder, FailureRecord.of(rank, exc))
        wait_for_records(folder, int(order["ranks"]))
        return max(1, FailureRecord.of(rank, exc).exit_code)
    return 0
