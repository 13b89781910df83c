"""Shared memory between ranks: a peer that is alive but doesn't answer."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from nvdd_core.comm import Mesh
from nvdd_core.errors import RankLostError


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
