"""One rank's failure ends all ranks with the same error.

`group_scope` wraps the work of a run. When the body raises on one rank, that rank writes what happened on a
board in the store that all ranks share and closes its connections; a rank that then finds a peer gone reads
the board and raises the same type of error, with the failing rank named. `agreed` is for set-up steps that can
fail on one rank only and contain no collective: all ranks learn of the failure in one gather.

Invariant: the board is written before the connections close, so whoever loses contact finds the reason.
Layer: comm.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from nvdd_core import errors
from nvdd_core.comm.mesh import Mesh

_KEY = "nvdd/fault"
_NAMED = re.compile(r"rank \d+: ")
_HOST_STAYS_S = 2.0


def _is_raised_as_is(kind: type[BaseException]) -> bool:
    """Tell whether whoever hears of an error may raise its kind.

    SystemExit would end him, StopIteration end a loop of his, both in silence.
    """
    return issubclass(kind, (Exception, KeyboardInterrupt)) and not issubclass(
        kind, (StopIteration, StopAsyncIteration)
    )


@dataclass(frozen=True)
class Fault:
    """What went wrong on a rank, in a form that can travel."""

    rank: int
    type: str
    message: str
    exit_code: int

    @classmethod
    def of(cls, rank: int, exc: BaseException) -> Fault:
        """Describe `exc` as it was raised on `rank`."""
        code = exc.exit_code if isinstance(exc, errors.NvddError) else 1
        try:
            message = str(exc)
        except Exception as odd:  # an error whose own text fails still has to be told
            message = f"(its message can't be made: {type(odd).__name__})"
        return cls(rank, type(exc).__name__, message, code)

    def error(self) -> BaseException:
        """Rebuild the error, naming the rank where it happened."""
        # it may have happened on another rank, and only have been repeated on this one
        named = _NAMED.match(self.message) is not None
        text = self.message if named else f"rank {self.rank}: {self.message}"
        known = {**vars(builtins), **vars(errors)}.get(self.type)
        if isinstance(known, type) and issubclass(known, BaseException) and _is_raised_as_is(known):
            try:
                return known(text)
            except TypeError:  # a type that wants more than a message, UnicodeDecodeError for one
                pass
        kind = errors.InputError if self.exit_code == errors.InputError.exit_code else errors.PeerError
        return kind(f"rank {self.rank}: {self.type}: {self.message}")


def publish(mesh: Mesh, exc: BaseException) -> None:
    """Write `exc` on the board; the first writer stays."""
    store = mesh.store()
    if store is None:
        return
    try:
        if store.add(_KEY + "/count", 1) == 1:
            store.set(_KEY, json.dumps(asdict(Fault.of(mesh.rank, exc))))
        if mesh.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # the store lives in this process: give the others time to read the board before it goes
            end = time.monotonic() + _HOST_STAYS_S
            while store.add(_KEY + "/seen", 0) < mesh.size - 1 and time.monotonic() < end:
                time.sleep(0.02)
    except RuntimeError:
        # The store dies with its host; the others then report a lost rank, which is all that can be known.
        return


def read(mesh: Mesh, wait_s: float = 0.0) -> Fault | None:
    """Return the fault on the board, waiting up to `wait_s` seconds for one."""
    store = mesh.store()
    if store is None:
        return None
    end = time.monotonic() + wait_s
    while True:
        try:
            if store.check([_KEY]):
                fault = Fault(**json.loads(store.get(_KEY)))
                store.add(_KEY + "/seen", 1)
                return fault
        except RuntimeError:
            return None
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


@contextmanager
def group_scope(mesh: Mesh, wait_s: float = 1.0) -> Iterator[None]:
    """Make a failure on one rank end all ranks with the same type of error.

    Parameters
    ----------
    mesh : Mesh
    wait_s : float
        How long a rank that lost contact waits for the reason on the board.

    Raises
    ------
    RankLostError
        When a peer is gone and left no reason.
    """
    try:
        yield
    except errors.RankLostError as exc:
        fault = read(mesh, wait_s)
        mesh.close(failed=True)
        if fault is None or fault.rank == mesh.rank:
            raise
        raise fault.error() from exc
    except BaseException as exc:
        publish(mesh, exc)
        mesh.close(failed=True)
        raise


@contextmanager
def agreed(mesh: Mesh) -> Iterator[None]:
    """Run a step without collectives; if it raises on any rank, raise the same on every rank (collective)."""
    failure: Exception | None = None
    try:
        yield
    except Exception as exc:
        failure = exc
    if mesh.size == 1:
        if failure is not None:
            raise failure
        return
    faults = mesh.all_gather_objects(None if failure is None else Fault.of(mesh.rank, failure))
    first = next((f for f in faults if f is not None), None)
    if first is None:
        return
    if failure is not None and first.rank == mesh.rank:
        raise failure
    raise first.error() from failure
