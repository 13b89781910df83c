"""Moves rows to the ranks that own them.

`reshard_by_destination` moves any set of per-row fields at once: fields are packed into one byte matrix, so a
migration costs one exchange however many fields a row carries.

Invariant: rows arrive whole; the number of rows over all ranks doesn't change.
Layer: partition.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nvdd_core.comm import Mesh


class RowPacker:
    """Packs named per-row tensors into one (n, bytes) uint8 matrix and back."""

    def __init__(self, fields: Mapping[str, torch.Tensor]) -> None:
        self._layout = [(name, t.dtype, tuple(t.shape[1:])) for name, t in fields.items()]
        self._bytes = [_row_bytes(t) for t in fields.values()]

    def pack(self, fields: Mapping[str, torch.Tensor], index: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows `index` of every field as bytes, shape (n, total bytes)."""
        parts = []
        for name, _, _ in self._layout:
            rows = fields[name] if index is None else fields[name].index_select(0, index)
            parts.append(_as_bytes(rows))
        return torch.cat(parts, dim=1)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return every field without rows."""
        return {name: torch.empty((0, *shape), dtype=dtype) for name, dtype, shape in self._layout}

    def unpack(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of a byte matrix, each (n, *F)."""
        out: dict[str, torch.Tensor] = {}
        for (name, dtype, shape), part in zip(self._layout, data.split(self._bytes, dim=1), strict=True):
            # a copy, also of a single row: a view in another dtype needs an aligned start
            rows = part.clone(memory_format=torch.contiguous_format).view(-1)
            n = data.shape[0]
            out[name] = (
                rows.view(dtype).view(n, *shape) if rows.numel() else rows.new_empty((n, *shape), dtype=dtype)
            )
        return out


def _row_bytes(t: torch.Tensor) -> int:
    per_row = 1
    for size in t.shape[1:]:
        per_row *= size
    return per_row * t.element_size()


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    n = rows.shape[0]
    if rows.numel() == 0:
        return torch.empty((n, _row_bytes(rows)), dtype=torch.uint8, device=rows.device)
    return rows.contiguous().view(n, -1).view(torch.uint8)


def reshard_by_destination(
    fields: Mapping[str, torch.Tensor], destination: torch.Tensor, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Move rows to their destination ranks (collective).

    Parameters
    ----------
    fields : mapping of str to Tensor, each of shape (n, *F)
        All ranks give the same names, dtypes and trailing shapes in the same order.
    destination : Tensor, shape (n,), int64
        Rank that owns each row from now on.
    mesh : Mesh

    Returns
    -------
    dict of str to Tensor, each of shape (n_new, *F)
        Rows that stay come first, in their order, then those received, by rank.
    """
    if mesh.size == 1:
        return dict(fields)
    counts = torch.bincount(destination, minlength=mesh.size).cpu().tolist()
    table = mesh.all_gather_ints(counts)
    if all(table[a][b] == 0 for a in range(mesh.size) for b in range(mesh.size) if a != b):
        return dict(fields)
    stay = (destination == mesh.rank).nonzero()[:, 0]
    leave = (destination != mesh.rank).nonzero()[:, 0]
    leave = leave[torch.argsort(destination[leave], stable=True)]
    packer = RowPacker(fields)
    send = [0 if r == mesh.rank else counts[r] for r in range(mesh.size)]
    recv = [0 if r == mesh.rank else table[r][mesh.rank] for r in range(mesh.size)]
    arrived = packer.unpack(mesh.all_to_all_rows(packer.pack(fields, leave), send, recv, kind="migrate"))
    return {name: torch.cat([t.index_select(0, stay), arrived[name]]) for name, t in fields.items()}
