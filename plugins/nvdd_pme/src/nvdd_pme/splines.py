"""B-splines: values of points spread onto a mesh, and a mesh read at points.

`spread` and `gather` are the same linear map and its transpose, for a spline or any derivative of it along each
axis. So each is the other's backward, and what is differentiated once more is the same pair with higher derivatives:
derivatives of any order are right. Points are given in units of the mesh, anywhere; the mesh is periodic.

Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nvdd_pme.spline_kernels import gather_kernel, spread_kernel, spread_threads
from nvdd_pme.start import launch

VALUE = (0, 0, 0)
"""The spline itself; ``(1, 0, 0)`` is its derivative along the first axis."""


def spline_weights(fraction: torch.Tensor, order: int, derivative: int = 0) -> torch.Tensor:
    """Return values of the cardinal B-spline.

    Parameters
    ----------
    fraction : Tensor, shape (...), in [0, 1)
    order : int
        2 or more; the spline has support [0, order).
    derivative : int
        Less than `order`.

    Returns
    -------
    Tensor, shape (..., order)
        At ``fraction + j``, j = 0 ... order - 1.
    """
    weights = torch.ones_like(fraction)[..., None]
    for p in range(2, order - derivative + 1):
        weights = _raised(weights, fraction, p)
    for _ in range(derivative):  # M_p' (x) = M_{p-1}(x) - M_{p-1}(x - 1)
        weights = torch.nn.functional.pad(weights, (1, 1)).diff(dim=-1)
    return weights


def _raised(weights: torch.Tensor, fraction: torch.Tensor, p: int) -> torch.Tensor:
    """From order p - 1 to order p: (p - 1) M_p(x) = x M_{p-1}(x) + (p - x) M_{p-1}(x - 1)."""
    x = fraction[..., None] + torch.arange(p, dtype=fraction.dtype, device=fraction.device)
    padded = torch.nn.functional.pad(weights, (1, 1))
    return (x * padded[..., 1:] + (p - x) * padded[..., :-1]) / (p - 1)


def spread(
    points: torch.Tensor, values: torch.Tensor, mesh: tuple[int, int, int], order: int
) -> torch.Tensor:
    """Return the mesh (K0, K1, K2) that holds each point's value times the spline around it.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
        In mesh units, anywhere: position 0.25 of the cell along the first axis is ``0.25 * K0``.
    values : Tensor, shape (n,), float64
    mesh : tuple of int
    order : int
        Of the spline: each point reaches `order` mesh points along each axis.
    """
    made: torch.Tensor = _spread(points, values[:, None], list(VALUE), list(mesh), order)
    return made


def gather(points: torch.Tensor, grid: torch.Tensor, order: int) -> torch.Tensor:
    """Return the mesh read at the points (n,): the transpose of `spread`."""
    read: torch.Tensor = _gather(points, grid, list(VALUE), order)
    return read[:, 0]


def gather_slopes(points: torch.Tensor, grid: torch.Tensor, order: int) -> torch.Tensor:
    """Return the mesh read at the points and its derivatives along each axis, (n, 4), differentiable too."""
    read: torch.Tensor = _gather(points, grid, list(VALUE) + _raised_once(list(VALUE)), order)
    return read


@torch.library.custom_op("nvdd_pme::spread", mutates_args=())
def _spread(
    points: torch.Tensor, values: torch.Tensor, derivatives: list[int], mesh: list[int], order: int
) -> torch.Tensor:
    """Sum ``values[:, k]`` times the k-th derivative of the spline (three integers each) into a new mesh."""
    grid = points.new_zeros(mesh)
    _add(grid, points, values, derivatives, order)
    return grid


def spread_into(grid: torch.Tensor, points: torch.Tensor, values: torch.Tensor, order: int) -> None:
    """Do as `spread` into memory that there is, without derivatives."""
    _add(grid.zero_(), points, values, VALUE, order)


def _add(
    grid: torch.Tensor, points: torch.Tensor, values: torch.Tensor, derivatives: Sequence[int], order: int
) -> None:
    threads = spread_threads(points.shape[0], points.is_cuda)
    _run(spread_kernel(order, tuple(derivatives)), threads, points, values, grid)


@torch.library.custom_op("nvdd_pme::gather", mutates_args=())
def _gather(points: torch.Tensor, grid: torch.Tensor, derivatives: list[int], order: int) -> torch.Tensor:
    """Read the mesh at the points with each derivative of the spline (n, D): the transpose of `_spread`."""
    values = points.new_empty((points.shape[0], len(derivatives) // 3))
    _run(gather_kernel(order, tuple(derivatives)), points.shape[0], points, values, grid)
    return values


def _run(kernel: Any, threads: int, points: torch.Tensor, values: torch.Tensor, grid: torch.Tensor) -> None:
    launch(kernel, threads, (points.contiguous(), values.contiguous(), grid.contiguous(), *grid.shape))


@_spread.register_fake
def _(
    points: torch.Tensor, values: torch.Tensor, derivatives: list[int], mesh: list[int], order: int
) -> torch.Tensor:
    return points.new_empty(mesh)


@_gather.register_fake
def _(points: torch.Tensor, grid: torch.Tensor, derivatives: list[int], order: int) -> torch.Tensor:
    return points.new_empty((points.shape[0], len(derivatives) // 3))


def _raised_once(derivatives: list[int]) -> list[int]:
    """Each set of derivatives with one more along each axis in turn, as (set, axis) pairs in order."""
    sets = [derivatives[k : k + 3] for k in range(0, len(derivatives), 3)]
    return [d + (a == axis) for one in sets for axis in range(3) for a, d in enumerate(one)]


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    points, values, ctx.derivatives, _, ctx.order = inputs
    ctx.save_for_backward(points, values)


def _backward_spread(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    points, values = ctx.saved_tensors
    n_sets = values.shape[1]
    wanted = ctx.derivatives + _raised_once(ctx.derivatives)
    read = _gather(points, grad.contiguous(), wanted, ctx.order)
    slopes = read[:, n_sets:].reshape(-1, n_sets, 3)
    return (values[:, :, None] * slopes).sum(1), read[:, :n_sets], None, None, None


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    points, grid, ctx.derivatives, ctx.order = inputs
    ctx.save_for_backward(points, grid)


def _backward_gather(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    points, grid = ctx.saved_tensors
    back = _spread(points, grad.contiguous(), ctx.derivatives, list(grid.shape), ctx.order)
    slopes = _gather(points, grid, _raised_once(ctx.derivatives), ctx.order)
    return (grad[:, :, None] * slopes.reshape(*grad.shape, 3)).sum(1), back, None, None


_spread.register_autograd(_backward_spread, setup_context=_save_spread)
_gather.register_autograd(_backward_gather, setup_context=_save_gather)
