"""What a mesh's transform is multiplied with: the influence of each wave vector, and the geometry that it needs.

Key objects: `influence`, `spline_damping`, `green`, `inverted`, `volume_of`. Layer: plugin.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from nvdd_pme.splines import spline_weights


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


def metric_of(cell: torch.Tensor) -> torch.Tensor:
    """Return what turns integer components into squared lengths of wave vectors, (3, 3)."""
    inverse = inverted(cell)  # columns are reciprocal vectors without 2 pi
    metric: torch.Tensor = (2.0 * math.pi) ** 2 * (inverse.T @ inverse)
    return metric


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
    metric = metric_of(cell)
    diagonal = metric[0, 0] * a * a + metric[1, 1] * b * b + metric[2, 2] * c * c
    k2: torch.Tensor = diagonal + 2.0 * (metric[0, 1] * a * b + metric[0, 2] * a * c + metric[1, 2] * b * c)
    return k2


def green(k2: torch.Tensor, volume: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return (2 pi / V) exp(-k^2 / 4 alpha^2) / k^2, and at k = 0 the background's -pi / (2 alpha^2 V)."""
    nothing = k2 == 0.0
    safe = torch.where(nothing, 1.0, k2)
    wave = 2.0 * math.pi * torch.exp(-safe / (4.0 * alpha * alpha)) / safe
    return torch.where(nothing, -math.pi / (2.0 * alpha * alpha), wave) / volume


def half_frequencies(
    mesh: tuple[int, int, int], device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the signed frequencies of a real transform of the mesh along each axis, the last one halved."""
    last = torch.arange(mesh[2] // 2 + 1, dtype=torch.float64, device=device)
    return frequencies(mesh[0], device), frequencies(mesh[1], device), last
