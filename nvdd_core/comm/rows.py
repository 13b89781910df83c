"""Rows from each rank to each other rank, differentiable.

`all_to_all_rows` sends consecutive blocks of rows to the ranks and receives theirs. It is a permutation of all ranks'
rows together, so its adjoint sends them back: the same op with its two lists of splits swapped. The op is therefore
its own registered backward, and derivatives of any order are right, under torch.compile as well.

Invariant: collective, also for a rank that neither sends nor receives.
Layer: comm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nvdd_core.comm.mesh import Mesh, mesh_by_id


def _rows(rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], mesh_id: int) -> torch.Tensor:
    return mesh_by_id(mesh_id).all_to_all_rows(rows, send_splits, recv_splits)


_op = torch.library.custom_op("nvdd::all_to_all_rows", _rows, mutates_args=())


@_op.register_fake
def _(rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], mesh_id: int) -> torch.Tensor:
    return rows.new_empty((sum(recv_splits), *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.splits, ctx.mesh_id = inputs[1:3], inputs[3]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    sent, received = ctx.splits
    return _op(grad, received, sent, ctx.mesh_id), None, None, None


_op.register_autograd(_backward, setup_context=_save)


def all_to_all_rows(
    rows: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], mesh: Mesh
) -> torch.Tensor:
    """Send consecutive blocks of rows to the ranks and receive theirs (collective, differentiable).

    Parameters
    ----------
    rows : Tensor, shape (sum(send_splits), *F)
        Rows ordered by destination rank; real numbers.
    send_splits, recv_splits : sequence of int, length ``mesh.size``
        Rows to and from each rank; `received_splits` finds the second where a rank doesn't know it.
    mesh : Mesh

    Returns
    -------
    Tensor, shape (sum(recv_splits), *F)
        Ordered by the rank that sent them.
    """
    if rows.shape[0] != sum(send_splits):
        raise ValueError(
            f"rank {mesh.rank}: send_splits name {sum(send_splits)} rows, found a tensor of shape {tuple(rows.shape)}"
        )
    if mesh.size == 1:
        return rows
    result: torch.Tensor = _op(rows, list(send_splits), list(recv_splits), mesh.id)
    return result


def received_splits(send_splits: Sequence[int], mesh: Mesh) -> list[int]:
    """Return how many rows each rank sends to this one, given how many this one sends to each (collective)."""
    return [row[mesh.rank] for row in mesh.all_gather_ints(send_splits)]
