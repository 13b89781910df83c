"""The harness of the distributed tests, tested: results, errors, hangs, deaths, clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import _spawn
from tests._spawn import RankFailure, RankPool, RankTimeout

Run = Callable[..., list[Any]]
Pool = Callable[..., RankPool]


@dataclass(frozen=True)
class Answer:
    """A result of a type that only this test module knows."""

    rank: int
    total: torch.Tensor


class OwnError(ValueError):
    """An error of a type that only this test module knows."""


class NotPicklableError(Exception):
    """An error that can't travel between processes."""

    def __init__(self) -> None:
        super().__init__("kept here")
        self.kept = lambda: None


def _sum(n: int, scale: float = 1.0) -> Answer:
    total = torch.full((n,), scale * (dist.get_rank() + 1.0))
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total)


def _state() -> tuple[Any, ...]:
    return os.environ.get("NVDD_X"), Path.cwd(), torch.get_num_threads(), torch.rand(1).item(), os.getpid()


def _echo(value: Any) -> Any:
    return value


def _raise_on(rank: int, others_wait: bool) -> None:
    print("about to fail")
    if dist.get_rank() == rank:
        raise OwnError(f"cause on {rank}")
    if others_wait:
        dist.all_reduce(torch.zeros(1))


def _raise_on_odd() -> None:
    if dist.get_rank() % 2:
        raise ValueError(f"odd rank {dist.get_rank()}")
    time.sleep(1000)


def _raise_unpicklable() -> None:
    raise NotPicklableError


def _hang_in_collective() -> None:
    if dist.get_rank() != 0:
        _wait_for_rank_zero()
    else:
        time.sleep(1000)


def _wait_for_rank_zero() -> None:
    dist.all_reduce(torch.zeros(1))


def _hang_with_child() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"], check=True)


def _die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def _leave_early() -> int:
    dist.destroy_process_group()
    return os.getpid()


def _own_group() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return before, int(total)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("fresh", [False, True])
def test_results_come_in_rank_order(run_ranks: Run, fresh: bool) -> None:
    answers = run_ranks(_sum, 2, 3, scale=2.0, fresh=fresh)
    assert [a.rank for a in answers] == [0, 1]
    assert all(type(a) is Answer and a.total.tolist() == [6.0] * 3 for a in answers)


def test_pool_keeps_its_processes(rank_pool: Pool) -> None:
    pool = rank_pool(3)
    pids = {state[4] for state in pool.run(_state)}
    for _ in range(20):
        assert [a.rank for a in pool.run(_sum, 5)] == [0, 1, 2]
    assert rank_pool(3) is pool
    assert {state[4] for state in pool.run(_state)} == pids
    assert os.getpid() not in pids


@pytest.mark.alone
def test_pool_is_quick(rank_pool: Pool) -> None:
    rank_pool(4).run(_sum, 5)
    start = time.monotonic()
    for _ in range(50):
        rank_pool(4).run(_sum, 5)
    assert time.monotonic() - start < 2.5  # 50 ms a call; a few ms are usual


def test_one_rank_has_a_group_too(rank_pool: Pool) -> None:
    assert rank_pool(1).run(_sum, 1)[0].total.item() == 1.0


def test_function_by_name(rank_pool: Pool) -> None:
    assert rank_pool(2).run("math:hypot", 3.0, 4.0) == [5.0, 5.0]
    with pytest.raises(ValueError, match=r"package\.module:function"):
        rank_pool(2).run("math.hypot", 3.0)


def test_functions_that_no_rank_could_find_are_refused(rank_pool: Pool) -> None:
    with pytest.raises(TypeError, match="module level"):
        rank_pool(2).run(lambda: None)


def test_ranks_see_the_environment_of_the_call(
    rank_pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = rank_pool(2)
    pool.run(_state)
    monkeypatch.setenv("NVDD_X", "now")
    monkeypatch.chdir(tmp_path)
    first, second = pool.run(_state)
    assert first[:3] == ("now", tmp_path, 1)
    assert first[3] == second[3] == pool.run(_state)[0][3]  # the seed is set again for each call
    monkeypatch.delenv("NVDD_X")
    assert pool.run(_state)[0][0] is None


def test_large_arguments_and_results(rank_pool: Pool) -> None:
    x = torch.arange(2_000_000, dtype=torch.float64)
    for y in rank_pool(2).run(_echo, x):
        assert torch.equal(x, y)


@pytest.mark.parametrize("others_wait", [False, True])
def test_error_on_one_rank(run_ranks: Run, no_orphans: Callable[[], list[int]], others_wait: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank \d of 3 failed") as caught:
        run_ranks(_raise_on, 3, 1, others_wait)
    assert time.monotonic() - start < 20.0
    report = caught.value[1]
    assert (report.type_name, report.message) == ("OwnError", "cause on 1")
    assert isinstance(report.exception, OwnError)
    assert "in _raise_on" in report.traceback
    assert "about to fail" in report.output
    assert "cause on 1" in str(caught.value)
    if not others_wait:
        assert caught.value.type_names == ["ok", "OwnError", "ok"]


def test_ranks_that_hang_after_an_error_are_named(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawn, "GRACE_S", 0.5)
    with pytest.raises(RankFailure, match="rank 1 of 4 failed: ValueError: odd rank 1") as caught:
        run_ranks(_raise_on_odd, 4)
    assert not isinstance(caught.value, RankTimeout)
    assert caught.value.type_names == ["hung", "ValueError", "hung", "ValueError"]
    assert "_raise_on_odd" in caught.value[2].traceback


def test_unpicklable_error_is_still_told(run_ranks: Run) -> None:
    with pytest.raises(RankFailure, match="NotPicklableError: kept here") as caught:
        run_ranks(_raise_unpicklable, 1)
    assert caught.value[0].exception is None


def test_unpicklable_result_is_an_error(run_ranks: Run) -> None:
    with pytest.raises(RankFailure, match=r"pickle|local object"):
        run_ranks("tests.harness.unpicklable:make", 1)


@pytest.mark.parametrize("fresh", [False, True])
def test_hang_ends_within_the_limit(fresh: bool) -> None:
    pool = RankPool(3, fresh=fresh)
    pool.run(_echo, 1)
    pids = pool.pids
    start = time.monotonic()
    with pytest.raises(RankTimeout, match=r"limit 1 s: rank 0, 1, 2 did not finish") as caught:
        pool.run(_hang_in_collective, timeout=1.0)
    assert time.monotonic() - start < 10.0
    assert "_hang_in_collective" in caught.value[0].traceback
    assert "_wait_for_rank_zero" in caught.value[1].traceback
    assert not any(_alive(pid) for pid in pids)
    assert pool.run(_echo, 2) == [2, 2, 2]  # rebuilt
    assert not set(pool.pids) & set(pids)
    pool.close()


def test_children_of_a_hung_rank_are_killed(run_ranks: Run, no_orphans: Callable[[], list[int]]) -> None:
    with pytest.raises(RankTimeout):
        run_ranks(_hang_with_child, 2, timeout=2.0)
    assert no_orphans() == []


def test_dead_rank_is_reported_with_its_signal(run_ranks: Run) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_die, 3, 2)
    assert caught.value[2].type_name == "died"
    assert "SIGKILL" in caught.value[2].message


def test_rank_that_died_between_calls(rank_pool: Pool) -> None:
    pool = RankPool(2)
    pool.run(_echo, 1)
    os.kill(pool.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="died"):
        pool.run(_echo, 2)
    assert pool.run(_echo, 3) == [3, 3]
    pool.close()


def test_group_that_a_call_destroyed_is_made_again(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    pids = pool.run(_leave_early)
    assert [int(a.total) for a in pool.run(_sum, 1)] == [3, 3]
    assert pool.pids == pids


def test_call_that_makes_its_own_group(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    pool.run(_sum, 1)
    assert pool.run(_own_group, group=False) == [(False, 2)] * 2
    assert [int(a.total) for a in pool.run(_sum, 1)] == [3, 3]


@pytest.mark.parametrize("fresh", [False, True])
def test_ranks_end_when_the_test_process_is_killed(tmp_path: Path, fresh: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(_spawn.ROOT)!r})
        from tests._spawn import RankPool
        pool = RankPool(2, fresh={fresh})
        pool.run("math:sqrt", 1.0)
        print(*pool.pids, flush=True)
        pool.run("time:sleep", 1000.0, timeout=1000.0)
        """)
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed process leaves its folder
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    assert all(_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10.0
    while any(_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)
