"""Who am I among the processes: rank, world size, device, and the mesh made of them.

Reads what torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID) leaves in the
environment (see `nvdd_core.environment`); without either there is one rank.

Layer: runtime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

import torch

from nvdd_core.comm import TIMEOUT_S, Mesh, agreed, publish
from nvdd_core.environment import found_group, found_local_rank, meeting_point
from nvdd_core.errors import InputError, RankLostError


def resolve_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 outside a group."""
    group = found_group(environ)
    return 0 if group is None else group[0]


def resolve_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes; 1 outside a group."""
    group = found_group(environ)
    return 1 if group is None else group[1]


def resolve_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number on its host; 0 outside a group."""
    return found_local_rank(environ)


def resolve_device(
    spec: str | None = None, local_rank: int | None = None, environ: Mapping[str, str] = os.environ
) -> torch.device:
    """Return the device of this rank.

    Parameters
    ----------
    spec : {"cpu", "cuda", "cuda:K", "auto", None}
        "cuda" gives each rank on a host a GPU of its own: the one with the rank's number there, or the only one
        that srun lets its task see. "auto" and None take a GPU where there is one.
    local_rank : int, optional
        Default: `resolve_local_rank`.
    environ : mapping
        Where srun's variables are.

    Raises
    ------
    InputError
        If the device is unknown or missing, or there are more ranks than GPUs on this host.
    """
    if spec is None or spec == "auto":
        spec = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(spec)
    except RuntimeError as exc:
        raise InputError(f"unknown device {spec!r}: expected cpu, cuda, cuda:K or auto") from exc
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise InputError(f"device {spec!r} is not supported: expected cpu, cuda, cuda:K or auto")
    count = torch.cuda.device_count()
    if ":" in spec:
        index = device.index
    else:
        index = resolve_local_rank(environ) if local_rank is None else local_rank
        if count == 1 and _sees_one_gpu_of_its_own(index, environ):
            index = 0
    if index >= count:
        raise InputError(
            f"device cuda:{index} was asked for, but this host has {count} GPU{'s' if count != 1 else ''}; "
            "ask for fewer ranks or --device cpu"
        )
    return torch.device("cuda", index)


def _sees_one_gpu_of_its_own(local_rank: int, environ: Mapping[str, str]) -> bool:
    """Tell whether srun shows this task one GPU only, as with ``--gpus-per-task=1``, where each calls its own 0."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return environ.get("SLURM_LOCALID") == str(local_rank) and visible != "" and "," not in visible


class DistributedManager:
    """Joins the group of processes that the environment describes, and leaves it at the end.

    Use as a context manager; `mesh` is the group. With one process there is no process group.

    Parameters
    ----------
    device : str, optional
        See `resolve_device`.
    init_method : str, optional
        How ranks find each other, as torch takes it. Default: MASTER_ADDR and MASTER_PORT, or what srun's variables
        say (`nvdd_core.environment.meeting_point`).
    timeout_s : float
        How long a rank waits for another one that is alive but doesn't answer, seconds.
    """

    def __init__(
        self, device: str | None = None, init_method: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        rank, size = resolve_rank(), resolve_world_size()
        if not 0 <= rank < size:
            raise InputError(f"the environment gives rank {rank} of {size}: expected 0 <= rank < size")
        failure: InputError | None = None
        try:
            self.device = resolve_device(device)
        except InputError as exc:
            if size == 1:
                raise
            failure, self.device = exc, torch.device("cpu")  # the others hear of it once the group is there
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if size == 1:
            self.mesh = Mesh.single(self.device)
            return
        backend_device = "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"
        where = self.device if self.device.type == backend_device else torch.device("cpu")
        self.mesh = Mesh.initialise(
            rank, size, where, init_method or meeting_point(), timeout_s, with_gpus=backend_device == "cuda"
        )
        with agreed(self.mesh):
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Leave the group; harmless when it is closed already."""
        self.mesh.close()

    def __enter__(self) -> DistributedManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is not None and not isinstance(value, RankLostError):
            publish(self.mesh, value)
        self.mesh.close(failed=value is not None)
