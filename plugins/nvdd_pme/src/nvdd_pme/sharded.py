"""The reciprocal engine that keeps the mesh spread over ranks.

`ShardedMesh` sends each charge to the owners of the planes that it touches: usually one, at the edges of slabs two.
Each rank spreads what it received onto its own planes and transforms them with the others (`slabs`). The energy is a
sum over wave vectors (Parseval), of which each rank has its columns, so nothing has to be transformed back for it; the
gradient takes the adjoint of each step.

Invariant: every rank of the mesh calls the engine, also one without charges or planes.
Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.comm import Mesh, all_to_all_rows, received_splits
from nvdd_core.runtime import current_dd_context
from nvdd_core.tensor.exchanges import exchanged
from nvdd_pme.modes import Modes
from nvdd_pme.reciprocal import mesh_points
from nvdd_pme.slabs import length, shares, spectrum, spectrum_adjoint
from nvdd_pme.splines import gather, spread


class ShardedMesh:
    """A reciprocal engine whose memory on each rank falls as one over the number of ranks.

    Parameters
    ----------
    ranks : Mesh, optional
        By default those of the evaluation under way.
    """

    def __init__(self, ranks: Mesh | None = None) -> None:
        self._ranks = ranks
        self._alone: Mesh | None = None

    def __call__(
        self,
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *,
        alpha: float,
        mesh: tuple[int, int, int],
        order: int,
        potential: bool = False,
    ) -> torch.Tensor:
        """See `nvdd_pme.reciprocal.ReciprocalEngine`."""
        ranks = self.ranks(positions.device)
        points = mesh_points(positions, cell, mesh)
        route = Route.of(points, mesh[0], order, ranks)
        rows = route.there(torch.cat([points, charges[:, None]], dim=1))
        modes = Modes(mesh, order, alpha, shares(mesh[1], ranks.size)[ranks.rank].start)
        columns = spectrum(route.slab(rows, mesh, order), mesh, ranks)
        if not potential:
            return modes.energy(columns, cell)
        field = spectrum_adjoint(modes.field(columns, cell), mesh, ranks)
        return route.back(route.read(rows, field, order))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {"_ranks": None, "_alone": None}

    def ranks(self, device: torch.device) -> Mesh:
        """Return the ranks that evaluate together."""
        found = self._ranks or current_dd_context().mesh
        if found is None:
            found = self._alone = self._alone or Mesh.single(device)
        return found


@dataclass(frozen=True)
class Route:
    """The way of charges to the slabs that they touch, and back.

    A slab is padded by the planes that a charge at its edge reaches beyond it; those are other ranks' to fill. A charge
    goes once for each run of its planes within a slab or a periodic image of one.

    Attributes
    ----------
    ranks : Mesh
    n_rows : int
        Charges on this rank.
    row : Tensor, shape (sum(send),), int64
        Which charge goes, grouped by the rank that it goes to.
    shift : Tensor, shape (sum(send),), float64
        What is added to its first coordinate, so that it counts from the first plane of that rank's padded slab.
    send, receive : list of int
        Rows to and from each rank.
    n_planes, pad : int
        Planes of this rank, and those on each side.
    """

    ranks: Mesh
    n_rows: int
    row: torch.Tensor
    shift: torch.Tensor
    send: list[int]
    receive: list[int]
    n_planes: int
    pad: int

    @classmethod
    def of(cls, points: torch.Tensor, n: int, order: int, ranks: Mesh) -> Route:
        """Find the way of charges at `points` (mesh units) on a mesh of `n` planes (collective)."""
        device, n_rows = points.device, points.shape[0]
        if ranks.size == 1:  # all planes, periodic as they are
            every = torch.arange(n_rows, device=device)
            return cls(ranks, n_rows, every, points.new_zeros(n_rows), [n_rows], [n_rows], n, 0)
        slabs = shares(n, ranks.size)
        lengths = torch.tensor([length(slab) for slab in slabs], device=device)
        owner = torch.arange(ranks.size, device=device).repeat_interleave(lengths, output_size=n)
        reached = torch.arange(1 - order, 1, device=device)
        if order <= min(map(length, slabs)):  # two slabs at most, those of the first plane and the last
            reached = reached[[0, -1]]
        planes = points[:, :1].detach().floor().long() + reached
        image = planes.div(n, rounding_mode="floor")
        target = owner[planes - image * n]
        run = target + ranks.size * image
        begins = torch.ones_like(run, dtype=torch.bool)
        begins[:, 1:] = run[:, 1:] != run[:, :-1]
        target, by_rank = target[begins].sort(stable=True)
        first = torch.tensor([slab.start for slab in slabs], device=device)
        shift = order - 1 - first[target] - n * image[begins][by_rank]
        send = torch.bincount(target, minlength=ranks.size).tolist()
        return cls(
            ranks,
            n_rows,
            row=begins.nonzero()[:, 0][by_rank],
            shift=shift.to(points.dtype),
            send=send,
            receive=received_splits(send, ranks),
            n_planes=length(slabs[ranks.rank]),
            pad=order - 1,
        )

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows whose first column is the first coordinate (collective, differentiable)."""
        if self.ranks.size == 1:
            return rows
        rows = rows.index_select(0, self.row)
        rows = torch.cat([rows[:, :1] + self.shift[:, None], rows[:, 1:]], dim=1)
        return exchanged(lambda x: all_to_all_rows(x, self.send, self.receive, self.ranks), rows)

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """Sum what slabs read for each charge (n,) on the charge's rank (collective, differentiable)."""
        if self.ranks.size == 1:
            return values
        values = exchanged(lambda x: all_to_all_rows(x, self.receive, self.send, self.ranks), values)
        return values.new_zeros(self.n_rows).index_add(0, self.row, values)

    def slab(self, rows: torch.Tensor, mesh: tuple[int, int, int], order: int) -> torch.Tensor:
        """Return this rank's planes with the charges of `rows` on them."""
        padded = (self.n_planes + 2 * self.pad, mesh[1], mesh[2])
        return spread(rows[:, :3], rows[:, 3], padded, order)[self.pad : self.pad + self.n_planes]

    def read(self, rows: torch.Tensor, slab: torch.Tensor, order: int) -> torch.Tensor:
        """Return the slab read at the charges of `rows`: the transpose of `slab`."""
        if self.pad:
            edge = slab.new_zeros((self.pad, *slab.shape[1:]))
            slab = torch.cat([edge, slab, edge])
        return gather(rows[:, :3], slab, order)
