"""e3nn's work in a model done differently: quicker, a block of edges or rows at a time, and nothing kept of these.

What e3nn's tensor products, the networks that make their weights and mace's contractions keep for gradients is most of
what a model needs memory for. Within `Blocks` each keeps nothing but what goes in. That costs one more evaluation of
them, which the ways of `nvdd_mace.channelwise` and `nvdd_mace.contraction` more than pay for. What is computed is the
same but for rounding. Networks that are trained save nothing.

Layer: plugin.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.errors import InputError
from nvdd_mace.adapters import summed_rows
from nvdd_mace.channelwise import product_of_edges
from nvdd_mace.contraction import Contraction, Unchanged, serves_contraction
from nvdd_mace.inspection import flag

_WEIGHTS, _WEIGHTS_OF_GPUS = 2**20, 2**28
"""Bytes of weights that make a block: messages then fit into a CPU's cache, or take some gigabytes of a GPU."""
_FEWEST = 256

AUTO = -1


def edges_at_once(blockwise: object, *, trains: bool) -> int:
    """Return what the option of this name asks for: how many edges, `AUTO`, or 0 for no blocks.

    Left alone, models work on blocks unless they are trained, which takes second derivatives.

    Raises
    ------
    InputError
        For anything but ``auto``, true, false or a number.
    """
    text = str(blockwise).lower()
    if is_left_alone(blockwise):
        return 0 if trains else AUTO
    if text.isdecimal() and int(text) > 1:
        return int(text)
    try:
        return AUTO if flag("blockwise", blockwise) else 0
    except InputError:
        raise InputError(
            f"mace: blockwise is {blockwise!r}; give auto, true, false or the number of edges to work on at a time"
        ) from None


def is_left_alone(blockwise: object) -> bool:
    """Tell whether the option is ``auto``, so that it has no effect where it can't have one."""
    return str(blockwise).lower() == "auto"


def serves_blocks(module: torch.nn.Module) -> bool:
    """Tell whether this release of mace calls convolutions that sum for themselves, and the model has none yet."""
    # mace asks for an attribute of this name, so it is among the constants of its code
    return all(
        "conv_fusion" in type(one).forward.__code__.co_consts and not hasattr(one, "conv_fusion")
        for one in _interactions(module)
    )


class Blocks(AbstractContextManager[None]):
    """Has a model's interactions and products work blockwise, for the time of a `with` statement.

    Outside of it the model is as its file made it, and is saved so.

    Parameters
    ----------
    module : Module
    block : int
        Edges at a time, or `AUTO`.

    Raises
    ------
    InputError
        Where `serves_blocks` is false.
    """

    def __init__(self, module: torch.nn.Module, block: int) -> None:
        if not serves_blocks(module):
            raise InputError(
                "mace: blockwise needs a release of mace-torch whose interactions can do with convolutions that sum "
                "for themselves, and a model that has none yet"
            )
        self._module, self._block = module, block
        self._interactions = _interactions(module)
        self._parts: list[tuple[Any, dict[str, torch.nn.Module]]] = []
        self._made_for: list[torch.nn.Module] = []
        self._make()

    def _make(self) -> None:
        """Make the parts for those that the model has."""
        self._parts = [
            (
                one,
                {
                    "conv_tp": Blockwise(one.conv_tp, one.conv_tp_weights, self._block),
                    "conv_tp_weights": _Later(),
                },
            )
            for one in self._interactions
        ]
        self._parts += [
            (one, {"symmetric_contractions": Contraction(one.symmetric_contractions)})
            for one in getattr(self._module, "products", ())
            if serves_contraction(getattr(one, "symmetric_contractions", None))
        ]
        self._made_for = self._live()

    def _live(self) -> list[torch.nn.Module]:
        return [owner._modules[name] for owner, parts in self._parts for name in parts]

    def __enter__(self) -> None:
        if any(one is not other for one, other in zip(self._live(), self._made_for, strict=True)):
            self._make()  # somebody gave the model another part
        self._swap()
        # mace then calls what sums for itself as it calls fused kernels
        for interaction in self._interactions:
            interaction.conv_fusion = True

    def __exit__(self, *exc: object) -> None:
        self._swap()
        for interaction in self._interactions:
            del interaction.conv_fusion

    def _swap(self) -> None:
        """Exchange the parts of the model's blocks and those kept here."""
        for owner, parts in self._parts:
            for name, part in parts.items():
                parts[name], owner._modules[name] = owner._modules[name], part


def _interactions(module: Any) -> list[Any]:
    return list(module.interactions)


class _Later(torch.nn.Module):
    """Stands for the network that makes an edge's weights, which is asked only when a block of edges is worked on."""

    def forward(self, features: torch.Tensor) -> _Weights:
        """Return what the weights will be made of, from features (E, F)."""
        return _Weights((features,))


@dataclass(frozen=True)
class _Weights:
    """Stands for weights of edges: features, and factors (E, 1) that mace multiplies weights by."""

    parts: tuple[torch.Tensor, ...]

    def __mul__(self, factor: torch.Tensor) -> _Weights:
        return _Weights((*self.parts, factor))


class Blockwise(torch.nn.Module):
    """A tensor product of edges with the sum into receivers that follows it.

    Parameters
    ----------
    product : Module
        Takes senders' rows (E, A), attributes (E, B) and weights (E, W), gives messages (E, C); has no parameters.
    network : Module
        Makes weights (E, W) of features (E, F).
    block : int
        Edges at a time; `AUTO` chooses by what weights take.
    """

    def __init__(self, product: torch.nn.Module, network: torch.nn.Module, block: int) -> None:
        super().__init__()
        self.product, self.network, self.block = product, network, block
        self._quick = product_of_edges(product)

    def forward(
        self, rows: torch.Tensor, attributes: torch.Tensor, weights: _Weights, edges: torch.Tensor
    ) -> torch.Tensor:
        """Return sums (n, C) of the messages of edges (2, E) [sender, receiver]."""
        of_edges = (attributes, *weights.parts)
        rows = self._quick.laid_out(rows)
        n, size = summed_rows(rows.shape[0]), self._size(rows)
        # gradients of parameters need all that is kept
        trained = any(p.requires_grad for p in self.network.parameters())
        if trained or edges.shape[1] <= size:
            messages = self.messages(rows.index_select(0, edges[0]), *of_edges)
            sums = [t.new_zeros((n, t.shape[1])).index_add(0, edges[1], t) for t in messages]
        else:
            blocks = [slice(start, start + size) for start in range(0, edges.shape[1], size)]
            sums = _Sum.apply(self, n, edges, blocks, rows, *of_edges)
        return self._quick.put_back(sums)

    def _size(self, rows: torch.Tensor) -> int:
        """Return how many edges are a block."""
        if self.block != AUTO:
            return self.block
        weights = int(self.product.weight_numel) * rows.element_size()  # type: ignore[arg-type]
        return max(_FEWEST, (_WEIGHTS_OF_GPUS if rows.is_cuda else _WEIGHTS) // weights)

    def messages(
        self, rows: torch.Tensor, attributes: torch.Tensor, features: torch.Tensor, *factors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the messages (E, C_k) of a block, whose senders' rows are given, as `Product` has them."""
        weights = self.network(features)
        for factor in factors:
            weights = weights * factor
        return self._quick.messages(rows, attributes, weights)


class _Sum(torch.autograd.Function):
    """Sums messages; given are the module, the number of sums, edges, blocks of them, rows, and tensors of edges."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        module, n, edges, blocks, rows, *parts = given
        ctx.module, ctx.blocks, ctx.parameters = module, blocks, Unchanged(module.network.parameters())
        ctx.save_for_backward(edges, rows, *parts)
        sums: list[torch.Tensor] = []
        for block in blocks:
            messages = module.messages(rows.index_select(0, edges[0, block]), *(t[block] for t in parts))
            sums = sums or [t.new_zeros((n, t.shape[1])) for t in messages]
            for total, t in zip(sums, messages, strict=True):
                total.index_add_(0, edges[1, block], t)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        edges, rows, *parts = ctx.saved_tensors
        ctx.parameters.check(ctx.module.network.parameters())
        again = torch.is_grad_enabled()  # a derivative of this derivative is wanted
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad[4:]) if needs]
        of_rows = slopes[0].new_zeros(rows.shape)  # of slopes, which torch may have batched
        found: dict[int, list[torch.Tensor]] = {place: [] for place in wanted}
        for block in ctx.blocks:
            senders, receivers = edges[:, block]
            with torch.enable_grad():
                taken = [rows.index_select(0, senders), *(t[block] for t in parts)]
                if not again:
                    taken = [t.detach().requires_grad_(place in wanted) for place, t in enumerate(taken)]
                messages = ctx.module.messages(*taken)
            given = [slope.index_select(0, receivers) for slope in slopes]
            targets = [taken[place] for place in wanted]
            gradients = torch.autograd.grad(
                messages, targets, given, create_graph=again, materialize_grads=True
            )
            for place, t in zip(wanted, gradients, strict=True):
                if place:
                    found[place].append(t)
                else:  # in place where nothing remembers it
                    of_rows = (torch.index_add if again else torch.Tensor.index_add_)(of_rows, 0, senders, t)
        whole = {place: torch.cat(of_block) if place else of_rows for place, of_block in found.items()}
        return None, None, None, None, *(whole.get(place) for place in range(1 + len(parts)))
