"""The 3-D Fourier transform of a real mesh that is spread over ranks, and its adjoint.

Each rank holds a slab: consecutive planes of the mesh along its first axis. `spectrum` transforms planes along the
second and third axes, sends each rank its columns (consecutive places of the second axis) of every plane, and
transforms those along the first axis. So the result is spread over ranks along the second axis, and no rank ever
holds more than its part of the mesh. The adjoint goes the same way back. Both work piece by piece: one piece is under
way while the next is transformed, and buffers are as large as a piece.

The two are a pair of custom ops, each the other's registered backward, and keep nothing for it: derivatives of any
order are right, at the cost of the transforms. Left to autograd, the gradient of a real transform is a complex one.
Invariant: both are collective, also for a rank without planes.
Layer: plugin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from nvdd_core.comm import Mesh, Pending, mesh_by_id

_PIECE_BYTES = {
    "cpu": 1 << 20,
    "cuda": 32 << 20,
}  # a message must outweigh its latency, a buffer matters less


def shares(n: int, size: int, start: int = 0) -> list[slice]:
    """Cut the `n` places from `start` on into `size` consecutive parts, whose lengths differ by one at most."""
    cuts = [start + part * n // size for part in range(size + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(cuts)]


def half_weights(n: int, device: torch.device | None = None) -> torch.Tensor:
    """Return how often each place of a real transform's last axis counts, (n // 2 + 1,): 1 or 2."""
    weights = torch.full((n // 2 + 1,), 2.0, dtype=torch.float64, device=device)
    # a number assigned to an index would be copied from the host, which can't be captured
    weights[:1].fill_(1.0)
    if n % 2 == 0:
        weights[-1:].fill_(1.0)
    return weights


class _Layout:
    """Who has which planes (first axis) and columns (second axis), and how they are cut into pieces."""

    def __init__(self, shape: list[int], mesh_id: int, like: torch.Tensor) -> None:
        self.mesh = mesh_by_id(mesh_id)
        self.shape, self.row = shape, shape[2] // 2 + 1
        self.real = like.dtype.to_real()
        self.planes, self.columns = (shares(n, self.mesh.size) for n in shape[:2])
        largest = -(-shape[0] * shape[1] * self.row // self.mesh.size) * self.real.to_complex().itemsize
        # of the mesh's shape only, so that all ranks agree
        self.n_pieces = max(1, -(-largest // _PIECE_BYTES["cuda" if like.is_cuda else "cpu"]))

    @property
    def my_planes(self) -> int:
        return length(self.planes[self.mesh.rank])

    @property
    def my_columns(self) -> int:
        return length(self.columns[self.mesh.rank])

    def pieces(self, part: slice, local: bool = False) -> list[slice]:
        """Cut a rank's places; `local` counts them from its first one."""
        return shares(length(part), self.n_pieces, 0 if local else part.start)

    def spectrum_like(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.shape[0], self.my_columns, self.row)
        return like.new_empty(shape, dtype=self.real.to_complex())

    def slab_like(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((self.my_planes, self.shape[1], self.shape[2]), dtype=self.real)


def length(part: slice) -> int:
    """Return how many places a part has."""
    n: int = part.stop - part.start
    return n


def _spectrum(slab: torch.Tensor, shape: list[int], mesh_id: int) -> torch.Tensor:
    """Return this rank's columns of the half-complex transform of the whole mesh (collective)."""
    at = _Layout(shape, mesh_id, slab)
    out = at.spectrum_like(slab)
    mine = at.pieces(at.planes[at.mesh.rank], local=True)
    theirs = [at.pieces(part) for part in at.planes]

    def sent(piece: int) -> list[torch.Tensor]:
        planes = slab[mine[piece]]
        if not planes.numel():
            return [out.new_empty((0, at.row))] * at.mesh.size
        block = torch.fft.rfft2(planes)
        return [block[:, part].reshape(-1, at.row) for part in at.columns]

    def received(piece: int) -> list[torch.Tensor]:
        return [out[part[piece]] for part in theirs]

    _transpose(at, sent, received)
    for part in shares(at.my_columns, at.n_pieces):
        if length(part):
            out[:, part] = torch.fft.fft(out[:, part], dim=0)
    return out


def _adjoint(columns: torch.Tensor, shape: list[int], mesh_id: int) -> torch.Tensor:
    """Return this rank's slab of the adjoint transform (collective)."""
    at = _Layout(shape, mesh_id, columns)
    half = columns.new_empty((at.my_planes, shape[1], at.row))
    mine = at.pieces(at.columns[at.mesh.rank], local=True)
    theirs = [at.pieces(part) for part in at.columns]

    def sent(piece: int) -> list[torch.Tensor]:
        part = columns[:, mine[piece]]
        if not part.numel():
            return [columns.new_empty((0, at.row))] * at.mesh.size
        block = torch.fft.ifft(part, dim=0, norm="forward")
        return [block[part].reshape(-1, at.row) for part in at.planes]

    def received(piece: int) -> list[torch.Tensor]:
        return [half[:, part[piece]] for part in theirs]

    _transpose(at, sent, received)
    # irfft adds what isn't stored, which the adjoint doesn't
    half[..., 1 : (shape[2] + 1) // 2] *= 0.5
    out = at.slab_like(columns)
    for part in shares(at.my_planes, at.n_pieces):
        if length(part):
            out[part] = torch.fft.irfft2(half[part], s=(shape[1], shape[2]), norm="forward")
    return out


def _transpose(
    at: _Layout,
    sent: Callable[[int], list[torch.Tensor]],
    received: Callable[[int], list[torch.Tensor]],
) -> None:
    """Send rows of each piece to the ranks, and store theirs (collective).

    Parameters
    ----------
    at : _Layout
    sent : callable
        Gives the rows of a piece for each rank, shape (n, row).
    received : callable
        Gives the places of a piece for what each rank sends.
    """
    under_way: list[tuple[int, Pending]] = []

    def store() -> None:
        piece, pending = under_way.pop(0)
        places = received(piece)
        rows = torch.view_as_complex(pending.wait()).split([p.numel() // at.row for p in places])
        for target, block in zip(places, rows, strict=True):
            target.copy_(block.view(target.shape))

    for piece in range(at.n_pieces):
        blocks = sent(piece)
        if at.mesh.size == 1:
            received(piece)[0].copy_(blocks[0].view(received(piece)[0].shape))
            continue
        # as real numbers: not every backend knows complex ones
        rows = torch.view_as_real(torch.cat(blocks))
        send = [block.shape[0] for block in blocks]
        receive = [place.numel() // at.row for place in received(piece)]
        under_way.append((piece, at.mesh.start_all_to_all_rows(rows, send, receive, kind="transpose")))
        if piece:
            store()
    while under_way:
        store()


spectrum_op = torch.library.custom_op("nvdd_pme::spectrum", _spectrum, mutates_args=())
adjoint_op = torch.library.custom_op("nvdd_pme::spectrum_adjoint", _adjoint, mutates_args=())


@spectrum_op.register_fake
def _(slab: torch.Tensor, shape: list[int], mesh_id: int) -> torch.Tensor:
    return _Layout(shape, mesh_id, slab).spectrum_like(slab)


@adjoint_op.register_fake
def _(columns: torch.Tensor, shape: list[int], mesh_id: int) -> torch.Tensor:
    return _Layout(shape, mesh_id, columns).slab_like(columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.rest = inputs[1:]


spectrum_op.register_autograd(lambda ctx, g: (adjoint_op(g, *ctx.rest), None, None), setup_context=_save)
adjoint_op.register_autograd(lambda ctx, g: (spectrum_op(g, *ctx.rest), None, None), setup_context=_save)


def spectrum(slab: torch.Tensor, shape: tuple[int, int, int], mesh: Mesh) -> torch.Tensor:
    """Transform a real mesh that is spread over ranks (collective, differentiable to any order).

    Parameters
    ----------
    slab : Tensor, shape (n_planes, shape[1], shape[2])
        This rank's planes, ``shares(shape[0], mesh.size)[mesh.rank]``.
    shape : tuple of int
        Points of the whole mesh.
    mesh : Mesh

    Returns
    -------
    Tensor, shape (shape[0], n_columns, shape[2] // 2 + 1), complex
        ``rfftn(whole)[:, shares(shape[1], mesh.size)[mesh.rank]]``.
    """
    result: torch.Tensor = spectrum_op(slab, list(shape), mesh.id)
    return result


def spectrum_adjoint(columns: torch.Tensor, shape: tuple[int, int, int], mesh: Mesh) -> torch.Tensor:
    """Return the adjoint of `spectrum`: columns to planes (collective, differentiable to any order)."""
    result: torch.Tensor = adjoint_op(columns, list(shape), mesh.id)
    return result
