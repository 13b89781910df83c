"""Which group the variables of torchrun and srun describe, where it meets, and how other interpreters are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvdd_core.environment import (
    GROUP_VARIABLES,
    child_environment,
    fallback_cache,
    found_group,
    found_local_rank,
    interpreter_command,
    meeting_point,
    one_at_a_time,
    search_path,
    stderr_without,
)
from nvdd_core.errors import InputError

STEP = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


def test_found_group() -> None:
    assert found_group({}) is None
    assert found_group({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    assert found_group({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}) == (1, 4)
    # A batch script of one task is no group: the user may start local processes in it.
    assert found_group({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    with pytest.raises(InputError, match="whole numbers"):
        found_group({"RANK": "a", "WORLD_SIZE": "8"})


def test_the_shell_of_a_batch_script_is_no_group() -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert found_group(shell) is None
    assert found_group({**shell, "SLURM_STEP_ID": "0"}) == (0, 4)


def test_local_rank() -> None:
    assert found_local_rank({}) == found_local_rank({"LOCAL_RANK": "3"}) == 0
    assert found_local_rank({**STEP, "SLURM_LOCALID": "1"}) == 1
    assert found_local_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "SLURM_LOCALID": "0"}) == 2
    with pytest.raises(InputError, match="LOCAL_RANK is 'x'"):
        found_local_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "x"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        (None, "127.0.0.1"),
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,b2", "a1"),
        ("n[3,5].cluster", "n3"),
    ],
)
def test_meeting_point_under_slurm(nodes: str | None, host: str) -> None:
    found = meeting_point(STEP if nodes is None else {**STEP, "SLURM_STEP_NODELIST": nodes})
    scheme, _, rest = found.partition("://")
    name, _, port = rest.partition(":")
    assert (scheme, name) == ("tcp", host)
    assert 20_000 <= int(port) < 40_000


def test_meeting_point_that_is_given() -> None:
    assert meeting_point({**STEP, "MASTER_ADDR": "x", "MASTER_PORT": "1"}) == "env://"
    assert meeting_point({**STEP, "MASTER_ADDR": "x"}).startswith("tcp://x:")
    assert meeting_point({"RANK": "0"}) == "env://"


STARTER = """
import json, subprocess
from nvdd_core.environment import child_environment, interpreter_command, search_path
command = interpreter_command("-c", "import json, sys; print(json.dumps([sys.flags.optimize, sys.path[0]]))")
done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
print(json.dumps([json.loads(done.stdout), search_path()]))
"""


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"]])
def test_another_interpreter_is_started_alike(tmp_path: Path, flags: list[str]) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *flags, "-c", STARTER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (optimize, first), path = json.loads(done.stdout)
    assert optimize == sum(flag.count("O") for flag in flags)
    assert first == root  # not "", the folder that it started in
    assert path[0] == str(tmp_path)
    assert root in path


def test_a_child_is_in_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUP_VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NVDD_KEPT", "yes")
    found = child_environment(NVDD_MORE="too")
    assert not found.keys() & GROUP_VARIABLES
    assert (found["NVDD_KEPT"], found["NVDD_MORE"]) == ("yes", "too")
    assert os.environ["RANK"] == "1"
    assert found_group(found) is None


def test_search_path_holds_no_empty_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    assert search_path() == [str(tmp_path), "/somewhere"]
    assert interpreter_command("x")[-1] == "x"


_HOLD = """
import sys, time
from pathlib import Path
from nvdd_core.environment import one_at_a_time
with one_at_a_time(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(0.3)
    print("is done", flush=True)
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    """A process that comes second goes on when the first is done; its own error passes and frees the file."""
    lock = tmp_path / "lock"
    with subprocess.Popen(interpreter_command("-c", _HOLD, str(lock)), stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with one_at_a_time(lock):
            os.set_blocking(other.stdout.fileno(), False)
            assert other.stdout.readline() == b"is done\n"
    with pytest.raises(KeyError), one_at_a_time(lock):
        raise KeyError
    with one_at_a_time(lock):
        pass


def test_without_a_lock_nobody_waits(tmp_path: Path) -> None:
    with pytest.raises(KeyError), one_at_a_time(tmp_path / "no such folder" / "lock"):
        raise KeyError


def test_stderr_without(capfd: pytest.CaptureFixture[str]) -> None:
    with stderr_without(b"no driver"):
        os.write(2, b"there is no driver here\nthis is kept\n")
    with pytest.raises(KeyError), stderr_without(b"no driver"):
        _write_and_fail()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "this is kept\nthis says why\nafter\n"


def _write_and_fail() -> None:
    os.write(2, b"this says why\n")
    raise KeyError


def test_stderr_of_a_process_that_has_none() -> None:
    code = "from nvdd_core.environment import stderr_without\nwith stderr_without(b'x'): print('done')"
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *interpreter_command("-c", code)]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"done\n"


def test_fallback_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert fallback_cache("prog", None, "me") is None
    assert fallback_cache("prog", str(tmp_path / "mine"), "me") is None
    assert not caplog.records
    found = fallback_cache("prog", "/dev/null/x", "me")
    assert found == fallback_cache("prog", "/dev/null/x", "me")  # one for all processes of a user
    assert found is not None
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o077 == 0
    assert f"me: /dev/null/x can't be written to, so compiled code goes to {found}" in caplog.messages
    # a link may lead to what another user wrote
    found.rmdir()
    found.symlink_to(tmp_path / "caches")
    other = fallback_cache("prog", "/dev/null/x", "me")
    assert other is not None
    assert other not in {found, tmp_path / "caches"}
    assert other.stat().st_mode & 0o077 == 0
