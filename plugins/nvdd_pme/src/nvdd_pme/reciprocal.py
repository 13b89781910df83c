"""The part of the Coulomb energy that a mesh carries, on several ranks.

Key objects: `ReciprocalEngine` (what the model asks of an engine), `ReplicatedMesh` (every rank can read the whole
mesh), `mesh_points` (shared with other engines). With the transform ``M(m) = sum_x mesh[x] exp(-2 pi i m.x / K)`` of
the spread charges the energy is ``sum_m G(m) |M(m)|^2`` over all m, G being the `influence`. Its term at m = 0 is the
neutralising background of a net charge. Energies are in e^2 / Angstrom: Coulomb's constant is the caller's.

Layer: plugin.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nvdd_core.comm import Mesh, Pending, all_reduce_sum_symmetric
from nvdd_core.runtime import current_dd_context
from nvdd_core.tensor.exchanges import exchanged
from nvdd_pme.cpu_mesh import MeshWork
from nvdd_pme.influence import half_frequencies, influence, inverted
from nvdd_pme.modes import influence_slope
from nvdd_pme.slabs import half_weights
from nvdd_pme.splines import gather, gather_slopes, spread, spread_into


class ReciprocalEngine(Protocol):
    """One way to compute the reciprocal-space energy of all ranks' charges (collective)."""

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
        """Return this rank's share of the energy.

        Parameters
        ----------
        positions : Tensor, shape (n_owned, 3), float64
            Angstrom, anywhere.
        charges : Tensor, shape (n_owned,), float64
            e.
        cell : Tensor, shape (3, 3), float64
            Lattice vectors as rows.
        alpha : float
            Splitting parameter, 1/Angstrom.
        mesh : tuple of int
            Mesh points along each lattice vector.
        order : int
            Of the splines.
        potential : bool
            Give the potential at each owned row instead, the derivative of all ranks' energy for its charge.

        Returns
        -------
        Tensor, shape () or (n_owned,), float64
            This rank's share of the energy, e^2/Angstrom: any, so long as the ranks' shares sum to the energy. Or the
            potential, e/Angstrom; half of charge times potential is then a row's energy. Differentiable twice with
            respect to positions, charges and cell.
        """
        ...


def sum_over_ranks(share: torch.Tensor) -> torch.Tensor:
    """Sum `share` over ranks by the symmetric all-reduce; in one process it is the sum (collective)."""
    return _summed(share, current_dd_context().mesh)


def _summed(share: torch.Tensor, ranks: Mesh | None) -> torch.Tensor:
    if ranks is None or ranks.size == 1:
        return share
    total: torch.Tensor = exchanged(lambda value: all_reduce_sum_symmetric(value, ranks), share)
    return total


def n_ranks() -> int:
    """Return how many ranks evaluate together."""
    return _size(current_dd_context().mesh)


def _size(ranks: Mesh | None) -> int:
    return 1 if ranks is None else ranks.size


def mesh_points(positions: torch.Tensor, cell: torch.Tensor, mesh: tuple[int, int, int]) -> torch.Tensor:
    """Return positions in units of the mesh, (n, 3)."""
    scaled = [inverse * n for inverse, n in zip(inverted(cell).unbind(1), mesh, strict=True)]
    points: torch.Tensor = positions @ torch.stack(scaled, dim=1)
    return points


# -- energy of a mesh ------------------------------------------------------------------------------------------


def mesh_potential(charge: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the energy of charges on a mesh (K0, K1, K2) with respect to them.

    `g` is the influence (K0, K1, K2 // 2 + 1).
    """
    wave = torch.fft.rfftn(charge)
    potential: torch.Tensor = 2.0 * torch.fft.irfftn(g * wave, s=charge.shape, norm="forward")
    return potential


def _squared(wave: torch.Tensor, n: int) -> torch.Tensor:
    """Return |M|^2, (K0, K1, K2 // 2 + 1), places that stand for two counted twice."""
    return (wave.real.square() + wave.imag.square()) * half_weights(n, wave.device)


class _MeshEnergy(torch.autograd.Function):
    """One rank's share of the energy of all ranks' charges on a mesh (collective).

    CPU ranks that share memory share the work, and have the energy of their parts. Others do all of it: their shares
    are equal on CPUs, and the energies of their own charges where the mesh was begun ahead and on GPUs. The gradient
    needs the potential, which every rank has from the energy, and no sum over ranks. Where it is differentiated further
    what follows may differ from rank to rank, so it is made of torch operations then, with the sums over ranks that
    belong to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        points: torch.Tensor,
        charges: torch.Tensor,
        g: torch.Tensor,
        mesh: tuple[int, int, int],
        order: int,
        begun: MeshAhead | None,
    ) -> torch.Tensor:
        # a graph that is kept is differentiated after the evaluation, whose ranks are known here only
        ranks = current_dd_context().mesh
        ctx.order, ctx.mesh, ctx.ranks, ctx.factor = order, mesh, ranks, 1.0 / _size(ranks)
        read: torch.Tensor | None = None
        if begun is not None or points.is_cuda:
            begun = begun or MeshAhead(points, charges, mesh, order)
            field, squared = _solve(begun.total.wait(), g, ctx.needs_input_grad[2])
            read = gather_slopes(points, field, order)
            share = torch.dot(charges, read[:, 0])
        else:
            if ranks is not None and ranks.shares_memory:
                work, ctx.factor = MeshWork.shared(mesh, ranks), 1.0
                spread_into(work.mine, points, charges, order)
            else:
                work = MeshWork.alone(MeshAhead(points, charges, mesh, order).total.wait())
            energy, squared = work.solve(g, ctx.needs_input_grad[2])
            share = energy * ctx.factor
            if any(ctx.needs_input_grad):  # what is read, as the next evaluation may overwrite the field
                read = gather_slopes(points, work.field, order)
        ctx.save_for_backward(points, charges, g, read, squared)
        return share

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        points, charges, g, read, squared = ctx.saved_tensors
        if torch.is_grad_enabled():
            share = grad / _size(ctx.ranks)
            total = _summed(spread(points, charges, ctx.mesh, ctx.order), ctx.ranks)
            read = gather_slopes(points, _summed(share * mesh_potential(total, g), ctx.ranks), ctx.order)
            if squared is not None:
                squared = _squared(torch.fft.rfftn(total), ctx.mesh[2])
        else:
            share = grad * ctx.factor
            read = 2.0 * grad * read
        for_g = None if squared is None else share * squared
        return charges[:, None] * read[:, 1:], read[:, 0], for_g, None, None, None


def _solve(total: torch.Tensor, g: torch.Tensor, squares: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return half of the potential (K0, K1, K2) and, if they are wanted, `_squared`."""
    wave = torch.fft.rfftn(total)
    squared = _squared(wave, total.shape[2]) if squares else None
    return torch.fft.irfftn(wave.mul_(g), s=total.shape, norm="forward"), squared


class MeshAhead:
    """Spreads charges and begins to sum the mesh over ranks, so that the caller can do other things (collective).

    Attributes
    ----------
    points : Tensor
        As given, for the derivative.
    total : Pending
    """

    def __init__(
        self, points: torch.Tensor, charges: torch.Tensor, mesh: tuple[int, int, int], order: int
    ) -> None:
        self.points, ranks = points, current_dd_context().mesh
        total = spread(points.detach(), charges.detach(), mesh, order)
        self.total = Pending(total) if ranks is None else ranks.start_all_reduce_sum_(total)


class _CellInfluence(torch.autograd.Function):
    """The influence `g` as a function of the cell, whose derivative is one pass over the mesh."""

    @staticmethod
    def forward(
        ctx: Any, cell: torch.Tensor, g: torch.Tensor, alpha: float, mesh: tuple[int, int, int], order: int
    ) -> torch.Tensor:
        ctx.save_for_backward(cell, g)
        ctx.alpha, ctx.mesh, ctx.order = alpha, mesh, order
        return g.view_as(g)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cell, g = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated further
            again = influence(
                cell, half_frequencies(ctx.mesh, cell.device), alpha=ctx.alpha, mesh=ctx.mesh, order=ctx.order
            )
            (slope,) = torch.autograd.grad(again, cell, grad, create_graph=True)
        else:
            slope = influence_slope(grad, g, cell, ctx.alpha, ctx.order, list(ctx.mesh))
        return slope, None, None, None, None


# -- the engine ------------------------------------------------------------------------------------------------


class ReplicatedMesh:
    """Each rank spreads its rows, the mesh is summed over ranks, and every rank reads the whole potential.

    For the energy CPU ranks that share memory share the transforms, see `nvdd_pme.cpu_mesh`; others each make all.

    Parameters
    ----------
    one_cell : bool
        Promise that every call is about the same cell, mesh and splitting, so that nothing is read back from a device
        to find out.
    """

    def __init__(self, *, one_cell: bool = False) -> None:
        self._one_cell = one_cell
        self._kept: tuple[tuple[Any, ...], torch.Tensor, torch.Tensor] | None = None

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
        begun: MeshAhead | None = None,
    ) -> torch.Tensor:
        """See `ReciprocalEngine`; `begun` is what `begin` gave for the same arguments."""
        points = mesh_points(positions, cell, mesh) if begun is None else begun.points
        g = self._influence(cell, alpha, mesh, order)
        if potential:
            total = sum_over_ranks(spread(points, charges, mesh, order))
            return gather(points, mesh_potential(total, g), order)
        share: torch.Tensor = exchanged(
            lambda at: _MeshEnergy.apply(at, charges, g, mesh, order, begun), points
        )
        return share

    @staticmethod
    def begin(
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *,
        alpha: float,
        mesh: tuple[int, int, int],
        order: int,
    ) -> MeshAhead:
        """Begin to sum the mesh over ranks; the arguments are those of the call to come (collective)."""
        return MeshAhead(mesh_points(positions, cell, mesh), charges, mesh, order)

    def _influence(
        self, cell: torch.Tensor, alpha: float, mesh: tuple[int, int, int], order: int
    ) -> torch.Tensor:
        """Return the influence on all frequencies; kept for as long as the cell stays the same."""
        key, kept = (alpha, mesh, order, cell.device), self._kept
        if kept is None or not (self._one_cell or (kept[0] == key and torch.equal(kept[1], cell))):
            g = influence(
                cell.detach(), half_frequencies(mesh, cell.device), alpha=alpha, mesh=mesh, order=order
            )
            kept = self._kept = (key, cell.detach().clone(), g)
        made: torch.Tensor = _CellInfluence.apply(cell, kept[2], alpha, mesh, order)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be made again."""
        return {**self.__dict__, "_kept": None}
