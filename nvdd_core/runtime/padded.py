"""A domain in tensors that stay in place from one rebuild to the next.

`PaddedDomain` has somewhat more rows and edges than a domain needs. Owned rows that stand for none are like the first
one, but apart from each other; edges that stand for none join such rows, and their energies are left out. Ghosts that
stand for none are copies that nobody reads. So the domains of many rebuilds fit in turn, and what was captured with the
tensors of one serves them all.

Invariant: sizes are agreed between ranks; who fits, and when new sizes are taken, all decide together.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.errors import PluginValidationError
from nvdd_core.runtime.domain import Domain
from nvdd_core.runtime.near_edges import EdgeList, Edges

# How far rows that stand for none are from each other, Angstrom: no distance is zero, or its derivative is no number.
_STEP = (0.9, 1.1, 1.3)
# Rows come and go as they cross from domain to domain. Ghosts, of which a border has few, waver more; nothing is
# computed for those to spare.
_SPARE_SHARE, _SPARE, _GHOSTS_WAVER = 64, 16, 4.0


class _NoList:
    """Stands for a neighbour list whose edges are had by `LocalBatch.near_edges` only."""

    def __init__(self, n_edges: int) -> None:
        self.n_edges = n_edges

    def full(self) -> _NoList:
        return self

    def coo(self) -> Edges:
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        raise self._refusal()

    def _refusal(self) -> PluginValidationError:
        return PluginValidationError(
            "the model's spec declares CompilePolicy(pads=True), but the model reads its neighbour list otherwise than "
            "by batch.near_edges(cutoff); do that, or leave pads out"
        )


class PaddedDomain:
    """Tensors for a domain, and some to spare (collective).

    Parameters
    ----------
    domain : Domain
    mesh : Mesh
    dtype : torch.dtype
        Of positions.
    before : PaddedDomain, optional
        One that no longer has room, for edges or for rows. Numbers of rows that it had room for stay, so that kernels
        that are chosen by them needn't be chosen again.
    """

    def __init__(
        self, domain: Domain, mesh: Mesh, dtype: torch.dtype, before: PaddedDomain | None = None
    ) -> None:
        plan, rows = domain.plan, domain.plan.n_owned
        known: HaloPlan | None = before.plan if before is not None else None
        n_owned = _kept(None if known is None else known.n_owned, rows + 2, _spared(rows)) if rows else 0
        earlier = (None,) * mesh.size if known is None else known.send_splits
        send = [
            _kept(had, n, _spared(n, _GHOSTS_WAVER)) if rows and peer != mesh.rank else 0
            for peer, (n, had) in enumerate(zip(plan.send_splits, earlier, strict=True))
        ]
        told = mesh.all_gather_ints(send)
        receive = tuple(row[mesh.rank] for row in told)
        index = torch.zeros(sum(send), dtype=torch.int64, device=domain.ids.device)
        self.plan: HaloPlan = HaloPlan(mesh, n_owned, index, tuple(send), receive)
        self._first = torch.zeros((), dtype=torch.int64, device=index.device)
        self._steps = torch.arange(1, n_owned + 1, device=index.device)[:, None] * torch.tensor(_STEP).to(
            device=index.device, dtype=dtype
        )
        self._lists = _lists(domain)
        self._rows = {
            name: t.new_zeros((self.plan.n_local, *t.shape[1:])) for name, t in _row_data(domain).items()
        }
        self.local = torch.zeros((self.plan.n_local, 3), dtype=dtype, device=index.device)
        near = domain.near.placed(self._place(domain.plan), self._lists)
        near.keep(rows, None if before is None else before.domain.near)
        fields = {name: self._rows[name] for name in domain.fields}
        self.domain: Domain = replace(
            domain,
            box=replace(domain.box, cell=domain.box.cell.clone()),
            plan=self.plan,
            neighbors=self._lists[0],
            parts=tuple(self._lists[1:]),
            numbers=self._rows["numbers"],
            system=self._rows["system"],
            ids=self._rows["ids"],
            fields=fields,
            near=near,
            real=torch.zeros(n_owned, dtype=torch.bool, device=index.device),
        )

    def fits(self, domain: Domain) -> bool:
        """Tell whether a domain has room, as far as this rank sees."""
        plan = domain.plan
        pairs = zip(
            (*plan.send_splits, *plan.recv_splits),
            (*self.plan.send_splits, *self.plan.recv_splits),
            strict=True,
        )
        return (
            plan.n_owned <= max(0, self.plan.n_owned - 2)
            and (plan.n_owned > 0) == (self.plan.n_owned > 0)
            and all(n <= room for n, room in pairs)
            and len(self.domain.parts) == len(domain.parts)
            and self.domain.fields.keys() == domain.fields.keys()
            and self.domain.near.fits(domain.near)
        )

    def load(self, domain: Domain) -> None:
        """Take the rows and edges of a domain that fits on every rank (collective)."""
        plan, start = domain.plan, 0
        for index, room in zip(
            plan.send_index.split(list(plan.send_splits)), self.plan.send_splits, strict=True
        ):
            part = self.plan.send_index[start : start + room]
            part[: index.shape[0]].copy_(index)
            part[index.shape[0] :].zero_()
            start += room
        for name, t in _row_data(domain).items():
            self._rows[name].copy_(self.plan.forward(self._padded(t[: plan.n_owned])))
        self.domain.box.cell.copy_(domain.box.cell)
        self._first.fill_(plan.n_owned)
        if self.domain.real is not None:
            self.domain.real.copy_(torch.arange(self.plan.n_owned, device=domain.ids.device) < plan.n_owned)
        for mine, its in zip(self._lists, (domain.neighbors, *domain.parts), strict=True):
            mine.n_edges = its.n_edges
        self.domain.near.adopt(domain.near.placed(self._place(plan), self._lists))

    def move(self, owned: torch.Tensor) -> torch.Tensor:
        """Bring rows to the positions `owned` (n_owned, 3) and choose edges anew (collective).

        Returns
        -------
        Tensor, shape (), float64
            Above zero if more edges have come near than there is room for.
        """
        rows = self._padded(owned)
        n = owned.shape[0]
        rows[n:] += self._steps[: rows.shape[0] - n]
        self.local.copy_(self.plan.forward(rows))
        at = self.domain
        return at.near.refresh(
            self.local, at.box.cell.to(owned.dtype), at.system, (self._first, self.plan.n_owned)
        )

    def _padded(self, owned: torch.Tensor) -> torch.Tensor:
        """Return owned rows with copies of the first below, as many as there is room for; a copy of all."""
        spare = self.plan.n_owned - owned.shape[0]
        return torch.cat([owned, owned[:1].expand(spare, *owned.shape[1:])])

    def _place(self, plan: HaloPlan) -> torch.Tensor:
        """Return where each local row of a plan lies here, (n_local,) int64."""
        device = self.plan.send_index.device
        starts = accumulate(self.plan.recv_splits, initial=self.plan.n_owned)
        ghosts = [
            torch.arange(start, start + n, device=device)
            for start, n in zip(starts, plan.recv_splits, strict=False)  # the last is the end
        ]
        return torch.cat([torch.arange(plan.n_owned, device=device), *ghosts])


def _row_data(domain: Domain) -> dict[str, torch.Tensor]:
    """Return all that a domain holds of its local rows but positions."""
    return {"numbers": domain.numbers, "system": domain.system, "ids": domain.ids} | domain.fields


def _lists(domain: Domain) -> list[Any]:
    """Return what stands for the lists of a domain; equal ones of a composition stay one."""
    known: dict[int, _NoList] = {}
    found: Sequence[EdgeList] = (domain.neighbors, *domain.parts)
    return [known.setdefault(id(one), _NoList(0)) for one in found]


def _spared(n: int, wavers: float = 0.0) -> int:
    return n + n // _SPARE_SHARE + _SPARE + int(wavers * n**0.5)


def _kept(had: int | None, needed: int, wanted: int) -> int:
    """Return the size that there was, if it does and isn't far too large; otherwise the one wanted."""
    return had if had is not None and needed <= had <= 2 * wanted else wanted
