"""How work is started, and how one error is made of what the ranks say."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvdd_core import errors
from nvdd_core.cli.config import EvaluateJob, RunJob, build
from nvdd_core.cli.failures import FailureRecord, root_cause
from nvdd_core.cli.launch import execute, worker_environment

TASKS = """
import os, signal, sys, time
from nvdd_core.errors import InputError
rank = int(os.environ.get("RANK", 0))
def say(job):
    print(f"rank {rank} {job.model} {os.environ['OMP_NUM_THREADS']}\\n", end="", flush=True)
def refuse(job):
    if rank == 1:
        raise InputError("two\\nlines")
    time.sleep(60)
def fail(job):
    if rank == 1:
        raise ValueError("boom\\nat length")
    time.sleep(60)
def all_fail(job):
    raise InputError("rank 0: bad" if rank else "bad")
def kill(job):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
def leave(job):
    if rank == 1:
        os._exit(3)
    time.sleep(60)
def hang(job):
    open(f"up-{rank}", "w").close()
    time.sleep(60)
"""

# No main guard on purpose: workers must not run the caller's script again.
DRIVER = """
import sys
from nvdd_core.cli.config import EvaluateJob, build
from nvdd_core.cli.launch import execute
from nvdd_core.errors import NvddError
job = build(EvaluateJob, {"structure": "x.xyz", "model": "m", "ranks": 2}, {})
print("driver runs", flush=True)
try:
    execute("launch_tasks:" + sys.argv[1], job, debug="--debug" in sys.argv)
except NvddError as exc:
    print(f"{type(exc).__name__} {exc.exit_code} {exc}")
"""

MEMORY = "the system may have run out of memory"

JOB = build(EvaluateJob, {"structure": "x.xyz", "model": "m"}, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "launch_tasks.py").write_text(TASKS)
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    (folder / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, str(folder / "driver.py"), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(folder: Path, process: subprocess.Popen[str], limit: float = 30.0) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=limit)
    assert list((folder / "tmp").glob("nvdd-launch-*")) == []
    assert list((folder / "tmp").glob("torchelastic_*")) == []
    return out.splitlines(), err


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("say", ["rank 0 m 1", "rank 1 m 1"]),
        ("refuse", ["InputError 2 rank 1: two lines"]),
        ("fail", ["NvddError 1 rank 1: ValueError: boom"]),
        ("all_fail", ["InputError 2 rank 0: bad"]),
        ("kill", ["RankLostError 1 rank 1 was killed by signal 9 (SIGKILL); " + MEMORY]),
        ("leave", ["RankLostError 1 rank 1: the process ended with exit code 3 and gave no reason"]),
    ],
)
def test_outcomes(folder: Path, task: str, said: list[str]) -> None:
    out, err = finish(folder, start(folder, task))
    assert sorted(out) == sorted(["driver runs", *said])
    assert err == ""


@pytest.mark.usefixtures("no_orphans")
def test_debug_shows_tracebacks(folder: Path) -> None:
    _, err = finish(folder, start(folder, "all_fail", "--debug"))
    assert "--- rank 0 ---" in err
    assert "--- rank 1 ---" in err
    assert err.count("in all_fail") == 2


def _wait_for(paths: list[Path], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all(folder: Path, number: signal.Signals, no_orphans: Callable[[], list[int]]) -> None:
    process = start(folder, "hang")
    _wait_for([folder / "up-0", folder / "up-1"])
    begun = time.monotonic()
    process.send_signal(number)
    _, said = finish(folder, process)
    assert time.monotonic() - begun < 10.0
    assert process.returncode in {-number, 128 + number, 1}
    assert number == signal.SIGINT or "ended by SIGTERM" in said
    assert no_orphans() == []


def test_workers_end_with_a_killed_parent(folder: Path, no_orphans: Callable[[], list[int]]) -> None:
    process = start(folder, "hang")
    _wait_for([folder / "up-0", folder / "up-1"])
    process.kill()
    process.communicate(timeout=10)
    end = time.monotonic() + 5.0
    while no_orphans() and time.monotonic() < end:
        time.sleep(0.1)
    assert no_orphans() == []


@pytest.mark.usefixtures("no_orphans")
def test_program_from_standard_input(folder: Path) -> None:
    code = textwrap.dedent(DRIVER).replace("sys.argv[1]", "'say'")
    done = subprocess.run(
        [sys.executable, "-O"], input=code, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["driver runs", "rank 0 m 1", "rank 1 m 1"], done.stderr


def test_ranks_must_fit_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.InputError, match="3 ranks asked for"):
        execute("launch_tasks:say", JOB.model_copy(update={"ranks": 3}))


def test_one_rank_runs_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.InputError, match="bad"):
        execute("launch_tasks:all_fail", JOB)


@pytest.mark.parametrize(
    ("kind", "terminal", "told"), [(0, False, 1), (0, True, 1), (1, False, 0), (1, True, 1)]
)
def test_the_wait_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: int, terminal: bool, told: int
) -> None:
    """Starting takes seconds, with a large model on a busy machine a minute: no silence until it is over."""
    monkeypatch.syspath_prepend(str(folder))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", said)
    job = build((RunJob, EvaluateJob)[kind], {"structure": "x.xyz", "model": "m"}, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    execute("launch_tasks:say", job)
    assert said.getvalue() == "nvdd: starting m on 1 rank\n" * told
    monkeypatch.setenv("RANK", "1")  # of a group, one speaks
    monkeypatch.setenv("WORLD_SIZE", "2")
    execute("launch_tasks:say", job)
    assert said.getvalue() == "nvdd: starting m on 1 rank\n" * told


def test_worker_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert worker_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in worker_environment()


def record(rank: int, kind: str, message: str, code: int = 1, at: float = 100.0) -> FailureRecord:
    return FailureRecord(rank, kind, message, code, "", at)


def test_origin_wins_over_echo() -> None:
    echo = record(0, "InputError", "rank 2: atom 57 is not finite", at=99.0)
    origin = record(2, "InputError", "atom 57 is not finite", at=100.0)
    found = root_cause([echo, origin], {0: (2, 100.0), 2: (2, 100.0)})
    assert isinstance(found, errors.InputError)
    assert str(found) == "rank 2: atom 57 is not finite"


def test_echo_alone_still_names_the_origin() -> None:
    found = root_cause(
        [record(0, "ValueError", "rank 2: boom")], {0: (1, 100.0), 2: (-signal.SIGTERM, 100.0)}
    )
    assert str(found) == "rank 2: ValueError: boom"


def test_a_kill_explains_lost_contact() -> None:
    lost = record(0, "RankLostError", "lost contact with another rank")
    found = root_cause([lost], {0: (1, 100.0), 1: (-signal.SIGSEGV, 100.0)})
    assert str(found) == "rank 1 was killed by signal 11 (SIGSEGV)"


def test_a_kill_by_the_launcher_explains_nothing() -> None:
    first = record(0, "ValueError", "boom", at=100.0)
    found = root_cause([first], {0: (1, 100.0), 1: (-signal.SIGKILL, 131.0)})
    assert str(found) == "rank 0: ValueError: boom"


def test_records_travel_as_json() -> None:
    made = FailureRecord.of(3, errors.SpecError("no"))
    assert (made.rank, made.type, made.exit_code) == (3, "SpecError", 2)
    assert json.loads(json.dumps(made.__dict__))["message"] == "no"
