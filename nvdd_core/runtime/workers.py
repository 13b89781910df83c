"""`WorkerPool`: ranks on this machine that a program starts, gives functions to, and ends.

Each rank is a process of its own with a mesh of all of them; a function runs on every rank at once and its results
come back in rank order. Processes are started afresh, never forked, and find functions by name, so a pool works from
a script without a main guard, from ``python -c``, from standard input and from a notebook.

Invariant: whichever way a call ends, no rank outlives the pool, nor the program that made it; after a failure the
pool is closed.
Layer: runtime.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from nvdd_core.environment import child_environment, interpreter_command, search_path
from nvdd_core.errors import DistributedError, InputError, RankLostError
from nvdd_core.runtime.worker_messages import Call, Done, Failed, Setup

_WORKER = Path(__file__).with_name("worker.py")
START_LIMIT_S = 300.0
"""Time limit for starting ranks, and for what they load before their first call, seconds."""
_GRACE_S = 5.0
_IN_WORKER = "NVDD_WORKER"


class WorkerPool:
    """Processes of one machine, one a rank.

    Parameters
    ----------
    n_ranks : int
    device : str
        ``"cpu"``, or ``"cuda"``: one GPU a rank; ranks share GPUs where there are fewer, and then talk through the
        host.
    timeout_s : float
        Default time limit of a call, seconds.

    Raises
    ------
    InputError
        When the number of ranks makes no sense, or inside a worker.
    DistributedError
        When a rank doesn't start.
    """

    def __init__(self, n_ranks: int, device: str = "cpu", timeout_s: float = 600.0) -> None:
        if n_ranks < 1:
            raise InputError(f"a pool needs at least one rank, found {n_ranks}")
        if os.environ.get(_IN_WORKER):
            raise InputError(
                "a worker process tried to start a pool of its own: the program's main module runs again in workers "
                "that take functions from it. Put what starts the pool under `if __name__ == '__main__':`, or move "
                "the function to a module"
            )
        self.n_ranks, self.device, self.timeout_s = n_ranks, device, timeout_s
        self._turn = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="nvdd-pool-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._processes, self._pipes, self._folder)
        atexit.register(self._end)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the pool takes calls."""
        return self._end.alive

    def run(
        self, function: Callable[..., Any] | str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank and return the results, rank 0 first.

        Calls from several threads wait for one another.

        Parameters
        ----------
        function : callable or str
            A function of a module, or its name as ``"package.module:function"``.
        *args
            What can be pickled.
        timeout_s : float, optional
            Time limit, seconds, from when it is this call's turn; default the pool's.

        Raises
        ------
        InputError
            When the function can't be found by name, or an argument can't be pickled.
        DistributedError
            When a rank died or the time is over. What a rank raised is raised here, with its rank named. In each
            case the pool is closed.
        """
        return self._run([_call(function, args)] * self.n_ranks, timeout_s)

    def run_each(
        self,
        function: Callable[..., Any] | str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call ``function(mesh, *arguments[rank])`` on every rank and return the results, rank 0 first; else as `run`.

        Raises
        ------
        InputError
            When there are not as many arguments as ranks, too.
        """
        if len(arguments) != self.n_ranks:
            raise InputError(f"arguments for {len(arguments)} ranks; this pool has {self.n_ranks}")
        return self._run([_call(function, args) for args in arguments], timeout_s)

    def _run(self, calls: Sequence[bytes], timeout_s: float | None) -> list[Any]:
        with self._turn:  # one call at a time: ranks answer whoever listens
            answers = self._answers(calls, self.timeout_s if timeout_s is None else timeout_s)
        return [pickle.loads(answer.payload) for answer in answers]

    def _answers(self, calls: Sequence[bytes], limit_s: float) -> list[Done]:
        if not self.is_open:
            raise DistributedError("this pool of workers is closed; make a new one")
        try:
            for pipe, call in zip(self._pipes, calls, strict=True):
                # a rank that has ended: `_collect` says how
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    pipe.send_bytes(call)
            return self._collect(limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks; harmless when they are ended already."""
        self._end()
        atexit.unregister(self._end)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- starting and listening ----------------------------------------------------------------------------

    def _start(self) -> None:
        environ, path = child_environment(**{_IN_WORKER: "1"}), tuple(search_path())
        for rank in range(self.n_ranks):
            mine, theirs = Pipe()
            self._pipes.append(mine)
            command = interpreter_command(str(_WORKER), str(theirs.fileno()))
            with theirs, _no_interrupt():
                self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environ))
            setup = Setup(
                rank=rank,
                size=self.n_ranks,
                device=self.device,
                rendezvous=f"{self._folder}/rendezvous",
                sys_path=path,
                parent=os.getpid(),
            )
            mine.send_bytes(pickle.dumps(setup))
        self._collect(START_LIMIT_S)

    def _collect(self, limit_s: float) -> list[Done]:
        """Wait for every rank's answer; the first failure gives the others a moment, then is raised."""
        answers: dict[int, Done | Failed] = {}
        end = time.monotonic() + limit_s
        failed = False
        while len(answers) < self.n_ranks and (left := end - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(waiting, left):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._answer(rank)
            if not failed and any(isinstance(a, Failed) for a in answers.values()):
                failed, end = True, min(end, time.monotonic() + _GRACE_S)
        faults = [a for a in answers.values() if isinstance(a, Failed)]
        if faults:
            raise _root(faults)
        if len(answers) < self.n_ranks:
            late = [str(rank) for rank in range(self.n_ranks) if rank not in answers]
            raise DistributedError(
                f"rank{'s' * (len(late) > 1)} {', '.join(late)} did not answer within {limit_s:g} s, so all ranks were "
                "ended: something hangs, or needs a larger timeout_s"
            )
        return [a for _, a in sorted(answers.items()) if isinstance(a, Done)]

    def _answer(self, rank: int) -> Done | Failed:
        try:
            answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return Failed.lost(rank, _ending(self._processes[rank]))
        if not isinstance(answer, Done | Failed):
            raise DistributedError(f"rank {rank} answered {type(answer).__name__}, which no worker sends")
        return answer


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Start processes that an interrupt doesn't reach, not even before they can say so; this one has it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(function: Callable[..., Any] | str, args: Sequence[Any]) -> bytes:
    """Pickle a call; what comes from the main module brings the way to that module."""
    try:
        payload = pickle.dumps((function, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise InputError(
            f"{getattr(function, '__qualname__', function)!r} or one of its arguments can't be sent to workers: {exc}. "
            "Functions and classes must stand at the top level of a module"
        ) from exc
    main: dict[str, Any] = {}
    if b"__main__" in payload:
        data = spawn.get_preparation_data("nvdd-worker")
        main = {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}
        if not main:
            raise InputError(
                "the function or an argument is defined in a program that has no file (python -c, standard input, a "
                "notebook), where workers can't find it; move it to a module"
            )
    return pickle.dumps(Call(payload, main))


def _root(faults: Sequence[Failed]) -> BaseException:
    """Make one error of what the ranks reported: the first that isn't merely the loss of another rank."""
    first = min(faults, key=lambda fault: (fault.fault.type == RankLostError.__name__, fault.time))
    error = first.fault.error()
    if first.traceback:
        error.add_note(f"traceback of rank {first.fault.rank}:\n{first.traceback}")
    return error


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _end(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    pipes: list[Connection],
    folder: str,
) -> None:
    if os.getpid() != owner:  # a forked child: the ranks are its parent's
        return
    for pipe in pipes:
        pipe.close()  # an idle worker takes this as the end
    end = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, min(end - time.monotonic(), 1.0)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
