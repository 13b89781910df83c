"""One rank of a test: what runs inside the processes that ``tests/_spawn.py`` starts.

A process takes one of two roles (``main``):

``zygote FD``
    import torch once, then fork a rank for every request on socket FD;
``rank FD``
    be a rank, in an interpreter of its own.

A rank reads pickled messages from its socket (a set-up, then any number of runs) and answers each run
with the result or the error. It ends when the socket is closed, after its first error, or when its
parent dies. Messages are plain pickles: torch's own reducers would share memory between processes,
which no real group of ranks does.

Invariant: a rank never outlives the process that asked for it, not even while it hangs in a collective.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_GROUP_TIMEOUT_S = 600.0  # the parent's own limit is shorter and can say more
_LEAVE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Setup:
    """What a process needs to know to be one rank."""

    rank: int
    world: int
    backend: str
    path: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Target:
    """A module-level function, found again by name (and by file, for test modules)."""

    module: str
    qualname: str
    file: str | None = None


@dataclass(frozen=True)
class Run:
    """One call.

    ``payload`` is the pickled ``(args, kwargs)``; ``init_file`` asks for a new process group and
    ``leave`` for none.
    """

    target: Target
    payload: bytes
    env: dict[str, str]
    cwd: str
    init_file: str | None
    leave: bool = False


@dataclass(frozen=True)
class Done:
    """The pickled result; ``group`` says whether the process group still exists."""

    payload: bytes
    group: bool


@dataclass(frozen=True)
class Failed:
    """An exception, as text and (where it can be pickled) as itself."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None = field(default=None, repr=False)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def load_target(target: Target) -> Any:
    """Find the function, loading a test module by its file under the name that pytest gave it."""
    module = sys.modules.get(target.module)
    if module is None:
        module = _load_module(target)
    found: Any = module
    for part in target.qualname.split("."):
        found = getattr(found, part)
    return found


def _load_module(target: Target) -> Any:
    if target.file is None or _importable(target.module, target.file):
        return importlib.import_module(target.module)
    spec = importlib.util.spec_from_file_location(target.module, target.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"can't load {target.module} from {target.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[target.module] = module
    spec.loader.exec_module(module)
    return module


def _importable(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)


def _failed(error: BaseException) -> Failed:
    pickled: bytes | None = None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some exceptions pickle but can't be rebuilt
        pickled = data
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(error))
    return Failed(type(error).__name__, str(error), text, pickled)


def _leave_group() -> None:
    """Destroy the process group; without it the C++ side may abort the process at its end."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class _Rank:
    """The loop of one rank."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.setup: Setup = pickle.loads(conn.recv_bytes())
        self._redirect()
        sys.path[:] = self.setup.path
        import torch

        torch.set_num_threads(1)
        conn.send_bytes(pickle.dumps(os.getpid()))

    def _redirect(self) -> None:
        """Send output and stack dumps to this rank's log."""
        log = os.open(self.setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, fd)
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)

    def serve(self) -> None:
        """Answer runs until the socket is closed or one of them fails."""
        while True:
            try:
                message: Run = pickle.loads(self.conn.recv_bytes())
            except EOFError:
                break
            try:
                reply: Done | Failed = self._run(message)
            except BaseException as error:  # the parent reports it, whatever it is
                reply = _failed(error)
            sys.stdout.flush()
            sys.stderr.flush()
            self.conn.send_bytes(pickle.dumps(reply))
            if isinstance(reply, Failed):
                break  # leaving frees the peers that wait for this rank in a collective
        leaving = threading.Thread(target=_leave_group, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_TIMEOUT_S)

    def _run(self, message: Run) -> Done:
        import torch
        import torch.distributed as dist

        os.environ.clear()
        os.environ.update(message.env)
        os.chdir(message.cwd)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if message.leave or message.init_file is not None:
            _leave_group()
        if message.init_file is not None:
            dist.init_process_group(
                self.setup.backend,
                init_method=f"file://{message.init_file}",
                rank=self.setup.rank,
                world_size=self.setup.world,
                timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
            )
        function = load_target(message.target)
        args, kwargs = pickle.loads(message.payload)
        result = function(*args, **kwargs)
        return Done(pickle.dumps(result), dist.is_initialized())


def run_rank(fd: int) -> None:
    """Be a rank on socket ``fd``, then end the process without the interpreter's own clean-up."""
    _die_with_parent()
    code = 1
    try:
        _Rank(Connection(fd)).serve()
        code = 0
    except (EOFError, OSError):
        pass  # the parent is gone or has closed the socket: nobody to tell
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_status(pid: int, limit_s: float) -> str:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return "none"
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    return "none"


def run_zygote(fd: int) -> None:
    """Import torch while this process has one thread, then fork a rank per request.

    Requests: ``fork`` with a socket attached, answered by the pid; ``wait PID``, answered by the exit
    code (negative: the signal) or ``none``.
    """
    _die_with_parent()
    import numpy  # noqa: F401  imported for the ranks
    import torch.distributed  # noqa: F401

    control = socket.socket(fileno=fd)
    control.send(b"ready")
    while True:
        request, fds, _, _ = socket.recv_fds(control, 256, 1)
        if not request:
            break
        words = request.decode().split()
        if words[0] == "wait":
            control.send(_wait_status(int(words[1]), 10.0).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            run_rank(fds[0])
        os.close(fds[0])
        control.send(str(pid).encode())


def main() -> None:
    """Take the role named on the command line."""
    role, fd = sys.argv[1], int(sys.argv[2])
    if role == "zygote":
        run_zygote(fd)
    else:
        os.setsid()
        run_rank(fd)
