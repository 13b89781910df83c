"""What started this process, and what processes that it starts in turn are given.

`found_group`, `found_local_rank` and `meeting_point` read the variables that torchrun or srun leaves behind. The
command line and `runtime.manager` ask here and nowhere else, so a command and a script see the same group.
`interpreter_command`, `search_path` and `child_environment` say how another interpreter is started that finds the same
modules, and `end_with_parent` ends it when this one is gone. `one_at_a_time`, `stderr_without` and `fallback_cache` are
for libraries that compile code where they run: what they share with other processes, and what they print.

Invariant: standard library only, and the environment is read, never changed. Layer: environment.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nvdd_core.errors import InputError

if sys.platform != "win32":
    import fcntl

_LOG = logging.getLogger("nvdd.environment")

GROUP_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_ID",
    }
)
"""What a starter leaves in the environment; processes of another group must not inherit it."""

_WATCH_S = 0.5


def interpreter_command(*arguments: str) -> list[str]:
    """Return the command that starts this interpreter again, optimised as this one is.

    It takes nothing of the folder that it happens to start in.
    """
    optimise = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    return [sys.executable, "-P", *optimise, *arguments]


def search_path() -> list[str]:
    """Return where this process looks for modules, in words that mean the same in another folder."""
    return [entry or os.getcwd() for entry in sys.path]


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the group that it may be in, and with `more`."""
    return {name: value for name, value in os.environ.items() if name not in GROUP_VARIABLES} | more


def end_with_parent(parent: int) -> None:
    """End this process, from a thread of its own, as soon as its parent is no longer `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def found_group(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (rank, size) of the group that this process was started in, or None.

    Raises
    ------
    InputError
        When the variables that describe the group are not numbers.
    """
    env = os.environ if env is None else env
    known = [("RANK", "WORLD_SIZE", 1)]
    # The shell of an sbatch script has the variables of a task, too, but srun alone sets a step's.
    if "SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env:
        known.append(("SLURM_PROCID", "SLURM_NTASKS", 2))
    for rank, size, least in known:
        if rank in env and size in env:
            try:
                place, count = int(env[rank]), int(env[size])
            except ValueError:
                raise InputError(
                    f"{rank}={env[rank]!r} and {size}={env[size]!r} should be whole numbers, as torchrun and "
                    "srun set them; unset them to start processes on this machine"
                ) from None
            if count >= least:
                return place, count
    return None


def found_local_rank(env: Mapping[str, str] | None = None) -> int:
    """Return this process's number on its host; 0 outside a group.

    Raises
    ------
    InputError
        When the variable that tells it is not a number.
    """
    env = os.environ if env is None else env
    if found_group(env) is None:
        return 0
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise InputError(f"{name} is {env[name]!r}: expected a whole number") from None
    return 0


def meeting_point(env: Mapping[str, str] | None = None) -> str:
    """Return where the ranks of the group find each other, as an address that torch takes.

    That is ``env://`` where MASTER_ADDR and MASTER_PORT are set, as by torchrun. srun sets neither: then it is
    the first host of the step, and a port made of the numbers of job and step, which all tasks know.
    """
    env = os.environ if env is None else env
    if "RANK" in env or {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return "env://"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    # The first host of a list such as "gpu[07-09,12],login1".
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    host = "".join(part or "" for part in first.groups()) if first else nodes
    number = f"{env.get('SLURM_JOB_ID', '0')}{env.get('SLURM_STEP_ID', '0')}"
    port = 20_000 + int(re.sub(r"\D", "", number) or 0) % 20_000
    return f"tcp://{env.get('MASTER_ADDR', host)}:{env.get('MASTER_PORT', port)}"


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let the processes that name the same file `lock` run a step one after the other.

    They don't wait where the file can't be written or its file system has no locks. So this saves work that another
    process has just done; it doesn't make a step safe that isn't.
    """
    with ExitStack() as stack:
        if sys.platform != "win32":
            with suppress(OSError):
                handle = stack.enter_context(lock.open("a"))
                fcntl.flock(handle, fcntl.LOCK_EX)
                # said aloud, because a process forked meanwhile keeps the file open
                stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


@contextmanager
def stderr_without(unwanted: bytes) -> Iterator[None]:
    """Leave out of stderr the lines that contain `unwanted`, native code's as well; the others come at the end."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    with tempfile.TemporaryFile() as text:
        os.dup2(text.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            text.seek(0)
            kept = b"".join(line for line in text if unwanted not in line)
            if kept:
                os.write(2, kept)


def fallback_cache(program: str, chosen: str | None, asked_by: str) -> Path | None:
    """Return a temporary folder for what `program` keeps in its cache, or None where its own can be written to.

    A container without a home is a common place where it can't. The user is warned, once a group.

    Parameters
    ----------
    program : str
        Name of its folder in the user's caches.
    chosen : str or None
        Folder that the user chose in place of that one.
    asked_by : str
        Whom the warning names.
    """
    caches = (
        "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    )
    usual = chosen or os.path.join(os.path.expanduser(caches), program)
    if _can_write(Path(usual)):
        return None
    # one folder a user: others may not write to it, so that nobody runs code that another one put there
    user = os.getuid() if sys.platform != "win32" else "user"
    own = Path(tempfile.gettempdir()) / f"nvdd-{program}-{user}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or (sys.platform != "win32" and own.stat().st_uid != os.getuid()):
        own = Path(tempfile.mkdtemp(prefix=f"nvdd-{program}-"))
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning("%s: %s can't be written to, so compiled code goes to %s", asked_by, usual, own)
    return own


def _can_write(folder: Path) -> bool:
    """Tell whether a folder, which may not be there yet, can hold files of ours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
