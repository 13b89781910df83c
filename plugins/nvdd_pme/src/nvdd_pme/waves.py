"""Sums of plane waves over points, and the Ewald sum's engine.

`wave_sums` (points to waves) and `wave_values` (waves to points) are the same linear map and its transpose, and the
derivative of either for the points is the other one with waves multiplied by their frequency. So each is the other's
backward, and derivatives of any order are right. Points are fractions of the cell and frequencies integers, hence the
cell enters through the points alone. Layer: plugin.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nvdd_pme.influence import green, inverted, squared_lengths, volume_of
from nvdd_pme.reciprocal import n_ranks, sum_over_ranks

_BLOCK = 1 << 22
"""Numbers in a block of phases: 32 MB."""


def wave_sums(points: torch.Tensor, values: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Return ``sum_i values_i exp(2 pi i m.points_i)`` as cosine and sine parts.

    Parameters
    ----------
    points : Tensor, shape (n, 3), float64
        Fractional.
    values : Tensor, shape (n,), float64
    frequency : Tensor, shape (K, 3), float64
        Whole numbers.

    Returns
    -------
    Tensor, shape (K, 2)
    """
    made: torch.Tensor = _sums(points, values[:, None], frequency)
    return made[:, :, 0]


def wave_values(points: torch.Tensor, waves: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Return ``sum_m waves_m . (cos, sin)(2 pi m.points_i)`` (n,): the transpose of `wave_sums`."""
    made: torch.Tensor = _values(points, waves[:, :, None], frequency)
    return made[:, 0]


def _blocks(n: int, n_waves: int) -> list[slice]:
    step = max(1, _BLOCK // max(n, 1))
    return [slice(start, start + step) for start in range(0, n_waves, step)]


@torch.library.custom_op("nvdd_pme::wave_sums", mutates_args=())
def _sums(points: torch.Tensor, values: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """(n, 3), (n, C), (K, 3) -> (K, 2, C)."""
    out = values.new_empty((frequency.shape[0], 2, values.shape[1]))
    for block in _blocks(points.shape[0], frequency.shape[0]):
        phase = (2.0 * math.pi) * (frequency[block] @ points.T)
        out[block, 0] = torch.cos(phase) @ values
        out[block, 1] = torch.sin(phase) @ values
    return out


@torch.library.custom_op("nvdd_pme::wave_values", mutates_args=())
def _values(points: torch.Tensor, waves: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """(n, 3), (K, 2, C), (K, 3) -> (n, C)."""
    out = waves.new_zeros((points.shape[0], waves.shape[2]))
    for block in _blocks(points.shape[0], frequency.shape[0]):
        phase = (2.0 * math.pi) * (points @ frequency[block].T)
        out += torch.cos(phase) @ waves[block, 0]
        out += torch.sin(phase) @ waves[block, 1]
    return out


@_sums.register_fake
def _(points: torch.Tensor, values: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    return values.new_empty((frequency.shape[0], 2, values.shape[1]))


@_values.register_fake
def _(points: torch.Tensor, waves: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    return waves.new_empty((points.shape[0], waves.shape[2]))


def _slopes(points: torch.Tensor, waves: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `_values` for the points, (n, C, 3)."""
    turned = (2.0 * math.pi) * torch.stack([waves[:, 1], -waves[:, 0]], dim=1)
    moved = (turned[..., None] * frequency[:, None, None, :]).flatten(2)
    slopes: torch.Tensor = _values(points, moved, frequency)
    return slopes.view(points.shape[0], waves.shape[2], 3)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_sums(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    points, values, frequency = ctx.saved_tensors
    for_points = (values[:, :, None] * _slopes(points, grad, frequency)).sum(1)
    return for_points, _values(points, grad, frequency), None


def _backward_values(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    points, waves, frequency = ctx.saved_tensors
    for_points = (grad[:, :, None] * _slopes(points, waves, frequency)).sum(1)
    return for_points, _sums(points, grad, frequency), None


_sums.register_autograd(_backward_sums, setup_context=_save)
_values.register_autograd(_backward_values, setup_context=_save)


class WaveSum:
    """The reciprocal part of the Ewald sum: structure factors of owned rows, summed over ranks once, then squared.

    Wave vectors are chosen in the first call and kept: an object is for one cell.
    """

    def __init__(self) -> None:
        self._frequency: torch.Tensor | None = None

    def __call__(
        self,
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *,
        alpha: float,
        reach: tuple[int, int, int],
        k_cutoff: float,
        potential: bool = False,
    ) -> torch.Tensor:
        """Return this rank's share of the energy (), or the potential at its rows (n_owned,); see `ReciprocalEngine`.

        Wave vectors are those up to `k_cutoff` (1/Angstrom) of the cell as it is without a strain that is being
        differentiated; `reach` is the largest frequency along each axis.
        """
        if self._frequency is None:
            self._frequency = half_space(cell.detach(), reach, k_cutoff)
        frequency = self._frequency
        points = positions @ inverted(cell)
        total = sum_over_ranks(wave_sums(points, charges, frequency))
        k2 = squared_lengths(cell, *frequency.unbind(1))
        g = green(k2, volume_of(cell), alpha)
        g = torch.cat([g[:1], 2.0 * g[1:]])  # k and -k
        if potential:
            return wave_values(points, 2.0 * g[:, None] * total, frequency)
        return (g * total.square().sum(1)).sum() / n_ranks()


def half_space(cell: torch.Tensor, reach: tuple[int, int, int], k_cutoff: float) -> torch.Tensor:
    """Return frequencies (K, 3) of wave vectors within the cutoff, one of each pair (m, -m), zero first."""
    axes = [torch.arange(-n, n + 1, dtype=torch.float64, device=cell.device) for n in reach]
    a, b, c = (m.flatten() for m in torch.meshgrid(*axes, indexing="ij"))
    half = (a > 0) | ((a == 0) & ((b > 0) | ((b == 0) & (c > 0))))
    keep = half & (squared_lengths(cell, a, b, c) <= k_cutoff * k_cutoff)
    chosen = torch.stack([a, b, c], dim=1)[keep]
    return torch.cat([chosen.new_zeros((1, 3)), chosen])
