"""The halo plan, and the exchange with its adjoint as a pair of custom ops.

`HaloPlan` says which owned rows go to which rank and how many ghost rows come from each. Local rows are
always ``[owned | ghost]``, ghosts grouped by the rank that owns them.

- ``forward``: owned rows -> local rows; the linear map ``[I; P]``.
- ``reverse``: local rows -> owned rows, ghosts' values summed into owners; its transpose ``[I, P^T]``.

Each op's registered backward is the other one, so derivatives of any order are right, under torch.compile as
well. Invariant: both are collective, and every rank of the mesh calls them in the same order, also a rank
that neither sends nor receives.
Layer: comm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.comm.mesh import Mesh, mesh_by_id


def _forward(
    owned: torch.Tensor,
    send_index: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    mesh_id: int,
) -> torch.Tensor:
    """Return ``[owned | ghost]`` from the owned rows (collective)."""
    n_owned = owned.shape[0]
    local = owned.new_empty((n_owned + sum(recv_splits), *owned.shape[1:]))
    pending = mesh_by_id(mesh_id).start_all_to_all_rows(
        owned.index_select(0, send_index), send_splits, recv_splits, local[n_owned:], "exchange"
    )
    local[:n_owned].copy_(owned)
    pending.wait()
    return local


halo_forward = torch.library.custom_op("nvdd::halo_forward", _forward, mutates_args=())


@halo_forward.register_fake
def _(
    owned: torch.Tensor,
    send_index: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    mesh_id: int,
) -> torch.Tensor:
    return owned.new_empty((owned.shape[0] + sum(recv_splits), *owned.shape[1:]))


def _reverse(
    local: torch.Tensor,
    send_index: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    mesh_id: int,
) -> torch.Tensor:
    """Return owned rows with their ghosts' values summed in (collective)."""
    n_owned = local.shape[0] - sum(recv_splits)
    pending = mesh_by_id(mesh_id).start_all_to_all_rows(
        local[n_owned:], recv_splits, send_splits, kind="reverse"
    )
    owned = local[:n_owned].clone(memory_format=torch.contiguous_format)
    return owned.index_add_(0, send_index, pending.wait())


halo_reverse = torch.library.custom_op("nvdd::halo_reverse", _reverse, mutates_args=())


@halo_reverse.register_fake
def _(
    local: torch.Tensor,
    send_index: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    mesh_id: int,
) -> torch.Tensor:
    return local.new_empty((local.shape[0] - sum(recv_splits), *local.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.plan = inputs[1:]


def _forward_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return halo_reverse(grad, *ctx.plan), None, None, None, None


def _reverse_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return halo_forward(grad, *ctx.plan), None, None, None, None


halo_forward.register_autograd(_forward_backward, setup_context=_save)
halo_reverse.register_autograd(_reverse_backward, setup_context=_save)


def _sum(value: torch.Tensor, mesh_id: int) -> torch.Tensor:
    return mesh_by_id(mesh_id).all_reduce_sum_(value.clone(memory_format=torch.contiguous_format))


def _copy(value: torch.Tensor, mesh_id: int) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _like(value: torch.Tensor, mesh_id: int) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _save_mesh(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.mesh_id = inputs[1]


def _pair(op: Any, adjoint: Any) -> None:
    """Register `adjoint` as the backward of `op`."""
    op.register_fake(_like)
    op.register_autograd(lambda ctx, grad: (adjoint(grad, ctx.mesh_id), None), setup_context=_save_mesh)


_all_reduce_sum = torch.library.custom_op("nvdd::all_reduce_sum", _sum, mutates_args=())
_pair(_all_reduce_sum, _all_reduce_sum)

# Of the same value on every rank: the sum of shares, and each rank's copy of it, adjoint to each other.
_sum_replicated = torch.library.custom_op("nvdd::sum_replicated", _sum, mutates_args=())
_copy_replicated = torch.library.custom_op("nvdd::copy_replicated", _copy, mutates_args=())
_pair(_sum_replicated, _copy_replicated)
_pair(_copy_replicated, _sum_replicated)


def all_reduce_sum_symmetric(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum `value` over ranks, differentiable; the adjoint is an all-reduce too (collective).

    Right when each rank's share of what follows is counted once, see rule 4 of ARCHITECTURE.md.
    """
    if mesh.size == 1:
        return value
    result: torch.Tensor = _all_reduce_sum(value, mesh.id)
    return result


def all_reduce_sum_replicated(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum `value` over ranks, differentiable; the adjoint passes the gradient through (collective).

    Right when every rank computes the same function of the sum and it is counted once: the gradient is then the
    same on every rank already. What uses that gradient may differ from rank to rank, so the adjoint's own adjoint
    is the sum over ranks again, and derivatives of any order hold.
    """
    if mesh.size == 1:
        return value
    result: torch.Tensor = _sum_replicated(value, mesh.id)
    return result


@dataclass(frozen=True)
class HaloPlan:
    """Which owned rows go where, and which ghost rows come from where.

    Attributes
    ----------
    mesh : Mesh
    n_owned : int
        Rows this rank owns.
    send_index : Tensor, shape (sum(send_splits),), int64
        Owned rows to send, grouped by destination rank; a row may go to several ranks.
    send_splits, recv_splits : tuple of int, length ``mesh.size``
        Rows to and from each rank; zero for the rank itself.
    """

    mesh: Mesh
    n_owned: int
    send_index: torch.Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @classmethod
    def trivial(cls, mesh: Mesh, n_owned: int) -> HaloPlan:
        """Return the plan without ghosts."""
        none = (0,) * mesh.size
        return cls(mesh, n_owned, torch.zeros(0, dtype=torch.int64, device=mesh.device), none, none)

    @property
    def n_ghost(self) -> int:
        """Ghost rows on this rank."""
        return sum(self.recv_splits)

    @property
    def n_local(self) -> int:
        """Owned and ghost rows on this rank."""
        return self.n_owned + self.n_ghost

    @property
    def is_trivial(self) -> bool:
        """True when the mesh has one rank, so that no exchange ever happens."""
        return self.mesh.size == 1

    def forward(self, owned: torch.Tensor) -> torch.Tensor:
        """Exchange: owned rows (n_owned, *F) -> local rows (n_local, *F) (collective, differentiable)."""
        self._check(owned, self.n_owned, "owned")
        if self.is_trivial:
            return owned
        return self._call(halo_forward, _forward, owned)

    def reverse(self, local: torch.Tensor) -> torch.Tensor:
        """Adjoint: local rows (n_local, *F) -> owned rows (n_owned, *F) (collective, differentiable)."""
        self._check(local, self.n_local, "local")
        if self.is_trivial:
            return local
        return self._call(halo_reverse, _reverse, local)

    def refresh(self, local: torch.Tensor) -> torch.Tensor:
        """Overwrite ghost rows with their owners' values (collective, differentiable)."""
        self._check(local, self.n_local, "local")
        return self.forward(local[: self.n_owned])

    def correct(self, local: torch.Tensor) -> torch.Tensor:
        """Sum ghosts' values into owners, then refresh the ghosts (collective, differentiable)."""
        return self.forward(self.reverse(local))

    def _call(self, op: Any, body: Any, rows: torch.Tensor) -> torch.Tensor:
        """Run an op, without the dispatcher's detour where nothing records it (30 microseconds a step)."""
        splits = list(self.send_splits), list(self.recv_splits)
        recorded = rows.requires_grad and torch.is_grad_enabled()
        run = op if recorded or torch.compiler.is_compiling() or type(rows) is not torch.Tensor else body
        result: torch.Tensor = run(rows, self.send_index, *splits, self.mesh.id)
        return result

    def _check(self, rows: torch.Tensor, expected: int, kind: str) -> None:
        if rows.shape[0] != expected:
            raise ValueError(
                f"rank {self.mesh.rank}: an exchange needs the {expected} {kind} rows, found a tensor of shape "
                f"{tuple(rows.shape)}"
            )
