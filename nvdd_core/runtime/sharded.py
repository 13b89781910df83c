"""The owned rows of one rank, and how they come from and go back to one place.

`ShardedBatch.scatter` streams a batch from rank 0 in blocks, so no other rank ever holds more than its share;
`iter_blocks` streams it back in the order of the source, so rank 0 needn't hold all rows to write them.

Invariant: over all ranks every row exists once; `version` changes whenever rows move or are reordered.
Layer: runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from nvdd_core.comm import Mesh, agreed
from nvdd_core.errors import InputError
from nvdd_core.partition import RowPacker
from nvdd_core.runtime.batch import Batch
from nvdd_core.tensor import version_of

_BLOCK_ROWS = 65_536
_VERSIONS = itertools.count(1)  # one for the process, so that two batches never share a version
_CORE = ("positions", "velocities", "numbers", "masses", "system", "ids")
_FIELD = "\0field "  # no file can hold such a name


def row_name(field_name: str) -> str:
    """Return the name in `ShardedBatch.rows` of a field; it differs where a file has a column called ``ids``, say."""
    return _FIELD + field_name if field_name in _CORE else field_name


def field_name(row_name: str) -> str:
    """Undo `row_name`."""
    return row_name.removeprefix(_FIELD)


class Contents:
    """Tensors as they were at one moment; holds on to them, so that none is taken for one that is gone.

    Parameters
    ----------
    tensors : sequence of Tensor
    often_changed : sequence of Tensor
        Those that people change. On a CPU their values are compared, so that changes by numpy or ``.data`` are seen.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], often_changed: Sequence[torch.Tensor]) -> None:
        self._seen = [(t, version_of(t)) for t in (*tensors, *often_changed)]
        self._values = [(t, t.clone()) for t in often_changed if t.device.type == "cpu"]

    def same(self, tensors: Sequence[torch.Tensor], often_changed: Sequence[torch.Tensor]) -> bool:
        """Tell whether nothing was replaced or changed in place since; no host synchronisation."""
        now = (*tensors, *often_changed)
        return (
            len(self._seen) == len(now)
            and all(t is n and v == version_of(n) for (t, v), n in zip(self._seen, now, strict=True))
            and all(_equal(t, value) for t, value in self._values)
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether values are equal, where none is a number, too."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass
class ShardedBatch:
    """One rank's share of a batch.

    Attributes
    ----------
    mesh : Mesh
    n_global : int
        Rows over all ranks.
    rows : dict of str to Tensor, each (n_owned, *F)
        positions (float64, Angstrom, unfolded), velocities (float64, Angstrom/fs), numbers, masses, system, ids
        and every further field.
    cell : Tensor, shape (S, 3, 3), float64; pbc : Tensor, shape (S, 3), bool
        The same on every rank.
    has_velocities : bool
        Whether the source had velocities (else they are zero).
    version : int
        Changes when rows change place.
    extra : tuple of str
        Names in `rows` of the fields, see `row_name`.
    """

    mesh: Mesh
    n_global: int
    rows: dict[str, torch.Tensor]
    cell: torch.Tensor
    pbc: torch.Tensor
    has_velocities: bool
    version: int = field(default_factory=lambda: next(_VERSIONS))
    extra: tuple[str, ...] = field(default=())

    @property
    def positions(self) -> torch.Tensor:
        """Unfolded positions (n_owned, 3), float64, Angstrom."""
        return self.rows["positions"]

    @property
    def velocities(self) -> torch.Tensor:
        """Velocities (n_owned, 3), float64, Angstrom/fs."""
        return self.rows["velocities"]

    @property
    def numbers(self) -> torch.Tensor:
        """Atomic numbers (n_owned,), int64."""
        return self.rows["numbers"]

    @property
    def masses(self) -> torch.Tensor:
        """Masses (n_owned,), float64, amu."""
        return self.rows["masses"]

    @property
    def system(self) -> torch.Tensor:
        """System of each row (n_owned,), int64."""
        return self.rows["system"]

    @property
    def ids(self) -> torch.Tensor:
        """Global row ids (n_owned,), int64."""
        return self.rows["ids"]

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """Further per-row data by name."""
        return {field_name(name): self.rows[name] for name in self.extra}

    def fields_with_gradients(self, mesh: Mesh) -> dict[str, torch.Tensor]:
        """Return the fields that require gradients, those of the same names on every rank (collective).

        Raises
        ------
        InputError
            On every rank, where one does on some ranks only.
        """
        fields = self.fields
        names = sorted(fields)
        if not names:
            return {}
        told = mesh.all_gather_ints([int(fields[name].requires_grad) for name in names])
        for name, flags in zip(names, zip(*told, strict=True), strict=True):
            if len(set(flags)) > 1:
                raise InputError(
                    f"field '{name}' requires gradients on rank {flags.index(1)}, not on rank {flags.index(0)}; set "
                    "requires_grad alike on every rank"
                )
        return {name: fields[name] for name, flag in zip(names, told[0], strict=True) if flag}

    @property
    def n_owned(self) -> int:
        """Rows this rank owns."""
        return int(self.ids.shape[0])

    @property
    def n_systems(self) -> int:
        """Number of systems."""
        return int(self.cell.shape[0])

    def replace_rows(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Take new rows (all names at once) and count a new version."""
        self.rows = {name: rows[name] for name in self.rows}
        self.version = next(_VERSIONS)

    def contents(self) -> Contents:
        """Return what `has` compares."""
        return Contents(*self._copied())

    def has(self, contents: Contents) -> bool:
        """Tell whether nothing that a domain copies was replaced or changed in place since; no host synchronisation."""
        return contents.same(*self._copied())

    def _copied(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        often_changed = [self.cell, self.pbc, *(self.rows[name] for name in self.extra)]
        return [self.numbers, self.system, self.ids], often_changed

    @classmethod
    def scatter(cls, batch: Batch | None, mesh: Mesh) -> ShardedBatch:
        """Spread a batch that rank 0 holds over all ranks, in blocks of ids (collective).

        Parameters
        ----------
        batch : Batch or None
            The batch on rank 0; ignored elsewhere.
        mesh : Mesh

        Raises
        ------
        InputError
            On every rank, if the batch can't be used (see `Batch.validate`).
        """
        with agreed(mesh):
            if mesh.rank == 0:
                if batch is None:
                    raise InputError("rank 0 has no batch to scatter")
                batch.validate()
        source = _as_rows(batch) if mesh.rank == 0 and batch is not None else None
        head = None
        if source is not None and batch is not None:
            # fresh tensors: pickling a view would send the whole storage behind it
            empty = {name: t.new_empty((0, *t.shape[1:])) for name, t in source.items()}
            head = (len(batch), batch.cell.clone(), batch.pbc.clone(), batch.velocities is not None, empty)
        n, cell, pbc, moving, layout = mesh.broadcast_object(head)
        packer = RowPacker(layout)
        pieces = []
        for start in range(0, n, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, n)
            pieces.append(_send_block(source, packer, start, stop, n, mesh))
        rows = packer.unpack(torch.cat(pieces))
        rows = {name: t.to(mesh.device) for name, t in rows.items()}
        extra = tuple(name for name in rows if name not in _CORE)
        return cls(mesh, n, rows, cell.to(mesh.device), pbc.to(mesh.device), moving, extra=extra)

    def iter_blocks(
        self, block_rows: int = _BLOCK_ROWS, names: tuple[str, ...] = ()
    ) -> Iterator[Batch | None]:
        """Stream all rows to rank 0 in order of ids (collective; every rank must exhaust it).

        Parameters
        ----------
        block_rows : int
            Rows in a block.
        names : tuple of str
            Further per-row tensors of `rows` to carry; default: all fields.

        Yields
        ------
        Batch on rank 0, None elsewhere.
        """
        carried = (*_CORE, *(names or self.extra))
        ids, order = torch.sort(self.ids)
        edges = torch.arange(0, self.n_global + block_rows, block_rows, device=ids.device)
        cuts = torch.searchsorted(ids, edges).tolist()
        counts = self.mesh.all_gather_ints([b - a for a, b in pairwise(cuts)])
        packer = RowPacker({name: self.rows[name] for name in carried})
        for k in range(len(cuts) - 1):
            data = packer.pack(self.rows, order[cuts[k] : cuts[k + 1]])
            send = [data.shape[0] if r == 0 else 0 for r in range(self.mesh.size)]
            recv = [row[k] if self.mesh.rank == 0 else 0 for row in counts]
            arrived = self.mesh.all_to_all_rows(data, send, recv, kind="gather")
            yield self._block(packer.unpack(arrived.cpu())) if self.mesh.rank == 0 else None

    def _block(self, rows: dict[str, torch.Tensor]) -> Batch:
        order = torch.argsort(rows["ids"])
        rows = {name: t[order] for name, t in rows.items()}
        core = {name: rows.pop(name) for name in _CORE}
        fields = {field_name(name): t for name, t in rows.items()}
        return Batch(cell=self.cell.cpu(), pbc=self.pbc.cpu(), fields=fields, **core)

    def gather(self) -> Batch | None:
        """Return the whole batch, ordered by id, on rank 0 and None elsewhere (collective; holds N rows)."""
        batch = None
        for block in self.iter_blocks(max(self.n_global, 1)):
            batch = block
        return batch


def _as_rows(batch: Batch) -> dict[str, torch.Tensor]:
    velocities = torch.zeros_like(batch.positions) if batch.velocities is None else batch.velocities
    rows = {
        "positions": batch.positions,
        "velocities": velocities,
        "numbers": batch.numbers,
        "masses": batch.masses,
        "system": batch.system,
        "ids": batch.ids,
    }
    return {**rows, **{row_name(name): t for name, t in batch.fields.items()}}


def _send_block(
    source: dict[str, torch.Tensor] | None, packer: RowPacker, start: int, stop: int, n: int, mesh: Mesh
) -> torch.Tensor:
    """Send rows [start, stop) from rank 0 to the ranks whose blocks of ids hold them."""
    edges = [min(max(r * n // mesh.size, start), stop) for r in range(mesh.size + 1)]
    share = [b - a for a, b in pairwise(edges)]
    if source is not None:
        data = packer.pack({name: t[start:stop] for name, t in source.items()})
        send = share
    else:
        data = packer.pack(packer.empty())
        send = [0] * mesh.size
    recv = [share[mesh.rank] if r == 0 else 0 for r in range(mesh.size)]
    return mesh.all_to_all_rows(data, send, recv, kind="scatter")
