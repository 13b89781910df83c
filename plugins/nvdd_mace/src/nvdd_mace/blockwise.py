"""Convolutions that keep no message: a block of edges at a time, and again for gradients.

What e3nn's tensor products, and the networks that make their weights, keep of each edge for gradients is most of what a
model needs memory for. Within `Blocks` each interaction keeps nothing but what goes in. That costs one more evaluation
of products and weights, and what is summed is the same but for its order.

mace calls a convolution that sums for itself as it calls fused ones. Layer: plugin.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import current_dd_context
from nvdd_mace.inspection import flag

_WEIGHTS = {"cpu": 2**21}
"""Bytes of weights that make a block: messages then fit into a CPU's cache."""
_WEIGHTS_ELSEWHERE = 2**28
"""The same on a GPU: messages take some gigabytes."""
_FEWEST = 256

AUTO = -1


def edges_at_once(blockwise: object, device: torch.device, *, trains: bool) -> int:
    """Return what the option of this name asks for: how many edges, `AUTO`, or 0 for no blocks.

    Left alone, CPUs work on blocks, which is as fast or faster there, unless second derivatives are to be taken.

    Raises
    ------
    InputError
        For anything but ``auto``, true, false or a number.
    """
    text = str(blockwise).lower()
    if text == "auto":
        return AUTO if device.type == "cpu" and not trains else 0
    if text.isdecimal() and int(text) > 1:
        return int(text)
    try:
        return AUTO if flag("blockwise", blockwise) else 0
    except InputError:
        raise InputError(
            f"mace: blockwise is {blockwise!r}; give auto, true, false or the number of edges to work on at a time"
        ) from None


def serves_blocks(module: torch.nn.Module) -> bool:
    """Tell whether this release of mace calls convolutions that sum for themselves, and the model has none yet."""
    # mace asks for an attribute of this name, so it is among the constants of its code
    return all(
        "conv_fusion" in type(one).forward.__code__.co_consts and not hasattr(one, "conv_fusion")
        for one in _interactions(module)
    )


class Blocks(AbstractContextManager[None]):
    """Has every interaction of a model sum its messages blockwise, for the time of a `with` statement.

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
        self._interactions = _interactions(module)
        self._parts = [
            {"conv_tp": Blockwise(one.conv_tp, one.conv_tp_weights, block), "conv_tp_weights": _Later()}
            for one in self._interactions
        ]

    def __enter__(self) -> None:
        self._swap()
        for interaction in self._interactions:
            interaction.conv_fusion = True

    def __exit__(self, *exc: object) -> None:
        self._swap()
        for interaction in self._interactions:
            del interaction.conv_fusion

    def _swap(self) -> None:
        """Exchange the parts of interactions and those kept here."""
        for interaction, parts in zip(self._interactions, self._parts, strict=True):
            for name, part in parts.items():
                parts[name], interaction._modules[name] = interaction._modules[name], part


def _interactions(module: Any) -> list[Any]:
    return list(module.interactions)


def summed_rows(local: int) -> int:
    """Return how many of `local` rows edges enter: the owned ones, except under a wide halo and outside a run."""
    context = current_dd_context()
    if context.exchanges and context.plan is not None and local == context.plan.n_local:
        return context.plan.n_owned
    return local


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

    def forward(
        self, rows: torch.Tensor, attributes: torch.Tensor, weights: _Weights, edges: torch.Tensor
    ) -> torch.Tensor:
        """Return sums (n, C) of the messages of edges (2, E) [sender, receiver]."""
        of_edges = (attributes, *weights.parts)
        n = summed_rows(rows.shape[0])
        size = self._size(rows)
        if edges.shape[1] <= size:
            messages = self.messages(rows.index_select(0, edges[0]), *of_edges)
            return messages.new_zeros((n, messages.shape[1])).index_add(0, edges[1], messages)
        blocks = [slice(start, start + size) for start in range(0, edges.shape[1], size)]
        trained = [p for p in self.network.parameters() if p.requires_grad]
        found: torch.Tensor = _Sum.apply(self, n, edges, blocks, len(of_edges), rows, *of_edges, *trained)
        return found

    def _size(self, rows: torch.Tensor) -> int:
        """Return how many edges are a block."""
        if self.block != AUTO:
            return self.block
        weights = int(self.product.weight_numel) * rows.element_size()  # type: ignore[arg-type]
        return max(_FEWEST, _WEIGHTS.get(rows.device.type, _WEIGHTS_ELSEWHERE) // weights)

    def messages(
        self, rows: torch.Tensor, attributes: torch.Tensor, features: torch.Tensor, *factors: torch.Tensor
    ) -> torch.Tensor:
        """Return the messages (E, C) of a block, whose senders' rows are given."""
        weights = self.network(features)
        for factor in factors:
            weights = weights * factor
        found: torch.Tensor = self.product(rows, attributes, weights)
        return found


class _Sum(torch.autograd.Function):
    """Sums messages.

    Given are the module, the number of sums, edges, blocks of them, how many tensors are of edges, and inputs: rows,
    tensors of edges and parameters, in this order.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        module, n, edges, blocks, n_parts, *inputs = given
        ctx.module, ctx.blocks, ctx.n_parts = module, blocks, n_parts
        ctx.save_for_backward(edges, *inputs)
        rows, parts = inputs[0], inputs[1 : 1 + n_parts]
        total: torch.Tensor = rows.new_zeros(0)
        for block in blocks:
            messages = module.messages(rows.index_select(0, edges[0, block]), *(t[block] for t in parts))
            if block.start == 0:
                total = messages.new_zeros((n, messages.shape[1]))
            total.index_add_(0, edges[1, block], messages)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        edges, *inputs = ctx.saved_tensors
        end = 1 + ctx.n_parts  # of rows and what edges have
        again = torch.is_grad_enabled()  # a derivative of this derivative is wanted
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad[5:]) if needs]
        of_rows = torch.zeros_like(inputs[0])
        of_edges: dict[int, list[torch.Tensor]] = {}
        of_trained: dict[int, Any] = {}
        for block in ctx.blocks:
            senders, receivers = edges[:, block]
            with torch.enable_grad():
                taken = [inputs[0].index_select(0, senders), *(t[block] for t in inputs[1:end])]
                if not again:
                    taken = [t.detach().requires_grad_(place in wanted) for place, t in enumerate(taken)]
                messages = ctx.module.messages(*taken)
            targets = [(taken + inputs[end:])[place] for place in wanted]
            slope = slopes[0].index_select(0, receivers)
            found = torch.autograd.grad(messages, targets, slope, create_graph=again, materialize_grads=True)
            for place, t in zip(wanted, found, strict=True):
                if place == 0:  # in place where nothing remembers it
                    of_rows = (torch.index_add if again else torch.Tensor.index_add_)(of_rows, 0, senders, t)
                elif place < end:
                    of_edges.setdefault(place, []).append(t)
                else:
                    of_trained[place] = of_trained.get(place, 0.0) + t
        whole = of_trained | {place: torch.cat(parts) for place, parts in of_edges.items()}
        whole |= {0: of_rows} if 0 in wanted else {}
        return None, None, None, None, None, *(whole.get(place) for place in range(len(inputs)))
