"""Shared memory between ranks: what one writes others read; one that doesn't answer, one that left too early."""

from __future__ import annotations

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, RankLostError


def _wait_for_a_sleeper(limit: float, nap: float) -> tuple[str, float]:
    """Rank 1 sleeps while rank 0 waits for it; what rank 0 is told, and after how long."""
    group = Mesh.from_process_group(timeout_s=limit)
    if group._lane is None:
        return "no lane", limit
    if group.rank == 1:
        time.sleep(nap)
        dist.barrier()
        return "", 0.0
    begun = time.monotonic()
    try:
        group.all_reduce_sum_(torch.ones(1))
        said = ""
    except RankLostError as exc:
        said = str(exc)
    waited = time.monotonic() - begun
    dist.barrier()  # the sleeper sees the lane's end only after its nap
    return said, waited


def test_a_rank_that_hangs(rank_pool) -> None:
    (said, waited), _ = rank_pool(2).run(_wait_for_a_sleeper, 0.5, 2.0, timeout=20)
    if said == "no lane":
        pytest.skip("this machine has no shared-memory lane")
    assert said.startswith("rank 0: rank 1 is alive but has not answered for ")
    assert "the limit is 0.5 s" in said
    assert 0.5 <= waited < 1.5


def _read_late(size: int) -> str:
    """Rank 1 posts a message and leaves, and its file number becomes another file's; what rank 0 is told then."""
    group = Mesh.from_process_group()
    if group._lane is None:
        return "no lane"
    said = ""
    if group.rank == 1:
        group.start_all_reduce_sum_(torch.ones(1))
        slot = group._lane._mine[1]
        assert slot is not None
        number = slot.file
        del slot
        group._lane.close(0.0)
        with tempfile.TemporaryFile() as other:
            other.write(bytes(size))
            other.flush()
            os.dup2(other.fileno(), number)
            dist.barrier()
            dist.barrier()
        return said
    dist.barrier()
    try:
        group.all_reduce_sum_(torch.ones(1))
    except RankLostError as exc:
        said = str(exc)
    dist.barrier()
    return said


@pytest.mark.parametrize("size", [0, 13, 4096])
def test_a_rank_that_left_before_it_was_read(run_ranks, size: int) -> None:
    """Another file that can't be mapped, that can't be read as numbers, and whose numbers are no message's."""
    said, _ = run_ranks(_read_late, 2, size, timeout=20)
    if said == "no lane":
        pytest.skip("this machine has no shared-memory lane")
    assert said.startswith("rank 1 is gone: its shared memory can't be opened")
    assert said.endswith("is another file by now)")


def _write_and_read() -> list[list[int]] | str:
    """The first bytes that this rank reads of all ranks' memory: what each wrote, after it was asked for anew."""
    group = Mesh.from_process_group()
    if not group.shares_memory:
        return "no lane"
    found = []
    for size, adds in ((3, 10), (2, 0), (5000, 20)):
        pieces = group.shared_pieces("numbers", size)
        assert [len(one) for one in pieces] == [size] * group.size
        pieces[(group.rank + 1) % group.size][:1] += adds + group.rank
        group.barrier()
        found.append([int(one[0]) for one in pieces])
        group.barrier()
    found.append([int(one[0]) for one in group.shared_pieces("others", 3)])
    return found


def test_memory_that_all_see(rank_pool) -> None:
    answers = rank_pool(3).run(_write_and_read, timeout=20)
    if answers[0] == "no lane":
        pytest.skip("this machine has no shared-memory lane")
    same, larger = [14, 10, 12], [22, 20, 21]
    assert answers == [[[12, 10, 11], same, larger, [0, 0, 0]]] * 3


def test_memory_of_one_rank() -> None:
    alone = Mesh.single()
    assert not alone.shares_memory
    with pytest.raises(DistributedError, match=r"look at Mesh\.shares_memory first"):
        alone.shared_pieces("numbers", 8)
