"""mace's convolution product as few matrix products over all channels: e3nn's numbers, in a fraction of its time.

e3nn multiplies path by path, and for each makes tensors of edges that it permutes and joins. What mace asks of it is
narrower: channel u of a sender, times the attributes of an edge, gives channel u of a message. So the coefficients of
an edge are a small matrix, the same for all channels, and with channels last a block of paths is one batched product
and one multiplication by weights. The coefficients are asked of the product itself. Layer: plugin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch


class Product(Protocol):
    """Messages of edges, in whatever layout suits, and the way there and back, which is gone with rows, not edges."""

    def laid_out(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (n, A) of mace in the layout of `messages`."""

    def messages(
        self, rows: torch.Tensor, attributes: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return messages (E, C_k), of rows (E, A) laid out, attributes (E, B) and weights (E, W)."""

    def put_back(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return sums (n, C_k) of messages as rows (n, C) of mace."""


def product_of_edges(module: Any) -> Product:
    """Return the quickest way to what a tensor product of mace's convolution computes."""
    return Channelwise(module) if _is_channelwise(module) else AsItIs(module)


class AsItIs:
    """A tensor product asked as mace asks it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def laid_out(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return rows

    def messages(
        self, rows: torch.Tensor, attributes: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return what the module gives."""
        return (self._module(rows, attributes, weights),)

    def put_back(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the only sum."""
        return sums[0]


@dataclass(frozen=True)
class _Paths:
    """Paths next to each other that have as many channels, and as many components (2l + 1) in the output."""

    number: int
    channels: int
    components: int
    group: int
    """Which group of the inputs has this number of channels."""
    inputs: int
    """Components of that group."""

    @property
    def outputs(self) -> int:
        return self.number * self.components


class Channelwise:
    """A tensor product whose every path is channel by channel, mode ``uvu`` with one channel of attributes.

    Inputs with as many channels are one group. A laid out row is, group by group, (components, channels).

    Parameters
    ----------
    module : e3nn.o3.TensorProduct
        One for which `_is_channelwise` is true.
    """

    def __init__(self, module: Any) -> None:
        inputs = [(one.mul, one.ir.dim) for one in module.irreps_in1]
        self._inputs = inputs
        self._slices = list(module.irreps_in1.slices())
        channels = list(dict.fromkeys(mul for mul, _ in inputs))
        self._groups = [[at for at, (mul, _) in enumerate(inputs) if mul == one] for one in channels]
        self._sizes = [
            (sum(inputs[at][1] for at in group), mul)
            for group, mul in zip(self._groups, channels, strict=True)
        ]
        outputs = [(one.mul, one.ir.dim) for one in module.irreps_out]
        self._paths = [
            _Paths(len(list(same)), mul, dim, channels.index(mul), self._sizes[channels.index(mul)][0])
            for (mul, dim), same in groupby(outputs)
        ]
        self._coefficients = self._asked(module)

    def _asked(self, module: Any) -> torch.Tensor:
        """Return (B, sum of outputs times inputs): by which attribute what component goes where.

        The product is asked for every component and attribute alone, of the first channel, weights being one.
        """
        answers = [self._answers(module, group) for group in self._groups]
        # the first channel's components of each path
        places = [
            range(at.start, at.start + one.ir.dim)
            for at, one in zip(module.irreps_out.slices(), module.irreps_out, strict=True)
        ]
        found, done = [], 0
        for paths in self._paths:
            firsts = list(itertools.chain(*places[done : done + paths.number]))
            done += paths.number
            found.append(answers[paths.group][:, :, firsts].permute(1, 2, 0).flatten(1))
        return torch.cat(found, 1)

    def _answers(self, module: Any, group: list[int]) -> torch.Tensor:
        """Return (inputs, B, C): what the product gives for each component of a group and each attribute."""
        constant = next(module.buffers())  # e3nn keeps its output's mask, in any product
        real = {"dtype": constant.dtype, "device": constant.device}
        places = [self._slices[at].start + k for at in group for k in range(self._inputs[at][1])]
        n_inputs, n_attributes = len(places), module.irreps_in2.dim
        rows = torch.eye(module.irreps_in1.dim, **real)[places].repeat_interleave(n_attributes, 0)
        attributes = torch.eye(n_attributes, **real).repeat(n_inputs, 1)
        with torch.no_grad():
            out = module(rows, attributes, torch.ones(len(rows), module.weight_numel, **real))
        answers: torch.Tensor = out.view(n_inputs, n_attributes, -1)
        return answers

    def laid_out(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows with channels last."""
        parts = []
        for at in itertools.chain(*self._groups):
            mul, dim = self._inputs[at]
            parts.append(rows[:, self._slices[at]].reshape(-1, mul, dim).transpose(1, 2).flatten(1))
        return torch.cat(parts, 1)

    def messages(
        self, rows: torch.Tensor, attributes: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return, for each of the paths, (E, paths times components times channels)."""
        n = rows.shape[0]
        of_groups = [
            part.view(n, *size)
            for part, size in zip(
                rows.split([d * mul for d, mul in self._sizes], 1), self._sizes, strict=True
            )
        ]
        matrices = (attributes @ self._coefficients).split([p.outputs * p.inputs for p in self._paths], 1)
        factors = weights.split([p.number * p.channels for p in self._paths], 1)
        found = []
        for paths, matrix, weight in zip(self._paths, matrices, factors, strict=True):
            given, factor = of_groups[paths.group], weight.view(n, paths.number, 1, paths.channels)
            if paths.inputs == 1:  # one number of the sender a channel: no sum, and weights go to it first
                made = matrix.view(n, paths.number, paths.components, 1) * (factor * given[:, None])
            else:
                summed = torch.bmm(matrix.view(n, paths.outputs, paths.inputs), given)
                made = summed.view(n, paths.number, paths.components, paths.channels) * factor
            found.append(made.view(n, paths.outputs * paths.channels))
        return tuple(found)

    def put_back(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return sums with components last."""
        parts = []
        for paths, total in zip(self._paths, sums, strict=True):
            shaped = total.view(-1, paths.number, paths.components, paths.channels)
            parts.append(shaped.transpose(2, 3).flatten(1))
        return torch.cat(parts, 1)


def _is_channelwise(module: Any) -> bool:
    """Tell whether a module is a tensor product that `Channelwise` can do, with weights in the order of outputs."""
    paths = getattr(module, "instructions", None)
    if paths is None or getattr(module, "shared_weights", True) or not len(paths):
        return False
    in_order = [path.i_out for path in paths] == list(range(len(module.irreps_out)))
    some = all(one.mul for one in module.irreps_in1)
    return (
        some
        and in_order
        and all(
            path.connection_mode == "uvu"
            and path.has_weight
            and module.irreps_in2[path.i_in2].mul == 1
            and module.irreps_in1[path.i_in1].mul == module.irreps_out[path.i_out].mul
            for path in paths
        )
    )
