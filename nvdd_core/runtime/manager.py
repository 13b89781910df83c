"""Who am I among the processes: rank, world size, device, and the mesh made of them.

Reads what torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID) leaves in the
environment; without either there is one rank.

Layer: runtime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError


def _environment_int(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError as exc:
                raise InputError(
                    f"environment variable {name} is {environ[name]!r}: expected an integer"
                ) from exc
    return default


def resolve_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 outside a group."""
    return _environment_int(environ, ("RANK", "SLURM_PROCID"), 0)


def resolve_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes; 1 outside a group."""
    return _environment_int(environ, ("WORLD_SIZE", "SLURM_NTASKS"), 1)


def resolve_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number on its host; 0 outside a group."""
    return _environment_int(environ, ("LOCAL_RANK", "SLURM_LOCALID"), 0)


def resolve_device(spec: str | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device of this rank.

    Parameters
    ----------
    spec : {"cpu", "cuda", "cuda:K", "auto", None}
        "cuda" gives each rank on a host a GPU of its own; "auto" and None take a GPU where there is one.
    local_rank : int, optional
        Default: `resolve_local_rank`.

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
        index = resolve_local_rank() if local_rank is None else local_rank
    if index >= count:
        raise InputError(
            f"device cuda:{index} was asked for, but this host has {count} GPU{'s' if count != 1 else ''}; "
            "ask for fewer ranks or --device cpu"
        )
    return torch.device("cuda", index)


class DistributedManager:
    """Joins the group of processes that the environment describes, and leaves it at the end.

    Use as a context manager; `mesh` is the group. With one process there is no process group.

    Parameters
    ----------
    device : str, optional
        See `resolve_device`.
    init_method : str
        How ranks find each other; ``env://`` reads MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, device: str | None = None, init_method: str = "env://") -> None:
        rank, size = resolve_rank(), resolve_world_size()
        if not 0 <= rank < size:
            raise InputError(f"the environment gives rank {rank} of {size}: expected 0 <= rank < size")
        self.device = resolve_device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if size == 1:
            self.mesh = Mesh.single(self.device)
        else:
            self.mesh = Mesh.initialise(rank, size, self.device, init_method)

    def close(self) -> None:
        """Leave the group; harmless when it is closed already."""
        self.mesh.close()

    def __enter__(self) -> DistributedManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
