"""mace's symmetric contraction by monomials: the same polynomials, in a fraction of the products.

mace multiplies a row's components x_i by tensors U over all of (i1, .., in). Most of U is zero, and the product of
components is the same in any order: of 16^3 for correlation 3, some hundred products matter. They are made once for all
outputs, and U, summed over orders, is one small matrix. A block of rows is worked on at a time, so that its monomials
stay in a cache, and none is kept for gradients.

The polynomial: Batatia et al., MACE (2022), arXiv:2206.07697, equations 10 and 11. Layer: plugin.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nvdd_core.tensor import version_of

_BYTES, _BYTES_OF_GPUS = 2**21, 2**28
"""Of a block's monomials, which is about half of all: what a CPU's cache holds, and what keeps a GPU busy."""

Monomial = tuple[int, ...]
"""The components that are multiplied, sorted."""


class Contraction(torch.nn.Module):
    """Stands for a ``SymmetricContraction`` of mace, whose parameters it reads and doesn't have.

    Parameters
    ----------
    module : mace.modules.symmetric_contraction.SymmetricContraction
        One for which `serves_contraction` is true.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._parts = list(module.contractions)  # a list is no submodule
        tensors = [[part.U_tensors(n) for n in range(1, int(part.correlation) + 1)] for part in self._parts]
        tables = [[_table(one, n) for n, one in enumerate(of_part, 1)] for of_part in tensors]
        self._monomials = _needed(tables, tensors[0][0].shape[-2])
        self._steps = [_Step.of(*pair, tensors[0][0].device) for pair in itertools.pairwise(self._monomials)]
        self._matrices = [
            [_matrix(n, *given) for n, given in enumerate(zip(*of_part, self._monomials, strict=False), 1)]
            for of_part in zip(tensors, tables, strict=True)
        ]

    def forward(self, rows: torch.Tensor, attributes: torch.Tensor) -> torch.Tensor:
        """Return (n, C) of rows (n, channels, components) and elements (n, elements)."""
        of_row = sum(len(one) for one in self._monomials) * rows.shape[1] * rows.element_size()
        size = max(1, (_BYTES_OF_GPUS if rows.is_cuda else _BYTES) // of_row)
        weights = [[*reversed(list(part.weights)), part.weights_max] for part in self._parts]
        now = Unchanged(itertools.chain(*weights))
        found = [
            checkpoint(self._block, *given, weights, now, use_reentrant=False, preserve_rng_state=False)
            for given in zip(rows.split(size), attributes.split(size), strict=True)
        ]
        return torch.cat(found)

    def _block(
        self,
        rows: torch.Tensor,
        attributes: torch.Tensor,
        weights: list[list[torch.Tensor]],
        then: Unchanged,
    ) -> torch.Tensor:
        """Return `forward` of some rows; again for gradients, when nothing may have changed."""
        then.check(itertools.chain(*weights))
        n, channels, components = rows.shape
        monomials = [rows.permute(2, 0, 1).reshape(components, n * channels)]
        for step in self._steps:
            monomials.append(_Products.apply(monomials[0], monomials[-1], step))
        found = []
        for matrices, of_degrees in zip(self._matrices, weights, strict=True):
            terms = []
            # outputs may need fewer degrees than others
            for values, matrix, weight in zip(monomials, matrices, of_degrees, strict=False):
                paths = weight.shape[1]
                outputs = matrix.shape[0] // paths
                of_rows = (attributes @ weight.flatten(1)).view(n, paths, channels)
                factors = of_rows.transpose(0, 1).reshape(1, paths, n * channels)
                terms.append(((matrix @ values).view(outputs, paths, n * channels) * factors).sum(1))
            total = functools.reduce(torch.add, terms)
            found.append(total.view(outputs, n, channels).permute(1, 2, 0).flatten(1))
        return torch.cat(found, 1)


class Unchanged:
    """Parameters as they are in an evaluation, of which a part is done again for gradients.

    Parameters
    ----------
    parameters : iterable of Tensor
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._seen = [(one, version_of(one)) for one in parameters]

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Compare the parameters of now.

        Raises
        ------
        RuntimeError
            As torch does for what it has kept.
        """
        for now, (then, version) in zip(parameters, self._seen, strict=True):
            if now is not then or version_of(now) != version:
                raise RuntimeError(
                    "mace: parameters changed between an evaluation and its derivative, for which a part is evaluated "
                    "again; take derivatives first, or give --option blockwise=false"
                )


@dataclass(frozen=True)
class _Step:
    """How monomials are made of those of one degree less: which of these, and for how many each component is next."""

    lower: torch.Tensor
    counts: list[int]

    @staticmethod
    def of(lower: list[Monomial], wanted: list[Monomial], device: torch.device) -> _Step:
        place = {one: at for at, one in enumerate(lower)}
        last = [one[-1] for one in wanted]
        counts = [last.count(k) for k in range(max(last, default=0) + 1)]
        places = [place[one[:-1]] for one in wanted]
        return _Step(torch.tensor(places, dtype=torch.int64, device=device), counts)


class _Products(torch.autograd.Function):
    """Multiplies monomials; given are the components (d, N), the monomials of one degree less (m, N), and the step."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        components, lower, step = given
        ctx.save_for_backward(components, lower)
        ctx.step = step
        found: torch.Tensor = lower.index_select(0, step.lower)
        for component, part in zip(components, found.split(step.counts), strict=False):
            part.mul_(component)
        return found

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (components, lower), step = ctx.saved_tensors, ctx.step
        taken = lower.index_select(0, step.lower).split(step.counts)
        slope = slopes[0].split(step.counts)
        of_components = [(one * other).sum(0) for one, other in zip(slope, taken, strict=True)]
        of_components += [torch.zeros_like(components[0])] * (len(components) - len(of_components))
        of_taken = torch.cat([one * component for one, component in zip(slope, components, strict=False)])
        of_lower = torch.zeros_like(lower).index_add(0, step.lower, of_taken)
        return torch.stack(of_components), of_lower, None


def _table(tensor: torch.Tensor, degree: int) -> dict[Monomial, list[int]]:
    """Return which places of (i1, .., in), flat, make a monomial, where U is more than rounding anywhere."""
    components = tensor.shape[-2]
    flat = tensor.reshape(-1, components**degree, tensor.shape[-1]).abs().amax((0, 2))
    smallest = torch.finfo(tensor.dtype).eps * flat.max()
    found: dict[Monomial, list[int]] = {}
    for place in torch.nonzero(flat > smallest).flatten().tolist():
        digits = [place // components**n % components for n in range(degree)]
        found.setdefault(tuple(sorted(digits)), []).append(place)
    return found


def _needed(tables: list[list[dict[Monomial, list[int]]]], components: int) -> list[list[Monomial]]:
    """Return the monomials of degree 1, 2, and so on that outputs or higher degrees need, by their last component."""
    wanted: set[Monomial] = set()
    found = []
    for degree in range(max(len(of_part) for of_part in tables), 1, -1):
        wanted = {one[:-1] for one in wanted}
        wanted.update(*(of_part[degree - 1] for of_part in tables if len(of_part) >= degree))
        found.append(sorted(wanted, key=lambda one: (one[-1], one)))
    return [[(k,) for k in range(components)], *reversed(found)]


def _matrix(
    degree: int, tensor: torch.Tensor, table: dict[Monomial, list[int]], wanted: list[Monomial]
) -> torch.Tensor:
    """Return (outputs times paths, monomials) of U ([outputs,] i1, .., in, paths), summed over orders of i."""
    paths = tensor.shape[-1]
    flat = tensor.reshape(-1, tensor.shape[-2] ** degree, paths)
    found = flat.new_zeros(flat.shape[0], len(wanted), paths)
    for at, one in enumerate(wanted):
        found[:, at] = flat[:, table.get(one, [])].sum(1)
    return found.transpose(1, 2).reshape(-1, len(wanted)).contiguous()


def serves_contraction(module: Any) -> bool:
    """Tell whether a module is mace's own symmetric contraction, with parameters of its own."""
    parts = getattr(module, "contractions", None)
    return parts is not None and all(
        hasattr(part, "U_tensors") and hasattr(part, "weights_max") and hasattr(part, "weights")
        for part in parts
    )
