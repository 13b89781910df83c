"""``ember::message_sum``: the sum of messages as a kernel that torch can't see into.

NumPy stands for Warp, Triton or CUDA here: a plain loop over the edges of one rank, which knows nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


@torch.library.custom_op("ember::message_sum", mutates_args=())
def message_sum(
    h: torch.Tensor, weight: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor
) -> torch.Tensor:
    """Return ``sum over edges j -> i of weight * h_j``; h (rows, F), weight (E, F), edges (E,)."""
    out = np.zeros_like(h.numpy(force=True))
    np.add.at(out, receiver.numpy(), h.numpy(force=True)[sender.numpy()] * weight.numpy(force=True))
    return torch.from_numpy(out)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    h, weight, sender, receiver = ctx.saved_tensors
    at_edges = grad[receiver]
    return torch.zeros_like(h).index_add(0, sender, at_edges * weight), at_edges * h[sender], None, None


message_sum.register_autograd(_backward, setup_context=_save)
