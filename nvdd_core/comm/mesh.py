"""The group of ranks and the few collectives that nvdd uses.

`Mesh` is the only object that talks to torch.distributed. With one rank it needs no process group and every
collective is the identity. A collective that fails because a peer is gone raises `RankLostError`; `faults`
turns that into the peer's own error where there is one.

Invariant: every method marked "collective" must be called by all ranks, in the same order.
Layer: comm.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Its functions take the world group of the moment of import as their default argument. Imported late (torch._dynamo
# does so), they keep gloo's threads alive past the end of the interpreter, which then aborts.
import torch.distributed.nn

from nvdd_core.comm.counter import CommCounter
from nvdd_core.comm.shared import SharedLane, open_lane
from nvdd_core.errors import DistributedError, RankLostError

T = TypeVar("T")

_REGISTER = "NCCL_GRAPH_REGISTER"
_BLOCKS = "NCCL_MAX_CTAS"
"""How many of a GPU's blocks NCCL may take; more slow kernels beside a sum down by more than they speed the sum up."""

TIMEOUT_S = 1800.0
"""Seconds that a rank waits for one that is alive but doesn't answer, where nobody says otherwise."""

_MESHES: weakref.WeakValueDictionary[int, Mesh] = weakref.WeakValueDictionary()
_NEXT_ID = itertools.count()


def mesh_by_id(mesh_id: int) -> Mesh:
    """Return the mesh that a custom op names by its number, `Mesh.id`: an op's arguments are tensors and numbers."""
    return _MESHES[mesh_id]


class Pending:
    """A collective under way; `wait` returns its tensor, `host` its first numbers."""

    def __init__(
        self, tensor: torch.Tensor, work: Any = None, finish: Callable[[], None] | None = None
    ) -> None:
        self._tensor, self._work, self._finish = tensor, work, finish
        self._begun = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self) -> torch.Tensor:
        """Block (on a GPU: order the current stream) until the collective is done."""
        if self._work is not None:
            with _peer_loss("a pending collective"):
                self._work.wait()
            self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._tensor

    def host(self, n: int) -> list[float]:
        """Return the first `n` numbers on the host.

        On a GPU this waits for the collective only, not for work that the current stream got afterwards.
        """
        if self._begun is None:
            return [float(v) for v in self.wait()[:n].tolist()]
        side = _side_stream(self._tensor.device)
        with torch.cuda.stream(side):
            side.wait_event(self._begun)
            numbers = self.wait()[:n].to("cpu", non_blocking=True)
            done = side.record_event()
        self._tensor.record_stream(side)
        done.synchronize()
        return [float(v) for v in numbers.tolist()]


class _Vote(Pending):
    """Numbers on a GPU that are summed on the hosts."""

    def __init__(self, numbers: torch.Tensor, lane: SharedLane) -> None:
        super().__init__(numbers)
        self._lane = lane

    def host(self, n: int) -> list[float]:
        total = torch.tensor(super().host(n), dtype=torch.float64)
        self._lane.all_reduce_(total, torch.add)()
        return [float(v) for v in total]


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]


@contextmanager
def _peer_loss(what: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError):
        raise
    except RuntimeError as exc:  # torch reports a closed connection, a time-out or an abort so
        first = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise RankLostError(
            f"lost contact with another rank during {what}: {first}. A rank died or was stopped; "
            "look at its own error or the system log, then restart from the last checkpoint"
        ) from exc


class Mesh:
    """One-dimensional group of ranks.

    Attributes
    ----------
    rank, size : int
        This process's place and the number of processes.
    device : torch.device
        Where this rank computes.
    counter : CommCounter
        Tally of collectives and of the bytes this rank sent.
    """

    def __init__(self, rank: int, size: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self.device, self.group = rank, size, device, group
        self.counter = CommCounter()
        self.id = next(_NEXT_ID)
        _MESHES[self.id] = self
        self._lane: SharedLane | None = None
        self._owns_group = False
        self._nccl = group is not None and "nccl" in str(dist.get_backend_config(group))
        if self._nccl:  # before its first collective, when it looks
            os.environ.setdefault(_REGISTER, "0")
            os.environ.setdefault(_BLOCKS, "16")

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """Return a mesh of one rank, which needs no process group."""
        return cls(0, 1, torch.device(device), None)

    @classmethod
    def from_process_group(
        cls,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        timeout_s: float = TIMEOUT_S,
    ) -> Mesh:
        """Wrap an initialised process group (default: torch's default group) (collective).

        `timeout_s` is for waiting in shared memory; the group has a limit of its own from its start.
        """
        group = group if group is not None else dist.group.WORLD
        mesh = cls(dist.get_rank(group), dist.get_world_size(group), torch.device(device), group)
        if mesh.size > 1:
            mesh._lane = open_lane(
                mesh.rank, mesh.size, mesh.broadcast_object, mesh.all_gather_objects, timeout_s
            )
            if mesh._lane is not None:
                weakref.finalize(mesh, mesh._lane.close)
        return mesh

    @staticmethod
    def initialise(
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        init_method: str = "env://",
        timeout_s: float = TIMEOUT_S,
        *,
        with_gpus: bool | None = None,
    ) -> Mesh:
        """Start torch's default process group and wrap it (collective).

        GPU tensors travel by NCCL, CPU tensors by gloo or through shared memory. A rank that waits longer than
        `timeout_s` seconds for another one gives up. `with_gpus` says whether the group can carry GPU tensors; by
        default it follows from the device.
        """
        device = torch.device(device)
        with_gpus = device.type == "cuda" if with_gpus is None else with_gpus
        backend = "cpu:gloo,cuda:nccl" if with_gpus else "gloo"
        with _peer_loss("the start of the process group"):
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        mesh = Mesh.from_process_group(device=device, timeout_s=timeout_s)
        mesh._owns_group = True
        return mesh

    def close(self, *, failed: bool = False) -> None:
        """Leave the mesh, which can't be used afterwards; a process group that it started ends.

        Parameters
        ----------
        failed : bool
            Don't wait for peers to read what this rank sent last.
        """
        _MESHES.pop(self.id, None)
        if self._lane is not None:
            self._lane.close(0.0 if failed else TIMEOUT_S)
            self._lane = None
        if self.group is not None and dist.is_initialized() and (self._owns_group or failed):
            # after a failure connections must close, whoever made them: peers wait on them
            _end_group(abort=failed and self._nccl)
        self.group = None

    def store(self) -> torch._C._distributed_c10d.Store | None:
        """Return the key-value store that the ranks share, or None for one rank."""
        if self.size == 1 or not dist.is_initialized():
            return None
        return dist.distributed_c10d._get_default_store()

    @property
    def captures(self) -> bool:
        """Whether its collectives can be captured in a CUDA graph: NCCL's can, and there are none for one rank.

        Not while NCCL registers buffers of captured collectives, which ranks do together: two that captured a MACE
        model waited for each other for ever (NCCL 2.28, growing segments of memory).
        """
        quiet = self._nccl and os.environ.get(_REGISTER) == "0"
        return self.device.type == "cuda" and (self.size == 1 or quiet)

    def _staged(self, t: torch.Tensor) -> bool:
        """Whether a GPU tensor must travel through the host: several ranks on one GPU have gloo only."""
        return t.is_cuda and not self._nccl

    # -- sums and maxima -------------------------------------------------------------------------------

    def all_reduce_sum_(self, t: torch.Tensor) -> torch.Tensor:
        """Sum `t` over ranks in place and return it (collective)."""
        return self._all_reduce(t, dist.ReduceOp.SUM).wait()

    def all_reduce_max_(self, t: torch.Tensor) -> torch.Tensor:
        """Take the maximum of `t` over ranks in place and return it (collective)."""
        return self._all_reduce(t, dist.ReduceOp.MAX).wait()

    def start_all_reduce_sum_(self, t: torch.Tensor) -> Pending:
        """Begin to sum `t` over ranks in place (collective); `Pending.wait` gives the sum."""
        return self._all_reduce(t, dist.ReduceOp.SUM)

    def start_vote(self, numbers: torch.Tensor) -> Pending:
        """Begin to sum a few numbers that only the host will read, by `Pending.host` (collective).

        GPUs of one host need no collective of their own for it: each host reads its numbers and the hosts meet
        in shared memory.
        """
        if self._lane is None or not numbers.is_cuda:
            return self.start_all_reduce_sum_(numbers)
        self.counter.add("all_reduce", numbers.numel() * numbers.element_size())
        return _Vote(numbers, self._lane)

    def _all_reduce(self, t: torch.Tensor, op: Any) -> Pending:
        if self.size == 1:
            return Pending(t)
        self.counter.add("all_reduce", t.numel() * t.element_size())
        if self._lane is not None and not t.is_cuda:
            combine = torch.add if op == dist.ReduceOp.SUM else torch.maximum
            return Pending(t, finish=self._lane.all_reduce_(t, combine))
        staged = t.cpu() if self._staged(t) else t
        with _peer_loss("an all-reduce"):
            work = dist.all_reduce(staged, op=op, group=self.group, async_op=True)
        return Pending(t, work, (lambda: _copy(t, staged)) if staged is not t else None)

    # -- rows --------------------------------------------------------------------------------------------

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        out: torch.Tensor | None = None,
        kind: str = "all_to_all",
    ) -> torch.Tensor:
        """Send consecutive blocks of rows to the ranks and receive theirs (collective).

        Parameters
        ----------
        rows : Tensor, shape (sum(send_splits), *F)
            Rows ordered by destination rank.
        send_splits, recv_splits : sequence of int, length `size`
            Rows to and from each rank.
        out : Tensor, shape (sum(recv_splits), *F), optional
            Contiguous buffer to receive into.
        kind : str
            Name under which the counter books the transfer.

        Returns
        -------
        Tensor, shape (sum(recv_splits), *F)
        """
        return self.start_all_to_all_rows(rows, send_splits, recv_splits, out, kind).wait()

    def start_all_to_all_rows(
        self,
        rows: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        out: torch.Tensor | None = None,
        kind: str = "all_to_all",
    ) -> Pending:
        """Begin `all_to_all_rows` (collective); `Pending.wait` gives the received rows."""
        if out is None:
            out = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
        if self.size == 1:
            out.copy_(rows)
            return Pending(out)
        self.counter.add(kind, rows.numel() * rows.element_size())
        if self._lane is not None and not rows.is_cuda:
            return Pending(out, finish=self._lane.all_to_all_rows(rows, send_splits, recv_splits, out))
        rows = rows.contiguous()
        with _peer_loss("an exchange of rows"):
            # gloo takes half as long by send and receive as by its all-to-all, which wants CPU tensors anyway
            if rows.is_cuda and self._nccl:
                work = dist.all_to_all_single(
                    out, rows, list(recv_splits), list(send_splits), group=self.group, async_op=True
                )
                return Pending(out, work)
            return self._start_pairs(rows, send_splits, recv_splits, out)

    def _start_pairs(
        self, rows: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], out: torch.Tensor
    ) -> Pending:
        if self._staged(rows):
            host = torch.empty(out.shape, dtype=out.dtype)
            inner = self._start_pairs(rows.cpu(), send_splits, recv_splits, host)
            return Pending(out, None, lambda: _copy(out, inner.wait()))
        works: list[Any] = []
        incoming = _blocks(out, recv_splits)
        outgoing = _blocks(rows, send_splits)
        out_self, in_self = incoming[self.rank], outgoing[self.rank]
        if in_self.shape[0]:
            out_self.copy_(in_self)
        for step in range(1, self.size):  # staggered, so that no rank is everybody's first target
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            if recv_splits[source] and incoming[source].numel():
                works.append(dist.irecv(incoming[source], group=self.group, group_src=source))
            if send_splits[target] and outgoing[target].numel():
                works.append(dist.isend(outgoing[target], group=self.group, group_dst=target))
        return Pending(out, _Works(works, rows))

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Gather equally long lists of integers from every rank (collective)."""
        return [
            [int(v) for v in row] for row in self.all_gather_vector(torch.tensor(values, dtype=torch.int64))
        ]

    def all_gather_vector(self, values: torch.Tensor) -> torch.Tensor:
        """Gather equally shaped small CPU tensors; returns shape (size, *shape) (collective)."""
        if self.size == 1:
            return values[None].clone()
        self.counter.add("all_gather", values.numel() * values.element_size())
        if self._lane is not None:
            out = values.new_empty((self.size, *values.shape))
            self._lane.all_gather(values, out)()
            return out
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with _peer_loss("an all-gather"):
            dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    # -- memory that ranks share ---------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether ranks see each other's memory, so that `shared_pieces` can be called."""
        return self._lane is not None

    def shared_pieces(self, name: str, size: int) -> list[torch.Tensor]:
        """Return memory of each rank, which every rank reads and writes (collective).

        What one wrote others may read after the next `barrier`. The same memory is returned for a name again, with
        what it held, unless more is asked for than before. It is kept until the mesh is closed.

        Parameters
        ----------
        name : str
            Begins with the name of whose it is, as all of a mesh share names.
        size : int
            Bytes, the same on every rank.

        Returns
        -------
        list of Tensor, shape (size,), uint8
            By rank.

        Raises
        ------
        DistributedError
            Where ranks share no memory.
        """
        if self._lane is None:
            raise DistributedError("these ranks share no memory: look at Mesh.shares_memory first")
        return self._lane.pieces(name, size, self.all_gather_objects)

    # -- Python objects (set-up only) ----------------------------------------------------------------------

    def all_gather_objects(self, value: T) -> list[T]:
        """Gather small picklable values from every rank (collective; set-up only)."""
        if self.size == 1:
            return [value]
        self.counter.add("objects", 0)
        out: list[Any] = [None] * self.size
        with _peer_loss("a gather of objects"):
            dist.all_gather_object(out, value, group=self.group)
        return out

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Send a picklable value from rank `src` to all (collective; set-up only)."""
        box: list[Any] = [value]
        if self.size > 1:
            self.counter.add("objects", 0)
            with _peer_loss("a broadcast of an object"):
                dist.broadcast_object_list(box, group_src=src, group=self.group, device=torch.device("cpu"))
        result: T = box[0]
        return result

    def barrier(self) -> None:
        """Wait for every rank (collective)."""
        if self._lane is not None:
            self._lane.barrier()
        else:
            self.all_gather_ints([0])


class _Works:
    """Several pending transfers waited for as one; keeps the send buffer alive until then."""

    def __init__(self, works: list[Any], buffer: torch.Tensor) -> None:
        self._works, self._buffer = works, buffer

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _end_group(*, abort: bool) -> None:
    if abort:  # an orderly end would wait for the kernels of a collective that no peer will join
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _blocks(rows: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    return list(rows.split(list(splits)))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
