"""One rank of a `WorkerPool`: ``python worker.py FD``, where FD is its end of a pipe.

Run as a file, not as a module: it takes over the module search path of the program that made the pool before it
imports anything of nvdd, so that it finds the very plugins which that program found.

Invariant: the process ends when its pipe is closed, and when its parent dies while it works.
Layer: runtime.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any


class _Early(pickle.Unpickler):
    """Reads the set-up before the search path is right: any class becomes a namespace of its fields."""

    def find_class(self, module: str, name: str) -> Any:
        return SimpleNamespace


def _mesh(setup: Any) -> Any:
    """Join the other ranks (collective)."""
    import torch

    from nvdd_core.comm import Mesh

    device, shared = torch.device("cpu"), True
    if setup.device != "cpu":
        count = torch.cuda.device_count()
        if count == 0:
            from nvdd_core.errors import InputError

            raise InputError(f"device {setup.device!r} was asked for, but this machine has no GPU")
        device, shared = torch.device("cuda", setup.rank % count), count < setup.size
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // setup.size))
    if setup.size == 1:
        return Mesh.single(device)
    return Mesh.initialise(setup.rank, setup.size, device, f"file://{setup.rendezvous}", with_gpus=not shared)


def _perform(call: Any, mesh: Any) -> bytes:
    from nvdd_core.comm import group_scope

    with group_scope(mesh):
        if call.main:
            spawn.prepare(call.main)
        function, args = pickle.loads(call.payload)
        if isinstance(function, str):
            from pkgutil import resolve_name

            function = resolve_name(function)
        return pickle.dumps(function(mesh, *args))


def main(pipe: Connection) -> int:
    """Answer calls until the pipe is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # an interrupt is the parent's to handle; it ends its workers
    setup = _Early(io.BytesIO(pipe.recv_bytes())).load()
    sys.path[:] = setup.sys_path

    from nvdd_core.environment import end_with_parent

    end_with_parent(setup.parent)  # before torch is imported, which takes seconds

    from nvdd_core.runtime.worker_messages import Call, Done, Failed

    try:
        mesh = _mesh(setup)
        pipe.send_bytes(pickle.dumps(Done()))
        while True:
            try:
                call = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                break
            if not isinstance(call, Call):
                raise RuntimeError(f"a pool sent {type(call).__name__}")
            pipe.send_bytes(pickle.dumps(Done(_perform(call, mesh))))
    except BaseException as exc:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is left to tell
            pipe.send_bytes(pickle.dumps(Failed.of(setup.rank, exc)))
        return 1
    mesh.close()
    return 0


if __name__ == "__main__":
    _code = main(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # tearing down a process group can hang; nothing is left that needs it
