"""Run a function on several real processes that form a process group: the base of every distributed test.

``run_ranks(fn, world, *args)`` starts ``world`` processes for one call. ``rank_pool(world).run(fn, *args)``
keeps them for the whole test session, so that a call costs milliseconds. Both return the list of
results, rank 0 first. In a test, use the fixtures of the same names (``tests/conftest.py``)::

    def _sum(n):                                   # a module-level function: ranks find it by name
        t = torch.full((n,), dist.get_rank() + 1.0)
        dist.all_reduce(t)
        return t

    def test_sum(rank_pool):
        for t in rank_pool(4).run(_sum, 3, timeout=20):
            assert t.tolist() == [10.0] * 3

A string ``"package.module:function"`` names a function as well. Ranks see gloo over the loopback interface,
one thread each, the test's environment and folder as they are at the call, and a fresh random seed.

When a rank raises, the others get a moment to end too, then all are killed and ``RankFailure`` carries
every rank's traceback and output (``error[rank].type_name``, ``.message``, ``.exception``). When a call takes
longer than ``timeout``, every rank's stack is dumped, all are killed and ``RankTimeout`` is raised.

Processes are forks of one zygote that has imported torch and nothing else, which starts a rank in a
few milliseconds instead of two seconds; ``fresh=True`` gives each rank an interpreter of its own.

Invariant: after a failure no process of the group is left, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests._rank_worker import Done, Failed, Run, Setup, Target

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
TEST_MARK = "NVDD_TEST_MARK"  # the no_orphans fixture's; processes kept for the session don't carry it
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
GRACE_S = 5.0  # after one rank's error, how long the others may take to end by themselves
_LOG_TAIL = 12_000
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests._rank_worker import main; main()"


@dataclass(frozen=True)
class RankReport:
    """What became of one rank of a call that failed.

    ``type_name`` is the exception's class name, ``"died"`` for a process that ended without an answer and
    ``"hung"`` for one that had to be killed; ``"ok"`` for a rank that returned.
    """

    rank: int
    type_name: str
    message: str = ""
    traceback: str = ""
    output: str = ""
    exception: BaseException | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Give the report as a block of text."""
        lines = [f"---- rank {self.rank}: {self.type_name}{': ' if self.message else ''}{self.message}"]
        lines += [part.rstrip() for part in (self.traceback,) if part]
        if self.output.strip():
            lines += [f"-- output of rank {self.rank}", self.output.rstrip()]
        return "\n".join(lines)


class RankFailure(RuntimeError):
    """At least one rank of a call failed; ``failure[rank]`` is what became of that rank."""

    def __init__(self, headline: str, reports: Mapping[int, RankReport]) -> None:
        self.reports = dict(reports)
        blocks = [str(report) for _, report in sorted(self.reports.items())]
        super().__init__("\n".join([headline, *blocks]))

    def __getitem__(self, rank: int) -> RankReport:
        return self.reports[rank]

    @property
    def type_names(self) -> list[str]:
        """The outcome of each rank, rank 0 first."""
        return [report.type_name for _, report in sorted(self.reports.items())]


class RankTimeout(RankFailure):
    """A call took longer than its limit; reports carry each hung rank's stack."""


class _Zygote:
    """The process that ranks are forked from; one per test session."""

    _current: _Zygote | None = None

    def __init__(self) -> None:
        self._socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _boot("zygote", child.fileno())
        child.close()
        self._socket.settimeout(START_LIMIT_S)
        if self._socket.recv(64) != b"ready":
            raise RuntimeError("the zygote of the test ranks did not start")

    @classmethod
    def get(cls) -> _Zygote:
        """Return the running zygote, starting one where needed."""
        if cls._current is None or cls._current._process.poll() is not None:
            cls._current = cls()
        return cls._current

    @classmethod
    def close(cls) -> None:
        """End the zygote; its socket's end of file is the signal."""
        if cls._current is not None:
            cls._current._socket.close()
            cls._current._process.wait(STOP_LIMIT_S)
            cls._current = None

    def fork(self, fd: int) -> int:
        """Fork a rank that talks on ``fd``; return its process id."""
        socket.send_fds(self._socket, [b"fork"], [fd])
        return int(self._socket.recv(64))

    def wait(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended or is about to, None when it goes on."""
        self._socket.send(f"wait {pid}".encode())
        answer = self._socket.recv(64).decode()
        return None if answer in {"", "none"} else int(answer)


def _boot(role: str, fd: int) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != TEST_MARK} | ONE_THREAD
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, str(ROOT), role, str(fd)],
        pass_fds=[fd],
        env=env,
        stdin=subprocess.DEVNULL,
    )


class _Process:
    """One rank as its parent sees it."""

    def __init__(self, setup: Setup, fresh: bool) -> None:
        self.log = Path(setup.log)
        parent, child = socket.socketpair()
        self._zygote = None if fresh else _Zygote.get()
        self._popen = None if self._zygote is not None else _boot("rank", child.fileno())
        self.pid = self._popen.pid if self._popen is not None else self._fork(child.fileno())
        child.close()
        self.conn = Connection(parent.detach())
        self.conn.send_bytes(pickle.dumps(setup))
        self._code: int | None = None

    def _fork(self, fd: int) -> int:
        return _Zygote.get().fork(fd)

    def exit_code(self) -> int | None:
        """Wait for the end of a process that is about to end: its code, negative for a signal."""
        if self._code is None and self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._code = self._popen.wait(STOP_LIMIT_S)
        elif self._code is None and self._zygote is not None:
            self._code = self._zygote.wait(self.pid)
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to this rank alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill this rank with everything that it started."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)  # in case it had not made its own group yet
            self.exit_code()

    def output(self, start: int = 0) -> str:
        """Return what the rank wrote from byte ``start`` of its log on, the last part of it."""
        data = self.log.read_bytes()[start:] if self.log.exists() else b""
        return data[-_LOG_TAIL:].decode(errors="replace")

    def log_size(self) -> int:
        """Return the length of the log in bytes."""
        return self.log.stat().st_size if self.log.exists() else 0


class RankPool:
    """``world`` processes that form one group and run functions until closed.

    Parameters
    ----------
    world
        Number of ranks.
    backend
        Backend of the process group, as ``init_process_group`` takes it.
    fresh
        Start an interpreter for each rank instead of forking the zygote.
    """

    def __init__(self, world: int, *, backend: str = "gloo", fresh: bool = False) -> None:
        if world < 1:
            raise ValueError(f"a pool needs at least one rank, got {world}")
        self.world = world
        self._backend = backend
        self._fresh = fresh
        self._ranks: list[_Process] = []
        self._folder: Path | None = None
        self._groups = 0
        self._group_alive = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, rank 0 first; empty when none run."""
        return [rank.pid for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., Any] | str,
        *args: Any,
        timeout: float = 60.0,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results, rank 0 first.

        Parameters
        ----------
        fn
            A module-level function, or ``"package.module:function"``.
        timeout
            Seconds that the call may take.
        group
            Have the default process group ready; False leaves that to ``fn``, which finds
            ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set.

        Raises
        ------
        RankFailure
            When a rank raised or died. Its group is gone; the next call starts another.
        RankTimeout
            When the call took longer than ``timeout``.
        """
        target = _target(fn)
        payload = pickle.dumps((args, kwargs))
        env = dict(os.environ) | ONE_THREAD
        if not group:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        try:
            if not self._ranks:
                self._start()
            init_file = self._next_group(group)
            starts = [rank.log_size() for rank in self._ranks]
            for k, rank in enumerate(self._ranks):
                own = {"RANK": k, "LOCAL_RANK": k, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                env |= {name: str(value) for name, value in own.items()}
                message = Run(target, payload, env, os.getcwd(), init_file, leave=not group)
                with contextlib.suppress(BrokenPipeError):  # a rank that died meanwhile is reported below
                    rank.conn.send_bytes(pickle.dumps(message))
            return self._collect(timeout, starts)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: let them leave their group in peace, or kill them."""
        ranks, self._ranks, self._group_alive = self._ranks, [], False
        try:
            for rank in ranks:
                rank.conn.close()
            stuck = [] if kill else [k for k, rank in enumerate(ranks) if rank.exit_code() is None]
            if stuck:
                raise RuntimeError(f"ranks {stuck} did not end within {STOP_LIMIT_S} s of being told to")
        finally:
            for rank in ranks:
                rank.kill()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nvdd-ranks-"))
        for k in range(self.world):
            setup = Setup(k, self.world, self._backend, tuple(sys.path), str(self._folder / f"rank{k}.log"))
            self._ranks.append(_Process(setup, self._fresh))
        for k, rank in enumerate(self._ranks):
            if not rank.conn.poll(START_LIMIT_S):
                raise RuntimeError(f"rank {k} did not start within {START_LIMIT_S} s\n{rank.output()}")
            try:
                rank.conn.recv_bytes()
            except (EOFError, ConnectionResetError):
                raise RuntimeError(f"rank {k} died while starting\n{rank.output()}") from None

    def _next_group(self, wanted: bool) -> str | None:
        """Return the rendezvous file of a new group, None where the present state will do."""
        if not wanted or self._group_alive:
            return None
        self._groups += 1
        self._group_alive = True
        return f"{self._folder}/group{self._groups}"

    def _collect(self, timeout: float, starts: list[int]) -> list[Any]:
        """Gather every rank's answer, or raise with what became of each rank."""
        pending = {rank.conn: k for k, rank in enumerate(self._ranks)}
        replies: dict[int, Done | Failed] = {}
        limit = time.monotonic() + timeout
        late = True
        while pending:
            ready = wait(list(pending), max(limit - time.monotonic(), 0.0))
            if not ready:
                break
            for conn in ready:
                reply = self._receive(conn)  # type: ignore[arg-type]
                replies[pending.pop(conn)] = reply  # type: ignore[call-overload]
                if isinstance(reply, Failed) and late:
                    late, limit = False, min(limit, time.monotonic() + GRACE_S)
        if late and not pending:
            return self._results(replies)
        reports = self._reports(replies, sorted(pending.values()), starts)
        if late:
            hung = ", ".join(str(k) for k in pending.values())
            raise RankTimeout(f"{self.world} ranks, limit {timeout:g} s: rank {hung} did not finish", reports)
        failed = [k for k, reply in sorted(replies.items()) if isinstance(reply, Failed)]
        first = replies[failed[0]]
        what = f"{first.type_name}: {first.message}" if isinstance(first, Failed) else ""
        raise RankFailure(f"rank {failed[0]} of {self.world} failed: {what}", reports)

    @staticmethod
    def _receive(conn: Connection) -> Done | Failed:
        try:
            reply = pickle.loads(conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            return Failed("died", "", "")
        if not isinstance(reply, Done | Failed):
            raise TypeError(f"a rank answered with {type(reply).__name__}")
        return reply

    def _results(self, replies: dict[int, Done | Failed]) -> list[Any]:
        done = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Done)]
        self._group_alive = all(reply.group for reply in done)
        return [pickle.loads(reply.payload) for reply in done]

    def _reports(
        self, replies: dict[int, Done | Failed], hung: list[int], starts: list[int]
    ) -> dict[int, RankReport]:
        stacks = self._dump_stacks(hung)
        reports = {}
        for k, rank in enumerate(self._ranks):
            reply = replies.get(k)
            if reply is None:
                reports[k] = RankReport(k, "hung", "killed while at", stacks[k], rank.output(starts[k]))
            elif isinstance(reply, Done):
                reports[k] = RankReport(k, "ok", output=rank.output(starts[k]))
            elif reply.type_name == "died":
                message = _describe_exit(rank.exit_code())
                reports[k] = RankReport(k, "died", message, output=rank.output(starts[k]))
            else:
                error = pickle.loads(reply.pickled) if reply.pickled is not None else None
                output = rank.output(starts[k])
                reports[k] = RankReport(k, reply.type_name, reply.message, reply.traceback, output, error)
        return reports

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Have faulthandler write the stack of each rank named, and return the texts."""
        starts = {k: self._ranks[k].log_size() for k in ranks}
        for k in ranks:
            self._ranks[k].signal(signal.SIGUSR1)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and any(self._ranks[k].log_size() == starts[k] for k in ranks):
            time.sleep(0.02)
        time.sleep(0.1 if ranks else 0.0)  # the dump is written line by line
        return {k: self._ranks[k].output(starts[k]) for k in ranks}


def _target(fn: Callable[..., Any] | str) -> Target:
    """Name a function so that another process finds it."""
    if isinstance(fn, str):
        module, _, qualname = fn.partition(":")
        if not module or not qualname:
            raise ValueError(f"name a function as 'package.module:function', got {fn!r}")
        return Target(module, qualname)
    qualname = getattr(fn, "__qualname__", "<nameless>")
    if "<" in qualname:
        raise TypeError(f"ranks find a function by name, so it must stand at module level: {fn!r}")
    return Target(fn.__module__, qualname, inspect.getsourcefile(fn))


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its socket and goes on"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


_POOLS: dict[tuple[int, str], RankPool] = {}


def rank_pool(world: int, *, backend: str = "gloo") -> RankPool:
    """Return the session's pool of ``world`` ranks, starting it at its first call."""
    key = (world, backend)
    if key not in _POOLS:
        _POOLS[key] = RankPool(world, backend=backend)
    return _POOLS[key]


def run_ranks(
    fn: Callable[..., Any] | str,
    world: int,
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    fresh: bool = False,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world`` new processes; see :meth:`RankPool.run`."""
    with RankPool(world, backend=backend, fresh=fresh) as pool:
        return pool.run(fn, *args, timeout=timeout, group=group, **kwargs)


def close_all() -> None:
    """End every process that this module started; called at the end of the session."""
    pools = list(_POOLS.values())
    _POOLS.clear()
    try:
        for pool in pools:
            pool.close()
    finally:
        for pool in pools:
            pool.close(kill=True)
        _Zygote.close()


atexit.register(close_all)
