"""A rank's domain: its rows, its ghosts and their neighbour list, from one rebuild to the next.

`DomainBuilder.build` moves rows to their owners, chooses ghosts, lists neighbours, drops ghosts that no edge uses
and makes the halo plan. Everything that an evaluation needs and that doesn't change until the next rebuild is in
`Domain`.

Invariant: a build is collective and decides everything from data that all ranks share.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.errors import InputError, NumericalError
from nvdd_core.graph import NeighborList, build_neighbors
from nvdd_core.partition import (
    Bisection,
    Bounds,
    Box,
    Frame,
    Grid,
    IndexBlocks,
    Partitioner,
    RowPacker,
    Rows,
    all_remote_rows,
    ghost_destinations,
    reshard_by_destination,
    segment_bounds,
)
from nvdd_core.runtime.config import DomainConfig
from nvdd_core.runtime.near_edges import NearEdges
from nvdd_core.runtime.sharded import Contents, ShardedBatch, field_name
from nvdd_core.runtime.timer import PhaseTimer
from nvdd_core.spec import StrategyKind

# Listing an image takes some 50 bytes, and each atom has edges to a good part of its images.
_MOST_IMAGES, _MOST_IMAGES_OF_ATOM = 1e9, 1e6

# A column of the user's may have any name that a file can hold, so names of our own begin with what none can.
_FOLDED, _FRAC = "\0folded", "\0frac"


@dataclass(frozen=True)
class Reach:
    """How far a model looks: its cutoff (Angstrom), its layers and the form of list that it takes."""

    cutoff: float
    layers: int
    neighbor_form: str


@dataclass(frozen=True)
class Domain:
    """What stays fixed between two rebuilds.

    Attributes
    ----------
    version : int
        `ShardedBatch.version` that this belongs to.
    box : Box
    contents : Contents
        `ShardedBatch.contents` at the rebuild.
    cell : Tensor, shape (S, 3, 3); pbc : Tensor, shape (S, 3)
        The batch's own at the rebuild.
    plan : HaloPlan
    neighbors : NeighborList
    offset : Tensor, shape (n_owned, 3), float64
        Raw position minus folded position.
    reference : Tensor, shape (n_owned, 3), float64
        Raw positions at the rebuild.
    numbers, system, ids : Tensor, shape (n_local,), int64
    fields : dict of str to Tensor, each (n_local, *F)
    parts : tuple of NeighborList
        Where there are several reaches, the list of each.
    near : NearEdges
        What models chose from the lists.
    real : Tensor, shape (n_owned,), bool, or None
        Which owned rows are rows of the batch; None: all are.
    """

    version: int
    box: Box
    contents: Contents
    cell: torch.Tensor
    pbc: torch.Tensor
    plan: HaloPlan
    neighbors: NeighborList
    offset: torch.Tensor
    reference: torch.Tensor
    numbers: torch.Tensor
    system: torch.Tensor
    ids: torch.Tensor
    fields: dict[str, torch.Tensor]
    parts: tuple[NeighborList, ...] = ()
    near: NearEdges = field(default_factory=NearEdges)
    real: torch.Tensor | None = None


class DomainBuilder:
    """Builds domains for the reach of one model, or for those of several that share ghosts and edges."""

    def __init__(self, config: DomainConfig, mesh: Mesh, reaches: Sequence[Reach], timer: PhaseTimer) -> None:
        self.config, self.mesh, self.timer = config, mesh, timer
        self.list_cutoff = config.list_cutoff(max(reach.cutoff for reach in reaches))
        needed = [config.width(reach.cutoff, reach.layers) for reach in reaches]
        self.width = max(needed)
        self._reaches = tuple(reaches)
        # a half list serves both: the full one is derived from it
        self._form = "half" if any(reach.neighbor_form == "half" for reach in reaches) else "full"
        self._partitioner: Partitioner | None = None
        self._shape = (0, 0)
        if config.grid_dims is not None:
            Grid(config.grid_dims, mesh.size)

    def build(self, sharded: ShardedBatch, *, anew: bool = False) -> Domain:
        """Bring `sharded` up to date in place and return its new domain (collective).

        With `anew`, owners and the order of rows depend on the rows themselves alone, not on what was before, so
        a restart continues with the same bits.

        Raises
        ------
        NumericalError
            On every rank, if a position is not finite; names the atom.
        InputError
            On every rank, if lists would have to reach over more periodic images than memory holds.
        """
        with self.timer.phase("rebuild", rare=True):
            box = Box.from_cells(sharded.cell, sharded.pbc, "system")
            self._check_images(box, sharded)
            frame, counts = self._frame(sharded, box)
            if anew:
                self._partitioner = None
            frac = self._migrate(sharded, frame, counts, by_id=anew)
            frac, offset = frame.fold(sharded.positions, sharded.system)
            send_index, send_splits = self._ghosts(sharded, frac, frame)
            table = self.mesh.all_gather_ints(send_splits)
            recv_splits = tuple(row[self.mesh.rank] for row in table)
            local = self._exchange_static(
                sharded, frac, sharded.positions - offset, send_index, send_splits, recv_splits
            )
        with self.timer.phase("neighbor_list", rare=True):
            neighbors = self._neighbors(local, frame, sharded.n_owned)
        with self.timer.phase("rebuild", rare=True):
            keep = neighbors.used_rows()
            if self.config.strategy is StrategyKind.GRAPH_PARTITION:
                keep = torch.ones_like(keep)  # every remote row is a ghost, whether our list uses it or not
            send_index, send_splits, recv_splits = self._prune(
                keep[sharded.n_owned :], send_index, send_splits, recv_splits
            )
            if not bool(keep.all()):
                local = {name: t[keep] for name, t in local.items()}
                neighbors = neighbors.compact(keep)
            plan = HaloPlan(self.mesh, sharded.n_owned, send_index, send_splits, recv_splits)
        parts = self._parts(neighbors, local, box)
        return Domain(
            version=sharded.version,
            box=box,
            contents=sharded.contents(),
            cell=sharded.cell.clone(),
            pbc=sharded.pbc.clone(),
            plan=plan,
            neighbors=neighbors,
            offset=offset,
            reference=sharded.positions.clone(),
            numbers=local["numbers"],
            system=local["system"],
            ids=local["ids"],
            fields={field_name(name): local[name] for name in sharded.extra},
            parts=parts,
            near=NearEdges((neighbors, *parts)),
        )

    def _parts(
        self, neighbors: NeighborList, local: dict[str, torch.Tensor], box: Box
    ) -> tuple[NeighborList, ...]:
        """Return the list of each reach, out of the one that serves all; equal reaches share theirs."""
        if len(self._reaches) == 1:
            return ()
        with self.timer.phase("neighbor_list", rare=True):
            points = neighbors.extend(local[_FOLDED], box.cell, local["system"])
            found: dict[tuple[float, str], NeighborList] = {}
            for reach in self._reaches:
                length = self.config.list_cutoff(reach.cutoff)
                key = (length, reach.neighbor_form)
                if key not in found:
                    part = neighbors if length == self.list_cutoff else neighbors.within(points, length)
                    found[key] = part if reach.neighbor_form == self._form else part.full()
        return tuple(
            found[self.config.list_cutoff(reach.cutoff), reach.neighbor_form] for reach in self._reaches
        )

    def _check_images(self, box: Box, sharded: ShardedBatch) -> None:
        """Refuse a reach over so many periodic images that listing them would take all memory.

        Decided from what all ranks share. Of several systems it isn't known here which has how many rows.
        """
        turns = torch.where(box.periodic, 2.0 * self.list_cutoff / box.heights + 1.0, 1.0).prod(1)
        rows = sharded.n_global / self.mesh.size if sharded.n_systems == 1 else 1.0
        most = float(turns.max())
        if not (most * max(rows, 1.0) <= _MOST_IMAGES and most <= _MOST_IMAGES_OF_ATOM):
            raise InputError(
                f"the cutoff with the skin, {self.list_cutoff:g} A, reaches over {most:.1e} periodic images of each "
                f"atom (system {int(turns.argmax())}), more than fit in memory; is the cell right? Else give a "
                "smaller cutoff or skin"
            )

    def _frame(self, sharded: ShardedBatch, box: Box) -> tuple[Frame, list[int]]:
        """Agree on the extent of the rows, on their counts, and that all positions are finite (collective)."""
        n_systems = sharded.n_systems
        bad = (~torch.isfinite(sharded.positions).all(1)).nonzero()[:, 0]
        first = float(sharded.ids[bad].min()) if bad.numel() else -1.0
        low, high = segment_bounds(
            box.fractional(sharded.positions.detach(), sharded.system), sharded.system, n_systems
        )
        head = torch.tensor([float(bad.numel()), first, float(sharded.n_owned)], dtype=torch.float64)
        cells = torch.cat([sharded.cell.cpu().flatten(), sharded.pbc.cpu().double().flatten()])
        told = self.mesh.all_gather_vector(
            torch.cat([head, cells, low.cpu().flatten(), high.cpu().flatten()])
        )
        given = told[:, 3 : 3 + cells.numel()]
        if not torch.equal(given, given[:1].expand_as(given)):
            other = int((given != given[0]).any(1).nonzero()[0, 0])
            raise InputError(
                f"rank {other} has another cell or pbc than rank 0; change them alike on every rank"
            )
        if float(told[:, 0].sum()) > 0:
            rank = int(told[:, 0].nonzero()[0, 0])
            raise NumericalError(
                f"rank {rank}: the position of atom {int(told[rank, 1])} is not finite "
                f"({int(told[:, 0].sum())} such atoms in all); the run has blown up: check the structure for atoms "
                "on top of each other, or take a smaller time step"
            )
        bounds = told[:, 3 + cells.numel() :].view(self.mesh.size, 2, n_systems, 3)
        low, high = bounds[:, 0].amin(0), bounds[:, 1].amax(0)
        frame = Frame.from_bounds(box, low.to(sharded.positions.device), high.to(sharded.positions.device))
        return frame, [int(v) for v in told[:, 2]]

    def _migrate(
        self, sharded: ShardedBatch, frame: Frame, counts: list[int], *, by_id: bool
    ) -> torch.Tensor:
        """Move rows to their owners and sort them in space, `by_id` where they share a bin (collective)."""
        frac, _ = frame.fold(sharded.positions, sharded.system)
        rows = Rows(frame.unit(frac, sharded.system), sharded.system, sharded.ids)
        shape = (sharded.n_global, sharded.n_systems)
        if self._partitioner is None or shape != self._shape:
            self._partitioner, self._shape = self._make_partitioner(sharded), shape
            self._partitioner.fit(rows, frame.lengths(), self.mesh)
        elif max(counts) * self.mesh.size > self._partitioner.refit_above() * sum(counts) + self.mesh.size:
            self._partitioner.fit(rows, frame.lengths(), self.mesh)
        moved = reshard_by_destination(
            {**sharded.rows, _FRAC: frac}, self._partitioner.assign(rows), self.mesh
        )
        if by_id:
            first = torch.argsort(moved["ids"])
            moved = {name: t.index_select(0, first) for name, t in moved.items()}
        order = self._spatial_order(moved[_FRAC], moved["system"], frame)
        sharded.replace_rows({name: t.index_select(0, order) for name, t in moved.items()})
        return moved[_FRAC].index_select(0, order)

    def _spatial_order(self, frac: torch.Tensor, system: torch.Tensor, frame: Frame) -> torch.Tensor:
        """Order rows by bins of half a cutoff, so that neighbours lie near each other in memory."""
        bins = torch.floor((frac - frame.low[system]) * frame.box.heights[system] * (2.0 / self.list_cutoff))
        n = 1024.0
        x, y, z = bins.clamp(0.0, n - 1).unbind(1)
        return torch.argsort(((system.double() * n + x) * n + y) * n + z, stable=True)

    def _make_partitioner(self, sharded: ShardedBatch) -> Partitioner:
        if self.config.strategy is StrategyKind.GRAPH_PARTITION:
            return IndexBlocks(sharded.n_global, self.mesh.size)
        if self.config.grid_dims is not None:
            return Grid(self.config.grid_dims, self.mesh.size)
        return Bisection(sharded.n_global, sharded.n_systems, self.mesh.size)

    def _ghosts(
        self, sharded: ShardedBatch, frac: torch.Tensor, frame: Frame
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        if self.config.strategy is StrategyKind.GRAPH_PARTITION:
            return all_remote_rows(sharded.n_owned, self.mesh, frac.device)
        bounds = Bounds.gather(frac, sharded.system, sharded.n_systems, self.mesh)
        return ghost_destinations(frac, sharded.system, bounds, frame, self.width, self.mesh)

    def _exchange_static(
        self,
        sharded: ShardedBatch,
        frac: torch.Tensor,
        folded: torch.Tensor,
        send_index: torch.Tensor,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
    ) -> dict[str, torch.Tensor]:
        """Return the local rows of everything that doesn't change until the next rebuild (collective)."""
        names = ("numbers", "system", "ids", *sharded.extra)
        owned = {_FOLDED: folded, _FRAC: frac, **{name: sharded.rows[name] for name in names}}
        if self.mesh.size == 1:
            return owned
        packer = RowPacker(owned)
        ghosts = packer.unpack(
            self.mesh.all_to_all_rows(packer.pack(owned, send_index), send_splits, recv_splits, kind="static")
        )
        return {name: torch.cat([t, ghosts[name]]) for name, t in owned.items()}

    def _neighbors(self, local: dict[str, torch.Tensor], frame: Frame, n_owned: int) -> NeighborList:
        wide = self.config.strategy is StrategyKind.WIDE_HALO
        return build_neighbors(
            local[_FOLDED],
            local[_FRAC],
            local["system"],
            frame,
            n_owned,
            self.list_cutoff,
            n_receivers=local[_FOLDED].shape[0] if wide else None,
            form=self._form,
        )

    def _prune(
        self,
        keep: torch.Tensor,
        send_index: torch.Tensor,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
        """Tell owners which of their rows are used here and drop the others from the plan (collective)."""
        if self.mesh.size == 1:
            return send_index, send_splits, recv_splits
        wanted = self.mesh.all_to_all_rows(keep.byte(), recv_splits, send_splits, kind="static").bool()
        sent = tuple(int(part.sum()) for part in wanted.split(list(send_splits)))
        received = tuple(int(part.sum()) for part in keep.split(list(recv_splits)))
        return send_index[wanted], sent, received
