"""Coordination numbers and dispersion energies as torch operators.

Key objects: `coordination` (``nvdd_dftd3::coordination``) and `dispersion` (``nvdd_dftd3::dispersion``), with
their derivatives ``..._gradient``. Invariant: both have first derivatives with respect to everything that
depends on positions; a second derivative raises `NvddError`, nothing is silently zero. Layer: plugin.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from nvdd_core.errors import NvddError
from nvdd_dftd3 import kernels
from nvdd_dftd3.references import References
from nvdd_dftd3.start import launch

_GPU_LANES = 32


@torch.library.custom_op("nvdd_dftd3::coordination", mutates_args=())
def coordination(
    points: torch.Tensor,
    radii: torch.Tensor,
    splits: torch.Tensor,
    senders: torch.Tensor,
    rows: torch.Tensor,
    half: bool,
    cutoff: float,
) -> torch.Tensor:
    """Count the neighbours of receivers.

    Parameters
    ----------
    points : Tensor, shape (n_extended, 3), float64
        Rows ``[owned | ghost | image]``, Angstrom.
    radii : Tensor, shape (n_local,), float64
        Covalent radii, Angstrom.
    splits, senders : Tensor, shape (n_receivers + 1,), (E,), int32
        The neighbour list.
    rows : Tensor, shape (n_extended,), int32
        Local row that each extended row shows.
    half : bool
        Whether a pair of receivers is listed once.
    cutoff : float
        Angstrom.

    Returns
    -------
    Tensor, shape (n_receivers,)
    """
    n = splits.shape[0] - 1
    cn = points.new_zeros(n)
    arguments = (*_list(points, splits, senders, rows, half, cutoff), n, radii.contiguous(), cn)
    launch(kernels.count_kernel(), (n, _lanes(points)), arguments, kernels.COUNT_TYPES)
    return cn


@torch.library.custom_op("nvdd_dftd3::coordination_gradient", mutates_args=())
def coordination_gradient(
    weight: torch.Tensor,
    points: torch.Tensor,
    radii: torch.Tensor,
    splits: torch.Tensor,
    senders: torch.Tensor,
    rows: torch.Tensor,
    half: bool,
    cutoff: float,
) -> torch.Tensor:
    """Differentiate ``sum_i weight_i cn_i`` with respect to `points`, (n_extended, 3)."""
    n = splits.shape[0] - 1
    gradient = torch.zeros_like(points, memory_format=torch.contiguous_format)
    given = (radii.contiguous(), weight.contiguous(), gradient)
    arguments = (*_list(points, splits, senders, rows, half, cutoff), n, *given)
    launch(
        kernels.count_gradient_kernel(), (n, _lanes(points)), arguments, kernels.COUNT_GRADIENT_TYPES
    )
    return gradient


@torch.library.custom_op("nvdd_dftd3::dispersion", mutates_args=())
def dispersion(
    points: torch.Tensor,
    cn: torch.Tensor,
    species: torch.Tensor,
    reference_cn: torch.Tensor,
    reference_c6: torch.Tensor,
    pairs: torch.Tensor,
    splits: torch.Tensor,
    senders: torch.Tensor,
    rows: torch.Tensor,
    half: bool,
    n_owned: int,
    cutoff: float,
) -> torch.Tensor:
    """Sum pair energies into owned rows, half of a pair to each end.

    Parameters
    ----------
    points, splits, senders, rows, half, cutoff
        As for `coordination`.
    cn : Tensor, shape (n_local,), float64
        Coordination numbers, of ghosts too.
    species : Tensor, shape (n_local,), int32
        Place of each row's element in the tables.
    reference_cn, reference_c6, pairs : Tensor
        See `References`.
    n_owned : int

    Returns
    -------
    Tensor, shape (n_owned,)
        eV.
    """
    n = splits.shape[0] - 1
    references = References(reference_cn, reference_c6, reference_cn, pairs)
    weights, _ = references.weights(cn, species.long())
    c6 = references.c6_rows(weights[:n], species[:n].long())
    energy = points.new_zeros(n_owned)
    tables = (n_owned, species.contiguous(), pairs.shape[0], pairs.view(-1, 4), c6.view(-1), weights.view(-1))
    arguments = (*_list(points, splits, senders, rows, half, cutoff), *tables, energy)
    kernel = kernels.energy_kernel(reference_cn.shape[1])
    launch(kernel, (n, _lanes(points)), arguments, kernels.ENERGY_TYPES)
    return energy


@torch.library.custom_op("nvdd_dftd3::dispersion_gradient", mutates_args=())
def dispersion_gradient(
    weight: torch.Tensor,
    points: torch.Tensor,
    cn: torch.Tensor,
    species: torch.Tensor,
    reference_cn: torch.Tensor,
    reference_c6: torch.Tensor,
    pairs: torch.Tensor,
    splits: torch.Tensor,
    senders: torch.Tensor,
    rows: torch.Tensor,
    half: bool,
    n_owned: int,
    cutoff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate ``sum_i weight_i energy_i`` with respect to `points`, (n_extended, 3), and `cn`, (n_local,)."""
    n = splits.shape[0] - 1
    references = References(reference_cn, reference_c6, reference_cn, pairs)
    both = references.weights(cn, species.long())
    weights = torch.cat(both, dim=1)
    c6 = torch.cat([references.c6_rows(w[:n], species[:n].long()) for w in both], dim=2)
    gradient = torch.zeros_like(points, memory_format=torch.contiguous_format)
    cn_gradient = torch.zeros_like(cn)
    tables = (n_owned, species.contiguous(), pairs.shape[0], pairs.view(-1, 4), c6.view(-1), weights.view(-1))
    found = (weight.contiguous(), gradient, cn_gradient)
    arguments = (*_list(points, splits, senders, rows, half, cutoff), *tables, *found)
    kernel = kernels.energy_gradient_kernel(reference_cn.shape[1])
    launch(kernel, (n, _lanes(points)), arguments, kernels.ENERGY_GRADIENT_TYPES)
    return gradient, cn_gradient


@coordination.register_fake
def _(points: torch.Tensor, radii: torch.Tensor, splits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return points.new_empty(splits.shape[0] - 1)


@coordination_gradient.register_fake
def _(weight: torch.Tensor, points: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(points, memory_format=torch.contiguous_format)


@dispersion.register_fake
def _(points: torch.Tensor, *rest: Any) -> torch.Tensor:
    return points.new_empty(rest[-2])


@dispersion_gradient.register_fake
def _(
    weight: torch.Tensor, points: torch.Tensor, cn: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(points, memory_format=torch.contiguous_format), torch.empty_like(cn)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
    ctx.rest = tuple(value for value in inputs if not isinstance(value, torch.Tensor))


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept: there is no second derivative."""


def _coordination_backward(ctx: Any, weight: torch.Tensor) -> tuple[Any, ...]:
    return (coordination_gradient(weight, *ctx.saved_tensors, *ctx.rest), *(None,) * 6)


def _dispersion_backward(ctx: Any, weight: torch.Tensor) -> tuple[Any, ...]:
    return (*dispersion_gradient(weight, *ctx.saved_tensors, *ctx.rest), *(None,) * 10)


def _refuse(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
    raise NvddError(
        "dftd3: forces and stress can't be differentiated again: the kernels have first derivatives of the energy "
        "only. Use finite differences of the forces for second derivatives"
    )


coordination.register_autograd(_coordination_backward, setup_context=_keep)
dispersion.register_autograd(_dispersion_backward, setup_context=_keep)
coordination_gradient.register_autograd(_refuse, setup_context=_keep_nothing)
dispersion_gradient.register_autograd(_refuse, setup_context=_keep_nothing)


def _list(
    points: torch.Tensor,
    splits: torch.Tensor,
    senders: torch.Tensor,
    rows: torch.Tensor,
    half: bool,
    cutoff: float,
) -> tuple[torch.Tensor | float, ...]:
    """Return what every kernel is given first."""
    tensors = (t.contiguous() for t in (points, splits, senders, rows))
    return (*tensors, int(half), cutoff * cutoff, _lanes(points))


def _lanes(points: torch.Tensor) -> int:
    """Threads that share a receiver."""
    return _GPU_LANES if points.is_cuda else 1
