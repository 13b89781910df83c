"""Collectives between CPU ranks of one host through shared memory.

`SharedLane` carries what `Mesh` would otherwise send through gloo's sockets: a small message then costs a few
microseconds instead of most of a millisecond, which at a few milliseconds a step decides whether a second core
helps. Each rank writes its message into a slot of its own and raises its sequence number; readers wait for that
number, copy what is theirs and say so. Two slots alternate, so a rank can be two operations ahead.

Slots are anonymous memory (memfd) that peers open through /proc, so a killed run leaves nothing behind. A peer that
dies or closes while somebody waits for it, or doesn't answer within the time limit, raises `RankLostError` there.

Invariant: all ranks post the same operations in the same order; a slot is overwritten only after every reader is
done with it. Plain stores and loads suffice as x86 keeps their order; elsewhere the lane is not opened.
Layer: comm.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from nvdd_core.errors import DistributedError, RankLostError

SWITCH = "NVDD_SHARED_MEMORY"
"""Environment variable; 0 makes ranks of one host use gloo."""

_SEQUENCE, _DONE, _CLOSED, _PID, _FILE, _IDENTITY = 0, 1, 2, 3, (4, 6), (5, 7)
_COLUMNS = 8  # one cache line a rank
_SPINS, _YIELDS = 50, 4000
_HEAD = (
    3  # numbers in front of a message: what operation, bytes a row, and then the first rows by destination
)
_OPERATIONS = ("all_reduce_sum", "all_reduce_max", "all_gather", "all_to_all", "barrier")
_LINGER_S = 5.0

Finish = Callable[[], None]


class SharedLane:
    """One mesh's way through shared memory; made by `open_lane`."""

    def __init__(self, rank: int, size: int, block: _Slot, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._block_of_control = block  # keeps the memory open for peers
        self._control = block.numbers[: _COLUMNS * size].reshape(size, _COLUMNS)
        self._control[rank, _PID] = os.getpid()
        self._peers = [r for r in range(size) if r != rank]
        self._mine: list[_Slot | None] = [None, None]
        self._theirs: dict[tuple[int, int], _Slot] = {}
        self._watch: dict[int, select.poll] = {}
        self._last = 0
        self._unfinished: list[tuple[int, Finish]] = []
        self._pieces: dict[str, list[_Slot]] = {}
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._open = True

    # -- operations ----------------------------------------------------------------------------------------

    def all_reduce_(self, t: torch.Tensor, combine: Callable[..., Any]) -> Finish:
        """Post `t`; the returned call replaces it by the combination over ranks, in the order of ranks."""
        code = _OPERATIONS.index("all_reduce_max" if combine is torch.maximum else "all_reduce_sum")
        number = self._post(t, code, self._to_all(t))

        def finish() -> None:
            parts = [self._block(number, code, r, t.shape, t.dtype) for r in range(self.size)]
            total = t.detach()
            combine(parts[0], parts[1], out=total)
            for part in parts[2:]:
                combine(total, part, out=total)

        return self._later(number, finish)

    def all_gather(self, t: torch.Tensor, out: torch.Tensor) -> Finish:
        """Post `t`; the returned call fills `out`, shape (size, *t.shape)."""
        code = _OPERATIONS.index("all_gather")
        number = self._post(t, code, self._to_all(t))

        def finish() -> None:
            for r in range(self.size):
                out[r].copy_(self._block(number, code, r, t.shape, t.dtype))

        return self._later(number, finish)

    def all_to_all_rows(
        self, rows: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], out: torch.Tensor
    ) -> Finish:
        """Post rows grouped by destination; the returned call fills `out` with rows grouped by source."""
        starts = [0]
        for n in send_splits:
            starts.append(starts[-1] + n)
        code = _OPERATIONS.index("all_to_all")
        table = [bound for n in range(self.size) for bound in starts[n : n + 2]]
        number = self._post(rows, code, table)

        def finish() -> None:
            place = 0
            for source, n in enumerate(recv_splits):
                shape = torch.Size((n, *rows.shape[1:]))
                part = self._block(number, code, source, shape, rows.dtype)
                if n:
                    out[place : place + n].copy_(part)
                place += n

        return self._later(number, finish)

    def barrier(self) -> None:
        """Wait for every rank: what it wrote to shared memory before can be read afterwards."""
        code = _OPERATIONS.index("barrier")
        number = self._post(self._nothing, code, self._to_all(self._nothing))

        def finish() -> None:
            for r in self._peers:
                self._block(number, code, r, self._nothing.shape, self._nothing.dtype)

        self._later(number, finish)()

    def pieces(self, name: str, size: int, gather: Callable[[Any], list[Any]]) -> list[torch.Tensor]:
        """Return `size` bytes of each rank, which all ranks see; `gather` is called when there are not as many yet.

        They are kept, by name, for as long as the lane is open. They are no slots: nothing but `barrier` says when what
        is in them may be read or overwritten.
        """
        known = self._pieces.get(name)
        if known is None or known[0].size < size:
            mine = _Slot.create(size)
            places = gather((os.getpid(), mine.file, mine.identity))
            try:
                known = [mine if r == self.rank else _Slot.attach(*at) for r, at in enumerate(places)]
            except OSError as exc:
                raise RankLostError(f"a rank is gone: its shared memory can't be opened ({exc})") from exc
            self._pieces[name] = known
            self.barrier()  # nobody leaves before its piece was opened
        return [slot.bytes[:size] for slot in known]

    def close(self, linger_s: float = _LINGER_S) -> None:
        """Leave the lane, after every peer has read what was posted here or `linger_s` seconds have passed."""
        if not self._open:
            return
        self._open = False
        if linger_s:
            with suppress(RankLostError):  # a peer that is gone reads nothing any more
                self._finish_upto(self._last)
        end = time.monotonic() + linger_s
        while time.monotonic() < end and any(
            self._control[r, _DONE] < self._last and not self._control[r, _CLOSED] and self._is_alive(r)
            for r in self._peers
        ):
            time.sleep(1e-3)
        self._control[self.rank, _CLOSED] = 1
        self._theirs.clear()
        self._pieces.clear()
        self._mine = [None, None]
        self._watch.clear()

    # -- slots ---------------------------------------------------------------------------------------------

    def _to_all(self, t: torch.Tensor) -> list[int]:
        """Return the table of a message of which every rank reads all."""
        return [0, t.shape[0] if t.dim() else 1] * self.size

    @property
    def _head_bytes(self) -> int:
        return -(-8 * (_HEAD + 2 * self.size) // 64) * 64  # so that what follows is aligned for every dtype

    def _post(self, t: torch.Tensor, code: int, table: Sequence[int]) -> int:
        """Write a message with its table of first and last rows by destination; return its number."""
        number = self._last + 1
        self._finish_upto(number - 2)
        for peer in self._peers:
            self._wait(peer, _DONE, number - 2)
        head, size = self._head_bytes, t.numel() * t.element_size()
        slot = self._own_slot(number % 2, head + size)
        slot.numbers[:_HEAD] = (code, _row_bytes(t.shape, t.dtype), number)
        slot.numbers[_HEAD : _HEAD + 2 * self.size] = table
        if size:
            slot.bytes[head : head + size].copy_(t.detach().reshape(-1).contiguous().view(torch.uint8))
        self._last = number
        self._control[self.rank, _SEQUENCE] = number
        return number

    def _own_slot(self, side: int, size: int) -> _Slot:
        slot = self._mine[side]
        if slot is None or slot.size < size:
            slot = self._mine[side] = _Slot.create(max(size + size // 4, 1 << 16))
            self._control[self.rank, _FILE[side]] = slot.file
            self._control[self.rank, _IDENTITY[side]] = slot.identity
        return slot

    def _block(
        self, number: int, code: int, source: int, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of what rank `source` posted for this rank as message `number`.

        Raises
        ------
        DistributedError
            If that rank posted another operation, or rows of another size or number.
        """
        side = number % 2
        self._wait(source, _SEQUENCE, number)
        slot = self._mine[side] if source == self.rank else self._peer_slot(source, side)
        if slot is None:
            raise RankLostError(f"rank {self.rank}: the shared-memory lane is closed")
        row, n = _row_bytes(shape, dtype), shape[0] if len(shape) else 1
        first, last = slot.numbers[_HEAD + 2 * self.rank : _HEAD + 2 * self.rank + 2].tolist()
        found = (*slot.numbers[:_HEAD].tolist(), last - first)
        if found != (code, row, number, n):
            raise DistributedError(
                f"ranks make different calls: rank {self.rank} is in {_OPERATIONS[code]} and expects {n} rows of {row} "
                f"bytes from rank {source}, which posted {_OPERATIONS[found[0]]} with {found[3]} rows of {found[1]} "
                "bytes. Every rank must make the same collective calls in the same order, also one without rows: "
                "look for an early return or a branch on local sizes in the model or a hook"
            )
        start = self._head_bytes + first * row
        return slot.bytes[start : start + n * row].view(dtype).view(shape)

    def _peer_slot(self, peer: int, side: int) -> _Slot:
        identity = int(self._control[peer, _IDENTITY[side]])
        known = self._theirs.get((peer, side))
        if known is None or known.identity != identity:
            pid, file = int(self._control[peer, _PID]), int(self._control[peer, _FILE[side]])
            try:
                known = self._theirs[peer, side] = _Slot.attach(pid, file, identity)
            except OSError as exc:
                raise RankLostError(
                    f"rank {peer} is gone: its shared memory can't be opened ({exc})"
                ) from exc
        return known

    # -- order and waiting ---------------------------------------------------------------------------------

    def _later(self, number: int, finish: Finish) -> Finish:
        self._unfinished.append((number, finish))
        return lambda: self._finish_upto(number)

    def _finish_upto(self, number: int) -> None:
        """Finish pending operations in their order, up to `number`."""
        while self._unfinished and self._unfinished[0][0] <= number:
            current, finish = self._unfinished.pop(0)
            finish()
            self._control[self.rank, _DONE] = current

    def _wait(self, peer: int, column: int, number: int) -> None:
        cell = self._control[peer]
        for _ in range(_SPINS):
            if cell[column] >= number:
                return
        for _ in range(_YIELDS):
            if cell[column] >= number:
                return
            os.sched_yield()
        begun = checked = time.monotonic()
        while cell[column] < number:
            time.sleep(5e-5)
            now = time.monotonic()
            if now - checked > 0.02:
                checked = now
                if (cell[_CLOSED] or not self._is_alive(peer)) and cell[column] < number:
                    raise RankLostError(
                        f"rank {self.rank}: rank {peer} left the group. It died or was stopped; look at its own "
                        "error or the system log, then restart from the last checkpoint"
                    )
                if now - begun > self._timeout_s and cell[column] < number:
                    raise RankLostError(
                        f"rank {self.rank}: rank {peer} is alive but has not answered for {now - begun:.0f} s (the "
                        f"limit is {self._timeout_s:g} s). It hangs or was suspended; end the run, look at what that "
                        "process does, then restart from the last checkpoint"
                    )

    def _is_alive(self, peer: int) -> bool:
        poll = self._watch.get(peer)
        if poll is None:
            try:
                handle = os.pidfd_open(int(self._control[peer, _PID]))
            except ProcessLookupError:
                return False
            poll = self._watch[peer] = select.poll()
            poll.register(handle, select.POLLIN)
            weakref.finalize(self, os.close, handle)
        return not poll.poll(0)


def _row_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape[1:].numel() * dtype.itemsize if len(shape) else dtype.itemsize


class _Slot:
    """A piece of shared memory as bytes and as int64 numbers."""

    def __init__(self, file: int, size: int, own: bool) -> None:
        self.file, self.size, self.identity = file, size, _identity(file)
        memory = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.numbers = np.frombuffer(memory, dtype=np.int64)
        if own:  # peers open it through this process as long as it is in use
            weakref.finalize(self, os.close, file)

    @classmethod
    def create(cls, size: int) -> _Slot:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("nvdd", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return cls(file, size, own=True)

    @classmethod
    def attach(cls, pid: int, file: int, identity: int) -> _Slot:
        """Open a peer's slot.

        Raises
        ------
        OSError
            If it is closed. Its number, and even the process's, may mean something else by then.
        """
        path = f"/proc/{pid}/fd/{file}"
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(handle) != identity:
                raise OSError(f"{path} is another file by now")
            return cls(handle, os.fstat(handle).st_size, own=False)
        finally:
            os.close(handle)


def _identity(file: int) -> int:
    """Return what tells an open file from all others of the host; the same in each process, and an int64."""
    status = os.fstat(file)
    return hash((status.st_dev, status.st_ino))


def open_lane(
    rank: int,
    size: int,
    broadcast: Callable[[Any], Any],
    gather: Callable[[Any], list[Any]],
    timeout_s: float,
) -> SharedLane | None:
    """Open a lane if all ranks are on one host that can have one, else return None on every rank (collective).

    Parameters
    ----------
    rank, size : int
    broadcast : callable
        Sends rank 0's picklable argument to all ranks.
    gather : callable
        Collects every rank's picklable argument.
    timeout_s : float
        How long to wait for a peer that is alive but doesn't answer, seconds.
    """
    here = (platform.node(), _boot_id(), _process_namespace()) if _is_possible() else None
    hosts = gather(here)
    if here is None or any(host != here for host in hosts):
        return None
    block = _Slot.create(8 * _COLUMNS * size) if rank == 0 else None
    place = broadcast(None if block is None else (os.getpid(), block.file, block.identity))
    try:
        block = _Slot.attach(*place) if block is None else block
    except OSError:  # another user, another container: no way through /proc
        block = None
    lane = None if block is None else SharedLane(rank, size, block, timeout_s)
    return lane if all(gather(lane is not None)) else None


def _is_possible() -> bool:
    if os.environ.get(SWITCH, "1") == "0" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:  # an old kernel or a strict sandbox has the functions but refuses them
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("nvdd", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


def _process_namespace() -> str:
    """Return what tells apart containers on one host, whose process numbers mean different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
