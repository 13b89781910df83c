"""The energy of a block of wave vectors, with derivatives of any order, in little memory.

`mode_energy` is ``sum_m w D(m) A(k2) |S(m)|^2``: S the transform of the charges, k2 the squared length of wave vector
m, ``A = 2 pi exp(-c k2) / k2``, D what undoes the splines' damping and w how often a place of a real transform counts.
It is computed a few planes at a time, in place. So are its derivatives, that for the columns (`mode_field`) and that
for the metric which makes k2 of m (`mode_moment`); theirs are the same two with the next derivative of A. The cell's
derivative of an `influence` (`influence_slope`) is such a moment, too.

Layer: plugin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_pme.influence import frequencies, inverted, metric_of, spline_damping, volume_of
from nvdd_pme.slabs import half_weights, shares

_CHUNK = 1 << 17  # places at a time: a few arrays of them fit into a core's cache
_GPU_CHUNK = 1 << 22


@functools.cache  # for good, since captured evaluations read it
def _axis(
    n: int, order: int, half: bool, counted: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frequency and factor of each place of an axis; `counted` for how many waves it stands, if it is `half`."""
    m = torch.arange(n // 2 + 1, dtype=torch.float64, device=device) if half else frequencies(n, device)
    factor = spline_damping(n, order, device)[: len(m)]
    return m, factor * half_weights(n, device) if half and counted else factor


@dataclass(frozen=True)
class _Chunk:
    """A few planes of the block: wave vectors, their squared lengths and factors."""

    part: slice
    m: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    k2: torch.Tensor
    c: float
    has_zero: bool

    def wave(self, n: int) -> torch.Tensor:
        """Return w D times the n-th derivative of A for k2.

        It is ``(-1)^n A (c^n + n c^(n-1) / k2 + n (n-1) c^(n-2) / k2^2 + ...)``. At k2 = 0 the background is left.
        """
        x, y, z = self.factors
        inverse = self.k2.reciprocal()
        wave = torch.mul(self.k2, -self.c).exp_().mul_(inverse).mul_(2.0 * math.pi)
        wave.mul_((x * y)[..., None]).mul_(z)
        if n:
            series = torch.zeros_like(inverse)
            for k in range(n, -1, -1):  # Horner's scheme
                series.mul_(inverse).add_(math.perm(n, k) * self.c ** (n - k))
            wave.mul_(series.mul_((-1.0) ** n))
        if self.has_zero:
            zero = wave[0, 0, 0]
            zero.fill_(0.0)
            if n == 0:
                zero.sub_(2.0 * math.pi * self.c * x[0, 0] * y[0, 0] * z[0])
        return wave

    def weights(self, n: int, along: torch.Tensor) -> torch.Tensor:
        """Return `wave` times ``m . T . m`` for each matrix T of `along`."""
        found = self.wave(n)
        for matrix in along:
            found.mul_(_quadratic(matrix, *self.m))
        return found

    def outer(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values m m^T``, (3, 3)."""
        x, y, z = self.m[0][:, 0], self.m[1][0], self.m[2]
        xy, xz, yz = values.sum(2), values.sum(1), values.sum(0)
        a, b, c = (xy.sum(1) @ (x * x), xy.sum(0) @ (y * y), xz.sum(0) @ (z * z))
        ab, ac, bc = x @ xy @ y, x @ xz @ z, y @ yz @ z
        return torch.stack([a, ab, ac, ab, b, bc, ac, bc, c]).view(3, 3)


def _quadratic(matrix: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    s = matrix + matrix.T
    plane = matrix[0, 0] * x * x + matrix[1, 1] * y * y + s[0, 1] * x * y
    slope = s[0, 2] * x + s[1, 2] * y
    return torch.addcmul(plane[..., None], slope[..., None], z).add_(matrix[2, 2] * z * z)


def _chunks(
    columns: torch.Tensor,
    metric: torch.Tensor,
    c: float,
    shape: list[int],
    order: int,
    first: int,
    counted: bool = True,
) -> Iterator[_Chunk]:
    """Cut the block into chunks along the first axis; w = 1 where it isn't `counted`."""
    if not columns.numel():
        return
    device = columns.device
    (x, dx), (y, dy), (z, dz) = (_axis(n, order, axis == 2, counted, device) for axis, n in enumerate(shape))
    mine = slice(first, first + columns.shape[1])
    y, dy = y[None, mine], dy[None, mine]
    size = _GPU_CHUNK if columns.is_cuda else _CHUNK
    for part in shares(shape[0], min(shape[0], -(-columns.numel() // size))):
        m = (x[part, None], y, z)
        k2 = _quadratic(metric, *m)
        has_zero = part.start == 0 and first == 0
        if has_zero:
            k2[0, 0, 0].fill_(1.0)
        yield _Chunk(part, m, (dx[part, None], dy, dz), k2, c, has_zero)


def _dot(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (u.real * v.real).addcmul_(u.imag, v.imag)


Block = tuple[float, list[int], int, int]  # c, shape, order, first


def _energy(
    columns: torch.Tensor, metric: torch.Tensor, c: float, shape: list[int], order: int, first: int
) -> torch.Tensor:
    total = metric.new_zeros(())
    for chunk in _chunks(columns, metric, c, shape, order, first):
        s = columns[chunk.part]
        total += chunk.wave(0).mul_(_dot(s, s)).sum()
    return total


def _field(
    u: torch.Tensor,
    metric: torch.Tensor,
    along: torch.Tensor,
    n: int,
    c: float,
    shape: list[int],
    order: int,
    first: int,
) -> torch.Tensor:
    """Return `u` times the n-th derivative of ``w D A`` and the quadratic forms of `along` (k, 3, 3)."""
    field = torch.empty_like(u, memory_format=torch.contiguous_format)
    for chunk in _chunks(u, metric, c, shape, order, first):
        torch.mul(u[chunk.part], chunk.weights(n, along), out=field[chunk.part])
    return field


def _moment(
    u: torch.Tensor,
    v: torch.Tensor,
    metric: torch.Tensor,
    along: torch.Tensor,
    n: int,
    c: float,
    shape: list[int],
    order: int,
    first: int,
) -> torch.Tensor:
    """Return the sum of ``m m^T Re(u* v)`` (3, 3) weighted as in `_field`."""
    total = torch.zeros_like(metric)
    for chunk in _chunks(u, metric, c, shape, order, first):
        total += chunk.outer(chunk.weights(n, along).mul_(_dot(u[chunk.part], v[chunk.part])))
    return total


mode_energy = torch.library.custom_op("nvdd_pme::mode_energy", _energy, mutates_args=())
mode_field = torch.library.custom_op("nvdd_pme::mode_field", _field, mutates_args=())
mode_moment = torch.library.custom_op("nvdd_pme::mode_moment", _moment, mutates_args=())


@mode_energy.register_fake
def _(columns: torch.Tensor, metric: torch.Tensor, *_: Any) -> torch.Tensor:
    return metric.new_empty(())


@mode_field.register_fake
def _(u: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@mode_moment.register_fake
def _(u: torch.Tensor, v: torch.Tensor, metric: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(metric)


def _save_energy(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.block = inputs[2:]


def _backward_energy(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    u, metric = ctx.saved_tensors
    none = metric.new_zeros((0, 3, 3))
    field = mode_field(u, metric, none, 0, *ctx.block)
    field = field * (2.0 * grad) if torch.is_grad_enabled() else field.mul_(2.0 * grad)
    slope = grad * mode_moment(u, u, metric, none, 1, *ctx.block) if ctx.needs_input_grad[1] else None
    return field, slope, None, None, None, None


def _save_field(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.n, ctx.block = inputs[3], inputs[4:]


def _backward_field(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    u, metric, along = ctx.saved_tensors
    slope = turn = None
    if ctx.needs_input_grad[1]:
        slope = mode_moment(g, u, metric, along, ctx.n + 1, *ctx.block)
    if ctx.needs_input_grad[2] and len(along):
        turn = torch.stack(
            [mode_moment(g, u, metric, rest, ctx.n, *ctx.block) for rest in _without_one(along)]
        )
    return mode_field(g, metric, along, ctx.n, *ctx.block), slope, turn, None, None, None, None, None


def _save_moment(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.n, ctx.block = inputs[4], inputs[5:]


def _backward_moment(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    u, v, metric, along = ctx.saved_tensors
    more = torch.cat([along, g[None]])
    slope = turn = None
    if ctx.needs_input_grad[2]:
        slope = mode_moment(u, v, metric, more, ctx.n + 1, *ctx.block)
    if ctx.needs_input_grad[3] and len(along):
        rests = (torch.cat([rest, g[None]]) for rest in _without_one(along))
        turn = torch.stack([mode_moment(u, v, metric, rest, ctx.n, *ctx.block) for rest in rests])
    du, dv = mode_field(v, metric, more, ctx.n, *ctx.block), mode_field(u, metric, more, ctx.n, *ctx.block)
    return du, dv, slope, turn, None, None, None, None, None


def _without_one(along: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([along[:i], along[i + 1 :]]) for i in range(len(along))]


mode_energy.register_autograd(_backward_energy, setup_context=_save_energy)
mode_field.register_autograd(_backward_field, setup_context=_save_field)
mode_moment.register_autograd(_backward_moment, setup_context=_save_moment)


@dataclass(frozen=True)
class Modes:
    """A block of wave vectors: columns `first`, `first` + 1, ... of the half-complex transform of a mesh.

    Attributes
    ----------
    shape : tuple of int
        Points of the whole mesh.
    order : int
        Of the splines by which charges were spread.
    alpha : float
        Splitting parameter, 1/Angstrom.
    first : int
        First column of the block.
    """

    shape: tuple[int, int, int]
    order: int
    alpha: float
    first: int

    def energy(self, columns: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """Return the block's share of the energy (), differentiable to any order for `columns` and `cell`."""
        made: torch.Tensor = mode_energy(columns, metric_of(cell), *self._block())
        share: torch.Tensor = made / volume_of(cell)
        return share

    def field(self, columns: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """Return the energy's gradient for `columns`, differentiable to any order."""
        made: torch.Tensor = mode_field(
            columns, metric_of(cell), cell.new_zeros((0, 3, 3)), 0, *self._block()
        )
        field: torch.Tensor = made * (2.0 / volume_of(cell))
        return field

    def _block(self) -> Block:
        return 1.0 / (4.0 * self.alpha * self.alpha), list(self.shape), self.order, self.first


def influence_slope(
    weights: torch.Tensor, g: torch.Tensor, cell: torch.Tensor, alpha: float, order: int, shape: list[int]
) -> torch.Tensor:
    """Return the derivative for the cell of the sum of `weights` times the influence `g`.

    As ``g = D A(k2) / V`` and ``k2 = m . metric . m`` it is ``-(2 metric (sum weights D dA/dk2 m m^T) / V +
    sum weights g)`` times the inverse cell, transposed.

    Parameters
    ----------
    weights, g : Tensor, shape (K0, K1, K2 // 2 + 1), float64
    cell : Tensor, shape (3, 3), float64
    alpha : float
        Splitting parameter, 1/Angstrom.
    order : int
    shape : list of int
        K0, K1, K2.

    Returns
    -------
    Tensor, shape (3, 3), float64
    """
    metric, moment = metric_of(cell), torch.zeros_like(cell)
    for chunk in _chunks(weights, metric, 1.0 / (4.0 * alpha * alpha), shape, order, 0, counted=False):
        moment += chunk.outer(chunk.wave(1).mul_(weights[chunk.part]))
    turn = metric @ moment * (2.0 / volume_of(cell))
    turn.diagonal().add_(torch.dot(weights.reshape(-1), g.reshape(-1)))
    return -turn @ inverted(cell).T
