"""Pairs as torch operators, so that autograd and torch.compile see them.

Key objects: `pair` (``nvdd_lj::pair``: row energies, forces and virials of extended rows) and
`pair_gradient` (``nvdd_lj::pair_gradient``, its derivative). Invariant: the row energies have first
derivatives with respect to the extended positions; everything else about derivatives raises `NvddError`,
nothing is ever silently zero. Layer: plugin.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from nvdd_core.errors import NvddError
from nvdd_lj.engines import ThreadEngine
from nvdd_lj.pairs import PairResults, PairWork
from nvdd_lj.rows import PairRows
from nvdd_lj.variants import Virial, Want

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("nvdd_lj::pair", mutates_args=())
def pair(
    positions: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    image_rows: torch.Tensor,
    system: torch.Tensor,
    species: torch.Tensor | None,
    coefficients: torch.Tensor,
    n_systems: int,
    half: bool,
    cutoff: float,
    linear_term: bool,
    want: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Evaluate pairs.

    Parameters
    ----------
    positions : (n_extended, 3)
        Rows ``[owned | ghost | image]``, Angstrom; the row energies are differentiable with respect to them.
    row_splits, senders, image_rows, system, species, coefficients, n_systems, half, cutoff, linear_term
        See `PairRows`.
    want : int
        `Want.to_int`.

    Returns
    -------
    energy (n_owned,), forces (n_owned, 3), virial (S, 3, 3) float64, row virial (n_owned, 3, 3)
        Empty tensors of the same rank where not wanted.
    """
    tensors = (row_splits, senders, image_rows, system, coefficients)
    rows = _rows(positions.shape[0], tensors, species, n_systems, half, cutoff, linear_term)
    results = PairWork(rows, extend=False).evaluate(positions, _no_cell(positions), Want.from_int(want))
    return _filled(results, coefficients)


@pair.register_fake
def _(
    positions: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    image_rows: torch.Tensor,
    system: torch.Tensor,
    species: torch.Tensor | None,
    coefficients: torch.Tensor,
    n_systems: int,
    half: bool,
    cutoff: float,
    linear_term: bool,
    want: int,
) -> Outputs:
    asked = Want.from_int(want)
    n = row_splits.shape[0] - 1
    virial = positions.new_empty((n_systems if asked.virial else 0, 3, 3), dtype=torch.float64)
    return (
        coefficients.new_empty(n if asked.energy else 0),
        coefficients.new_empty((n if asked.forces else 0, 3)),
        virial,
        coefficients.new_empty((n if asked.virial is Virial.ROWS else 0, 3, 3)),
    )


@torch.library.custom_op("nvdd_lj::pair_gradient", mutates_args=())
def pair_gradient(
    weight: torch.Tensor,
    positions: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    image_rows: torch.Tensor,
    system: torch.Tensor,
    species: torch.Tensor | None,
    coefficients: torch.Tensor,
    half: bool,
    cutoff: float,
    linear_term: bool,
) -> torch.Tensor:
    """Differentiate ``sum_i weight_i energy_i`` with respect to the extended positions.

    Parameters
    ----------
    weight : (n_owned,)
        Weight of each row's energy. The other parameters are those of `pair`.

    Returns
    -------
    (n_extended, 3)
    """
    tensors = (row_splits, senders, image_rows, system, coefficients)
    engine = ThreadEngine(
        _rows(positions.shape[0], tensors, species, 1, half, cutoff, linear_term), extend=False
    )
    real = positions.to(coefficients).contiguous()
    return engine.gradient(real, _no_cell(real), weight.to(coefficients).contiguous()).to(positions.dtype)


@pair_gradient.register_fake
def _(
    weight: torch.Tensor,
    positions: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    image_rows: torch.Tensor,
    system: torch.Tensor,
    species: torch.Tensor | None,
    coefficients: torch.Tensor,
    half: bool,
    cutoff: float,
    linear_term: bool,
) -> torch.Tensor:
    return torch.empty_like(positions, memory_format=torch.contiguous_format)


def _setup_pair(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    asked = Want.from_int(inputs[-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[8:11]
    wanted = (asked.energy, asked.forces, bool(asked.virial), asked.virial is Virial.ROWS)
    ctx.mark_non_differentiable(*(t for t, there in zip(output, wanted, strict=True) if not there))


def _backward_pair(ctx: Any, energy: Any, *others: Any) -> tuple[Any, ...]:
    if any(gradient is not None for gradient in others):
        _refuse("the forces or the virial of nvdd_lj::pair")
    if energy is None:
        return (None,) * 12
    return (pair_gradient(energy, *ctx.saved_tensors, *ctx.rest), *(None,) * 11)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Nothing is kept: there is no second derivative."""


def _backward_gradient(ctx: Any, gradient: Any) -> NoReturn:
    _refuse("the gradient of the Lennard-Jones energy")


def _refuse(what: str) -> NoReturn:
    raise NvddError(
        f"lj: {what} can't be differentiated again: the kernel has first derivatives of the energy only. "
        "Use finite differences of the forces for second derivatives"
    )


pair.register_autograd(_backward_pair, setup_context=_setup_pair)
pair_gradient.register_autograd(_backward_gradient, setup_context=_setup_gradient)


def _rows(
    n_extended: int,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    species: torch.Tensor | None,
    n_systems: int,
    half: bool,
    cutoff: float,
    linear_term: bool,
) -> PairRows:
    """Gather what the operators are given, in the order of their arguments."""
    row_splits, senders, image_rows, system, coefficients = tensors
    return PairRows(
        n_owned=row_splits.shape[0] - 1,
        n_local=n_extended - image_rows.shape[0],
        row_splits=row_splits.contiguous(),
        senders=senders.contiguous(),
        image_rows=image_rows.contiguous(),
        image_shifts=image_rows.new_zeros((1, 3)),
        system=system.contiguous(),
        n_systems=n_systems,
        half=half,
        species=None if species is None else species.contiguous(),
        coefficients=coefficients.contiguous(),
        cutoff=cutoff,
        linear_term=linear_term,
    )


def _no_cell(positions: torch.Tensor) -> torch.Tensor:
    return positions.new_zeros((1, 3, 3))


def _filled(results: PairResults, like: torch.Tensor) -> Outputs:
    """Stand-ins for what was not wanted: an operator returns tensors only."""
    return (
        like.new_empty(0) if results.energy is None else results.energy,
        like.new_empty((0, 3)) if results.forces is None else results.forces,
        like.new_empty((0, 3, 3), dtype=torch.float64) if results.virial is None else results.virial,
        like.new_empty((0, 3, 3)) if results.row_virial is None else results.row_virial,
    )
