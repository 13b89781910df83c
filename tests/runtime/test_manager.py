"""A script finds its group and its device as the command line does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import (
    DistributedManager,
    resolve_device,
    resolve_local_rank,
    resolve_rank,
    resolve_world_size,
)

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
}
SCRIPT = """
import torch
from nvdd_core.runtime import DistributedManager
with DistributedManager("cpu") as manager:
    mesh = manager.mesh
    print(mesh.rank, mesh.size, int(mesh.all_reduce_sum_(torch.tensor(mesh.rank + 1))))
"""


def test_resolvers() -> None:
    assert (resolve_rank(TASK), resolve_world_size(TASK), resolve_local_rank(TASK)) == (1, 4, 1)
    shell = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    assert (resolve_rank(shell), resolve_world_size(shell), resolve_local_rank(shell)) == (0, 1, 0)
    assert (resolve_rank({}), resolve_world_size({}), resolve_local_rank({})) == (0, 1, 0)


@pytest.mark.distributed
@pytest.mark.usefixtures("no_orphans")
def test_a_script_under_srun(tmp_path: Path) -> None:
    """Two tasks of one step, with nothing but srun's variables, meet and reduce."""
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "SLURM_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        kept.pop(name, None)
    with socket.socket() as probe:  # the port follows from the job's number
        probe.bind(("127.0.0.1", 0))
        job = str(probe.getsockname()[1] % 20_000)
    step = {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env={**kept, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [task.communicate(timeout=60)[0].strip() for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert said == ["0 2 3", "1 2 3"]


def test_a_rank_outside_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="rank 4 of 2"):
        DistributedManager("cpu")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("local", [{}, {"LOCAL_RANK": "1"}])
def test_a_task_that_sees_one_gpu_takes_it(local: dict[str, str]) -> None:
    task = {**TASK, "CUDA_VISIBLE_DEVICES": "3", **local}
    for spec in (None, "cuda"):
        assert resolve_device(spec, environ=task) == torch.device("cuda", 0)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("spec", "environ"),
    [
        ("cuda", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}),
        # torchrun within one task: srun's number is the task's, not the rank's
        ("cuda", {**TASK, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}),
        ("cuda", TASK),  # nothing says that the task's view is restricted
        ("cuda", {**TASK, "CUDA_VISIBLE_DEVICES": ""}),
        ("cuda:1", {**TASK, "CUDA_VISIBLE_DEVICES": "0"}),  # asked for by number
    ],
)
def test_more_ranks_than_gpus_stay_an_error(spec: str, environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match="this host has 1 GPU;"):
        resolve_device(spec, environ=environ)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_device("cuda", environ={**TASK, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}).index == 1
