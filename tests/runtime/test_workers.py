"""Pools of worker processes: results, errors, time limits, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, InputError, PeerError, RankLostError
from nvdd_core.runtime.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def total(mesh: Mesh, value: float) -> float:
    return float(mesh.all_reduce_sum_(torch.tensor([value * (mesh.rank + 1)]))[0])


def bad_rank(mesh: Mesh, rank: int) -> None:
    if mesh.rank == rank:
        raise ValueError("deliberate failure")
    mesh.all_reduce_sum_(torch.zeros(1))


def die(mesh: Mesh, rank: int) -> None:
    if mesh.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.all_reduce_sum_(torch.zeros(1))


def hang(mesh: Mesh) -> None:
    time.sleep(600)


def leave(mesh: Mesh) -> None:
    if mesh.rank == 1:
        sys.exit(3)


def environment(mesh: Mesh) -> tuple[str | None, int]:
    return os.environ.get("RANK"), mesh.size


def process_id(mesh: Mesh) -> int:
    return os.getpid()


def test_a_rank_that_dies_between_calls_is_named() -> None:
    with WorkerPool(2) as pool:
        os.kill(pool.run(process_id)[1], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(RankLostError, match=r"rank 1.*SIGKILL"):
            pool.run(total, 1.0)
        assert not pool.is_open


def test_each_rank_can_have_arguments_of_its_own() -> None:
    with WorkerPool(2) as pool:
        assert pool.run_each(total, [(1.0,), (10.0,)]) == [21.0] * 2
        with pytest.raises(InputError, match="arguments for 1 ranks; this pool has 2"):
            pool.run_each(total, [(1.0,)])
        assert pool.run(total, 1.0) == [3.0] * 2  # nothing was sent


def test_a_forked_child_ends_nobody() -> None:
    with WorkerPool(1) as pool:
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert Path(pool._folder).exists()  # where the ranks meet
        assert pool.run(total, 1.0) == [1.0]


def test_results_come_in_rank_order_and_the_pool_stays(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(3) as pool:
        assert pool.run(total, 2.0) == [12.0] * 3
        assert pool.run("tests.runtime.test_workers:total", 1.0) == [6.0] * 3
    assert not pool.is_open
    with pytest.raises(DistributedError, match="closed"):
        pool.run(total, 1.0)


def slowly(mesh: Mesh, value: int) -> int:
    time.sleep(0.05)
    return value


def test_calls_of_several_threads_take_turns(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(2) as pool, ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda value: pool.run(slowly, value, timeout_s=60), range(12))
        assert list(found) == [[value, value] for value in range(12)]


def test_error_of_a_rank_is_raised_here(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(2) as pool:
        with pytest.raises(ValueError, match="rank 1: deliberate failure") as caught:
            pool.run(bad_rank, 1)
        assert "bad_rank" in caught.value.__notes__[0]
        assert not pool.is_open


def test_killed_rank(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(2) as pool, pytest.raises(RankLostError, match=r"rank 0.*SIGKILL"):
        pool.run(die, 0, timeout_s=60)


def test_rank_that_exits(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(2) as pool, pytest.raises(PeerError, match="rank 1: SystemExit: 3"):
        pool.run(leave, timeout_s=60)


def test_time_limit(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(2) as pool, pytest.raises(DistributedError, match="ranks 0, 1 did not answer within 1 s"):
        pool.run(hang, timeout_s=1)


def test_what_cannot_travel_is_refused(no_orphans: Callable[[], list[int]]) -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(InputError, match="top level of a module"):
            pool.run(lambda mesh: None)
        assert pool.run(total, 1.0) == [1.0]  # nothing was sent, so the pool is as it was


def test_group_of_the_parent_is_not_inherited(
    monkeypatch: pytest.MonkeyPatch, no_orphans: Callable[[], list[int]]
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "7")
    with WorkerPool(2) as pool:
        assert pool.run(environment) == [(None, 2)] * 2


PROGRAM = """
from nvdd_core.runtime.workers import WorkerPool
pool = WorkerPool(2)
print(pool.run("tests.runtime.test_workers:total", 1.0))
"""
OWN_FUNCTION = """
from nvdd_core.runtime.workers import WorkerPool
def double(mesh, x):
    return 2 * x
{guard}with WorkerPool(2) as pool:
    {indent}print(pool.run(double, 4))
"""


def run_python(
    *args: str, text: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *args],
        input=text,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("how", ["-c", "stdin", "script"])
def test_any_kind_of_program(how: str, tmp_path: Path, no_orphans: Callable[[], list[int]]) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    args = {"-c": ("-c", PROGRAM), "stdin": ("-",), "script": (str(script),)}[how]
    done = run_python(*args, text=PROGRAM if how == "stdin" else None)
    assert done.stdout == "[3.0, 3.0]\n", done.stderr


def test_function_of_a_guarded_script(tmp_path: Path, no_orphans: Callable[[], list[int]]) -> None:
    script = tmp_path / "program.py"
    script.write_text(OWN_FUNCTION.format(guard='if __name__ == "__main__":\n  ', indent="  "))
    done = run_python(str(script))
    assert done.stdout == "[8, 8]\n", done.stderr


def test_function_of_an_unguarded_script_gets_one_clear_error(
    tmp_path: Path, no_orphans: Callable[[], list[int]]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(OWN_FUNCTION.format(guard="", indent=""))
    done = run_python(str(script))
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr.strip().splitlines()[-1] or "__main__" in done.stderr


def test_function_of_a_program_without_file(no_orphans: Callable[[], list[int]]) -> None:
    done = run_python("-c", OWN_FUNCTION.format(guard="", indent=""))
    assert done.returncode != 0
    assert "move it to a module" in done.stderr


def test_end_of_the_program_ends_the_ranks(tmp_path: Path, no_orphans: Callable[[], list[int]]) -> None:
    program = textwrap.dedent(
        """
        import os, signal
        from nvdd_core.runtime.workers import WorkerPool
        pool = WorkerPool(2)
        print("up", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = run_python("-c", program)
    assert done.stdout == "up\n"
    end = time.monotonic() + 10
    while no_orphans() and time.monotonic() < end:
        time.sleep(0.1)
    assert not no_orphans()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def mute(mesh: Mesh) -> None:
    raise Mute


def exhausted(mesh: Mesh) -> None:
    raise StopIteration


@pytest.mark.parametrize(("function", "text"), [(mute, "Mute"), (exhausted, "StopIteration")])
def test_errors_that_would_be_lost(
    function: Callable[[Mesh], None], text: str, no_orphans: Callable[[], list[int]]
) -> None:
    with WorkerPool(1) as pool, pytest.raises(PeerError, match=f"rank 0: {text}"):
        pool.run(function)
