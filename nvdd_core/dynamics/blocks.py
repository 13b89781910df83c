"""Rows of all ranks, brought to rank 0 block by block in the order of their ids.

`iter_row_blocks` is how everything that is written of a sharded system leaves the ranks: trajectory frames
and checkpoints. Rank 0 holds one block at a time, never all rows.

Invariant: what rank 0 sees (ids 0, 1, 2, ... with bit-identical values) doesn't depend on how the rows are
spread.
Layer: dynamics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError
from nvdd_core.partition import RowPacker

DEFAULT_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of the whole system on the CPU of rank 0.

    Attributes
    ----------
    start : int
        Global id of the first row.
    fields : Mapping[str, Tensor]
        Per-row values, each of shape (m, *F), rows in the order of their ids.
    """

    start: int
    fields: Mapping[str, torch.Tensor]

    @property
    def stop(self) -> int:
        """Global id after the last row."""
        return self.start + next(iter(self.fields.values())).shape[0]


def iter_row_blocks(
    mesh: Mesh,
    ids: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    n_rows: int,
    block_rows: int = DEFAULT_BLOCK_ROWS,
) -> Iterator[RowBlock]:
    """Yield blocks of rows in id order on rank 0, nothing elsewhere (collective: exhaust it on every rank).

    Parameters
    ----------
    mesh : Mesh
        The group of ranks.
    ids : Tensor, shape (n,), int64
        Global ids of this rank's rows; over all ranks each of 0 ... n_rows - 1 once.
    fields : Mapping[str, Tensor]
        Per-row values of this rank's rows, each (n, *F) of any dtype; the same names, trailing shapes and
        dtypes on every rank, also on one without rows.
    n_rows : int
        Rows over all ranks.
    block_rows : int
        Rows per block.

    Raises
    ------
    DistributedError
        On every rank, if the ids aren't 0 ... n_rows - 1; on rank 0, if one occurs twice.
    """
    sorted_ids, order = torch.sort(ids)
    limits = torch.arange(0, n_rows + block_rows, block_rows, device=ids.device).clamp_(max=n_rows)
    bounds: list[int] = torch.searchsorted(sorted_ids, limits).tolist()
    counts = [bounds[k + 1] - bounds[k] for k in range(len(bounds) - 1)]
    per_rank = mesh.all_gather_ints([*counts, ids.shape[0]])
    _check_counts(per_rank, n_rows, block_rows)
    # widest elements first, so that every field is aligned within a packed row
    widest = sorted(fields.items(), key=lambda entry: -entry[1].element_size())
    everything = {"": ids, **dict(widest)}
    packer = RowPacker(everything)
    for k in range(len(counts)):
        rows = order[bounds[k] : bounds[k + 1]]
        send = [counts[k]] + [0] * (mesh.size - 1)
        receive = [row[k] for row in per_rank] if mesh.rank == 0 else [0] * mesh.size
        packed = mesh.all_to_all_rows(packer.pack(everything, rows), send, receive, kind="gather_blocks")
        if mesh.rank == 0:
            yield _sorted_block(packer.unpack(packed.cpu()), k * block_rows)


def _check_counts(per_rank: list[list[int]], n_rows: int, block_rows: int) -> None:
    """Compare each block's rows over all ranks with what it must have; every rank sees the same numbers."""
    for k in range(len(per_rank[0]) - 1):
        found = sum(row[k] for row in per_rank)
        expected = min(block_rows, n_rows - k * block_rows)
        if found != expected:
            raise DistributedError(
                f"rows with ids {k * block_rows} to {k * block_rows + expected - 1}: "
                f"found {found} on all ranks together, expected {expected}; "
                "rows were lost or doubled when they moved between ranks"
            )
    total = sum(row[-1] for row in per_rank)
    if total != n_rows:
        raise DistributedError(
            f"{total} rows on all ranks together, expected {n_rows}, with ids 0 to {n_rows - 1}"
        )


def _sorted_block(fields: dict[str, torch.Tensor], start: int) -> RowBlock:
    ids = fields.pop("")
    order = torch.argsort(ids)
    m = ids.shape[0]
    wrong = torch.nonzero(ids[order] != torch.arange(start, start + m))
    if wrong.numel():
        raise DistributedError(
            f"row id {int(ids[order][wrong[0]])} occurs twice or out of place among ids {start} to "
            f"{start + m - 1}; rows were lost or doubled when they moved between ranks"
        )
    return RowBlock(start, {name: field[order] for name, field in fields.items()})
