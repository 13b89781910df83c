"""Coordination numbers and dispersion energies as torch operators.

Key objects: `coordination` (``nvdd_dftd3::coordination``) and `dispersion` (``nvdd_dftd3::dispersion``), with
their derivatives ``..._gradient``, and `system_energy`, sums of the latter. Invariant: all have first derivatives with
respect to everything that depends on positions, by kernels, and higher ones in plain torch. Layer: plugin.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd_dftd3 import kernels
from nvdd_dftd3.formula import count_gradient_vjp, energy_gradient_vjp
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
    launch(kernels.count_kernel(), n * _lanes(points), arguments, kernels.COUNT_TYPES)
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
    launch(kernels.count_gradient_kernel(), n * _lanes(points), arguments, kernels.COUNT_GRADIENT_TYPES)
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
    """Sum pair energies into owned rows (n_owned,), eV, half of a pair to each end.

    Parameters
    ----------
    points, splits, senders, rows, half, cutoff
        As for `coordination`; differentiable with respect to `points` and `cn`.
    cn : Tensor, shape (n_local,), float64
        Coordination numbers, of ghosts too.
    species : Tensor, shape (n_local,), int32
        Place of each row's element in the tables.
    reference_cn, reference_c6, pairs : Tensor
        See `References`.
    n_owned : int
    """
    tensors = (points, cn, species, reference_cn, reference_c6, pairs)
    edges = (splits, senders, rows, half, n_owned, cutoff)
    return _energies(points.new_ones(n_owned), *tensors, *edges, False)[0]


@torch.library.custom_op("nvdd_dftd3::system_energy", mutates_args=())
def system_energy(
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
    system: torch.Tensor,
    n_systems: int,
    derive: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the energies of `dispersion` by system.

    Pairs are within a system, so the derivatives of the sum of all energies are, times the systems' weights, those of
    any weighted sum: they are computed in the same pass, and nobody has to look at weights.

    Parameters
    ----------
    system : Tensor, shape (n_local,), int64
    n_systems : int
    derive : bool
        Whether to compute derivatives, which is nearly always what is asked for next; a graph is kept either way.
    points, cn, species, ...
        As for `dispersion`.

    Returns
    -------
    energy (n_systems,), eV
        Differentiable with respect to `points` and `cn`.
    gradient (n_extended, 3), cn_gradient (n_local,)
        With `derive`; otherwise empty. Not differentiable.
    """
    tensors = (points, cn, species, reference_cn, reference_c6, pairs)
    edges = (splits, senders, rows, half, n_owned, cutoff)
    rows_energy, gradient, cn_gradient = _energies(points.new_ones(n_owned), *tensors, *edges, derive)
    if n_systems == 1:
        energy = rows_energy.sum()[None]
    else:
        energy = rows_energy.new_zeros(n_systems).index_add_(0, system[:n_owned], rows_energy)
    return energy, gradient, cn_gradient


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
    tensors = (points, cn, species, reference_cn, reference_c6, pairs)
    return _energies(weight, *tensors, splits, senders, rows, half, n_owned, cutoff, True)[1:]


def _energies(
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
    derive: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return energies and, with `derive`, the derivatives of their weighted sum; otherwise these are empty."""
    n = splits.shape[0] - 1
    references = References(reference_cn, reference_c6, reference_cn, pairs)
    weights = references.weights(cn, species.long())[: 2 if derive else 1]
    c6 = torch.cat([references.c6_rows(w[:n], species[:n].long()) for w in weights], dim=2)
    out = (
        points.new_zeros(n_owned),
        points.new_zeros((points.shape[0] if derive else 0, 3)),
        points.new_zeros(cn.shape[0] if derive else 0),
    )
    tables = (species.contiguous(), pairs.shape[0], pairs.view(-1, 4), c6.view(-1))
    arguments = (
        *(*_list(points, splits, senders, rows, half, cutoff), n_owned, *tables),
        *(torch.cat(weights, dim=1).view(-1), weight.contiguous(), *out),
    )
    kernel = kernels.energy_kernel(reference_cn.shape[1], derive)
    launch(kernel, n * _lanes(points), arguments, kernels.ENERGY_TYPES)
    return out


@coordination.register_fake
def _(points: torch.Tensor, radii: torch.Tensor, splits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return points.new_empty(splits.shape[0] - 1)


@coordination_gradient.register_fake
def _(weight: torch.Tensor, points: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(points, memory_format=torch.contiguous_format)


@dispersion.register_fake
def _(points: torch.Tensor, *rest: Any) -> torch.Tensor:
    return points.new_empty(rest[-2])


@system_energy.register_fake
def _(points: torch.Tensor, cn: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_systems, derive = rest[-2:]
    n, n_local = (points.shape[0], cn.shape[0]) if derive else (0, 0)
    return points.new_empty(n_systems), points.new_empty((n, 3)), points.new_empty(n_local)


@dispersion_gradient.register_fake
def _(
    weight: torch.Tensor, points: torch.Tensor, cn: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(points, memory_format=torch.contiguous_format), torch.empty_like(cn)


def _keep_coordination(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _keep_dispersion(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.rest = inputs[9:]


def _keep_system_energy(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], inputs[12], *output[1:])
    ctx.rest, ctx.n_systems, ctx.derived = inputs[9:12], *inputs[13:]
    ctx.mark_non_differentiable(*output[1:])


def _keep_coordination_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.rest = inputs[6:]


def _keep_dispersion_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.rest = inputs[10:]


def _coordination_backward(ctx: Any, weight: torch.Tensor) -> tuple[Any, ...]:
    return (coordination_gradient(weight, *ctx.saved_tensors, *ctx.rest), *(None,) * 6)


def _dispersion_backward(ctx: Any, weight: torch.Tensor) -> tuple[Any, ...]:
    return (*dispersion_gradient(weight, *ctx.saved_tensors, *ctx.rest), *(None,) * 10)


def _system_energy_backward(ctx: Any, weight: torch.Tensor | None, *others: Any) -> tuple[Any, ...]:
    if weight is None:
        return (None,) * 15
    *inputs, system, gradient, cn_gradient = ctx.saved_tensors
    by_row = weight.expand(system.shape[0]) if ctx.n_systems == 1 else weight.index_select(0, system)
    # what is kept here has no derivatives of its own, so not for a graph that is kept
    if ctx.derived and not torch.is_grad_enabled():
        moved = gradient * (weight if ctx.n_systems == 1 else by_row.index_select(0, inputs[8])[:, None])
        return (moved, cn_gradient * by_row, *(None,) * 13)
    return (*dispersion_gradient(by_row[: ctx.rest[1]], *inputs, *ctx.rest), *(None,) * 13)


def _coordination_gradient_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    weight, points, radii, *tensors = ctx.saved_tensors
    half, cutoff = ctx.rest
    return (*count_gradient_vjp(gradient, weight, points, radii, (*tensors, half), cutoff), *(None,) * 6)


def _dispersion_gradient_backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    weight, points, cn, species, reference_cn, reference_c6, pairs, *tensors = ctx.saved_tensors
    half, _, cutoff = ctx.rest
    references = References(reference_cn, reference_c6, reference_cn, pairs)
    edges = (*tensors, half)
    found = energy_gradient_vjp(gradients, weight, points, cn, species, references, edges, cutoff)
    return (*found, *(None,) * 10)


coordination.register_autograd(_coordination_backward, setup_context=_keep_coordination)
dispersion.register_autograd(_dispersion_backward, setup_context=_keep_dispersion)
system_energy.register_autograd(_system_energy_backward, setup_context=_keep_system_energy)
coordination_gradient.register_autograd(
    _coordination_gradient_backward, setup_context=_keep_coordination_gradient
)
dispersion_gradient.register_autograd(_dispersion_gradient_backward, setup_context=_keep_dispersion_gradient)


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
