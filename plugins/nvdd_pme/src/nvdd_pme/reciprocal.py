"""The part of the Coulomb energy that a mesh carries, on several ranks.

Key objects: `ReciprocalEngine` (what the model asks of an engine), `ReplicatedMesh` (every rank can read the whole
mesh), `influence`, `mesh_points` (shared with other engines). With the transform
``M(m) = sum_x mesh[x] exp(-2 pi i m.x / K)`` of the spread charges the energy is ``sum_m G(m) |M(m)|^2`` over all m,
G being the `influence`. Its term at m = 0 is the neutralising background of a net charge. Energies are in e^2 /
Angstrom: Coulomb's constant is the caller's.

Layer: plugin.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Protocol

import torch

from nvdd_core.comm import Mesh, Pending, all_reduce_sum_symmetric
from nvdd_core.runtime import current_dd_context
from nvdd_core.tensor.exchanges import exchanged
from nvdd_pme.cpu_mesh import MeshWork
from nvdd_pme.slabs import half_weights
from nvdd_pme.splines import gather, gather_slopes, spline_weights, spread, spread_into


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


def inverted(cell: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a cell, by cross products: a library's may wait for a GPU, and cells were checked."""
    normals, volume = _normals(cell)
    return normals.T / volume


def volume_of(cell: torch.Tensor) -> torch.Tensor:
    """Return the volume of a cell ()."""
    return _normals(cell)[1].abs()


def _normals(cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return b x c, c x a, a x b (3, 3) of lattice vectors a, b, c, and their determinant ()."""
    normals = torch.linalg.cross(cell.roll(-1, 0), cell.roll(-2, 0))
    return normals, (cell[0] * normals[0]).sum()


def mesh_points(positions: torch.Tensor, cell: torch.Tensor, mesh: tuple[int, int, int]) -> torch.Tensor:
    """Return positions in units of the mesh, (n, 3)."""
    scaled = [inverse * n for inverse, n in zip(inverted(cell).unbind(1), mesh, strict=True)]
    points: torch.Tensor = positions @ torch.stack(scaled, dim=1)
    return points


# -- the influence function -----------------------------------------------------------------------------------


def frequencies(n: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the signed frequency of each place of a transform of length n, (n,) float64: 0, 1, ..., -2, -1."""
    places: torch.Tensor = torch.fft.fftfreq(n, 1.0 / n, dtype=torch.float64, device=device)
    return places.round()


@cache  # for good, since captured evaluations read it
def spline_damping(n: int, order: int, device: torch.device) -> torch.Tensor:
    """Return what undoes, in the energy, that charges were spread with splines, at each place of a transform, (n,).

    A spread charge has U(m) = sinc(m / n)^order times its amplitude, and the mesh folds U(m + j n), all j, onto m. Of
    all factors U(m)^2 / (sum_j U(m + j n)^2)^2 gives the least error of the energy averaged over where charges lie
    between mesh points. The sum is a spline of twice the order at whole numbers, transformed. Zero at the Nyquist
    frequency of an even n, whose two signs are different waves in a skewed cell. No cell enters, so it is made once.
    """
    m = frequencies(n)
    weights = spline_weights(torch.zeros((), dtype=torch.float64), 2 * order)
    place = torch.arange(2 * order, dtype=torch.float64) - order
    folded = (weights * torch.cos((2.0 * math.pi / n) * m[..., None] * place)).sum(-1)
    found = torch.sinc(m / n).pow(2 * order) / folded.square()
    return torch.where(2.0 * m.abs() == n, 0.0, found).to(device)


def influence(
    cell: torch.Tensor,
    frequency: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    alpha: float,
    mesh: tuple[int, int, int],
    order: int,
) -> torch.Tensor:
    """Return G(m), so that the energy is the sum of ``G(m) |M(m)|^2`` over all m.

    Parameters
    ----------
    cell : Tensor, shape (3, 3), float64
        Differentiable.
    frequency : three Tensors, shapes (a,), (b,), (c,), float64
        Signed frequencies along the axes for which G is wanted: those of a transform's places, from the first one on.
    alpha, mesh, order
        See `ReciprocalEngine`.

    Returns
    -------
    Tensor, shape (a, b, c), float64
    """
    k2 = squared_lengths(cell, *torch.meshgrid(*frequency, indexing="ij"))
    damping: torch.Tensor = torch.ones((), dtype=torch.float64, device=cell.device)
    for axis, (m, n) in enumerate(zip(frequency, mesh, strict=True)):
        along = [-1 if a == axis else 1 for a in range(3)]
        damping = damping * spline_damping(n, order, m.device)[: len(m)].view(along)
    g: torch.Tensor = damping * green(k2, volume_of(cell), alpha)
    return g


def squared_lengths(cell: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return |k|^2 of the wave vectors with integer components (a, b, c)."""
    inverse = inverted(cell)  # columns are reciprocal vectors without 2 pi
    metric = (2.0 * math.pi) ** 2 * (inverse.T @ inverse)
    diagonal = metric[0, 0] * a * a + metric[1, 1] * b * b + metric[2, 2] * c * c
    k2: torch.Tensor = diagonal + 2.0 * (metric[0, 1] * a * b + metric[0, 2] * a * c + metric[1, 2] * b * c)
    return k2


def green(k2: torch.Tensor, volume: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return (2 pi / V) exp(-k^2 / 4 alpha^2) / k^2, and at k = 0 the background's -pi / (2 alpha^2 V)."""
    nothing = k2 == 0.0
    safe = torch.where(nothing, 1.0, k2)
    wave = 2.0 * math.pi * torch.exp(-safe / (4.0 * alpha * alpha)) / safe
    return torch.where(nothing, -math.pi / (2.0 * alpha * alpha), wave) / volume


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
        if cell.requires_grad and torch.is_grad_enabled():
            return influence(cell, half_frequencies(mesh, cell.device), alpha=alpha, mesh=mesh, order=order)
        key, kept = (alpha, mesh, order, cell.device), self._kept
        if kept is None or not (self._one_cell or (kept[0] == key and torch.equal(kept[1], cell))):
            g = influence(
                cell.detach(), half_frequencies(mesh, cell.device), alpha=alpha, mesh=mesh, order=order
            )
            kept = self._kept = (key, cell.detach().clone(), g)
        return kept[2]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be made again."""
        return {**self.__dict__, "_kept": None}


def half_frequencies(
    mesh: tuple[int, int, int], device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the signed frequencies of a real transform of the mesh along each axis, the last one halved."""
    last = torch.arange(mesh[2] // 2 + 1, dtype=torch.float64, device=device)
    return frequencies(mesh[0], device), frequencies(mesh[1], device), last
