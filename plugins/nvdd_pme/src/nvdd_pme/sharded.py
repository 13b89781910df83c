"""The reciprocal engine that keeps the mesh spread over ranks.

`ShardedMesh` sends each charge to the owners of the planes that it may touch before rows have moved so far that there
is a new neighbour list: usually one, at the edges of slabs two. So where charges go is found once a list.
Each rank spreads what it received onto its own planes and transforms them with the others (`slabs`). The energy is a
sum over wave vectors (Parseval), of which each rank has its columns, so nothing has to be transformed back for it; the
gradient takes the adjoint of each step.

Invariant: every rank of the mesh calls the engine, also one without charges or planes.
Layer: plugin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.comm import Mesh, all_to_all_rows, received_splits
from nvdd_core.runtime import current_dd_context
from nvdd_core.tensor.exchanges import exchanged
from nvdd_pme.influence import inverted
from nvdd_pme.modes import Modes
from nvdd_pme.reciprocal import mesh_points
from nvdd_pme.slabs import length, shares, spectrum, spectrum_adjoint
from nvdd_pme.splines import gather, spread

_ROUNDING = 1e-2
"""Planes: what a position in float32 may be off."""


class ShardedMesh:
    """A reciprocal engine whose memory on each rank falls as one over the number of ranks.

    The first call decides where charges go, so an object is for one cell and one neighbour list. A charge that moves
    further than the list allows makes the energy NaN, upon which ranks make a new list.

    Parameters
    ----------
    ranks : Mesh, optional
        By default those of the evaluation under way.
    """

    def __init__(self, ranks: Mesh | None = None) -> None:
        self._ranks = ranks
        self._alone: Mesh | None = None
        self._route: Route | None = None

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
        if self._route is None:
            self._route = Route.of(
                points, _planes(current_dd_context().may_move, cell, mesh[0]), mesh[0], order, ranks
            )
        route = self._route
        rows = route.there(points, charges)
        modes = Modes(mesh, order, alpha, shares(mesh[1], ranks.size)[ranks.rank].start)
        columns = spectrum(route.slab(rows, mesh, order), mesh, ranks)
        if not potential:
            return modes.energy(columns, cell)
        field = spectrum_adjoint(modes.field(columns, cell), mesh, ranks)
        return route.back(route.read(rows, field, order))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {"_ranks": None, "_alone": None, "_route": None}

    def ranks(self, device: torch.device) -> Mesh:
        """Return the ranks that evaluate together."""
        found = self._ranks or current_dd_context().mesh
        if found is None:
            found = self._alone = self._alone or Mesh.single(device)
        return found


def _planes(distance: float, cell: torch.Tensor, n: int) -> float:
    """Return over how many of a cell's `n` planes a distance (Angstrom) reaches; reads back from a device."""
    return distance * n * float(torch.linalg.vector_norm(inverted(cell.detach())[:, 0]))


@dataclass(frozen=True)
class Route:
    """The way of charges to the slabs that they may touch, and back.

    A slab is padded by the planes that a charge at its edge reaches beyond it; those are other ranks' to fill. A charge
    goes once for each run of planes, within a slab or a periodic image of one, that it may touch. While it touches none
    of them it counts for nothing there: a spline is smooth where it ends, so derivatives stay right.

    Attributes
    ----------
    ranks : Mesh
    home : Tensor, shape (n_rows,), float64
        First coordinate of this rank's charges, about which the way is good.
    room : float
        How far they may be from there, in planes.
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
    home: torch.Tensor
    room: float
    row: torch.Tensor
    shift: torch.Tensor
    send: list[int]
    receive: list[int]
    n_planes: int
    pad: int

    @classmethod
    def of(cls, points: torch.Tensor, room: float, n: int, order: int, ranks: Mesh) -> Route:
        """Find the way of charges within `room` planes of `points` (mesh units, `n` planes) (collective)."""
        home, room = points[:, 0].detach().nan_to_num(0.0, 0.0, 0.0), room + _ROUNDING
        if ranks.size == 1:  # all planes, periodic as they are
            nothing = home.new_empty(0)
            return cls(ranks, home, room, nothing.long(), nothing, [home.shape[0]], [home.shape[0]], n, 0)
        slabs = shares(n, ranks.size)
        lengths = torch.tensor([length(slab) for slab in slabs], device=home.device)
        owner = torch.arange(ranks.size, device=home.device).repeat_interleave(lengths, output_size=n)
        planes = _touched(home, room, order, min(map(length, slabs)))
        image = planes.div(n, rounding_mode="floor")
        target = owner[planes - image * n]
        run = target + ranks.size * image
        begins = torch.ones_like(run, dtype=torch.bool)
        begins[:, 1:] = run[:, 1:] != run[:, :-1]
        target, by_rank = target[begins].sort(stable=True)
        first = torch.tensor([slab.start for slab in slabs], device=home.device)
        shift = order - 1 - first[target] - n * image[begins][by_rank]
        send = torch.bincount(target, minlength=ranks.size).tolist()
        return cls(
            ranks,
            home,
            room,
            row=begins.nonzero()[:, 0][by_rank],
            shift=shift.to(home.dtype),
            send=send,
            receive=received_splits(send, ranks),
            n_planes=length(slabs[ranks.rank]),
            pad=order - 1,
        )

    def there(self, points: torch.Tensor, charges: torch.Tensor) -> torch.Tensor:
        """Send points and charges as rows of four (collective, differentiable)."""
        if self.ranks.size == 1:
            return torch.cat([points, charges[:, None]], dim=1)
        # One that is too far away, or nowhere, mustn't be missed: it stays and its charge is not a number.
        lost = ~((points[:, 0].detach() - self.home).abs() <= self.room)
        x, charges = torch.where(lost, self.home, points[:, 0]), charges.masked_fill(lost, torch.nan)
        rows = torch.cat([x[:, None], points[:, 1:], charges[:, None]], dim=1).index_select(0, self.row)
        rows = rows + torch.nn.functional.pad(self.shift[:, None], (0, 3))
        return exchanged(lambda x: all_to_all_rows(x, self.send, self.receive, self.ranks), rows)

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """Sum what slabs read for each charge (n,) on the charge's rank (collective, differentiable)."""
        if self.ranks.size == 1:
            return values
        values = exchanged(lambda x: all_to_all_rows(x, self.receive, self.send, self.ranks), values)
        return values.new_zeros(self.home.shape[0]).index_add(0, self.row, values)

    def slab(self, rows: torch.Tensor, mesh: tuple[int, int, int], order: int) -> torch.Tensor:
        """Return this rank's planes with the charges of `rows` on them."""
        points, charges = rows[:, :3], rows[:, 3]
        if self.pad:
            away = self._away(points)
            points, charges = points.masked_fill(away[:, None], self.pad), charges.masked_fill(away, 0.0)
        padded = (self.n_planes + 2 * self.pad, mesh[1], mesh[2])
        return spread(points, charges, padded, order)[self.pad : self.pad + self.n_planes]

    def read(self, rows: torch.Tensor, slab: torch.Tensor, order: int) -> torch.Tensor:
        """Return the slab read at the charges of `rows`: the transpose of `slab`."""
        points = rows[:, :3]
        if not self.pad:
            return gather(points, slab, order)
        away = self._away(points)
        edge = slab.new_zeros((self.pad, *slab.shape[1:]))
        read = gather(points.masked_fill(away[:, None], self.pad), torch.cat([edge, slab, edge]), order)
        return read.masked_fill(away, 0.0)

    def _away(self, points: torch.Tensor) -> torch.Tensor:
        """Tell which points touch no plane of this rank."""
        x = points[:, 0].detach()
        return (x < self.pad) | (x >= self.n_planes + 2 * self.pad)


def _touched(home: torch.Tensor, room: float, order: int, shortest: int) -> torch.Tensor:
    """Return the planes that charges within `room` of `home` touch, in order, some repeatedly (n, k).

    Where slabs have as many planes, the first and the last will do: a charge touches two slabs at most.
    """
    low, high = (home - room).floor().long() - (order - 1), (home + room).floor().long()
    most = order + math.ceil(2.0 * room)
    if most <= shortest:
        return torch.stack([low, high], dim=1)
    steps = torch.arange(most, device=home.device)
    return torch.minimum(low[:, None] + steps, high[:, None])
