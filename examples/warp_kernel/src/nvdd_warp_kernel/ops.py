"""``nvdd_warp_kernel::messages``: ``m_i = sum over edges j -> i of tanh(0.1 h_j) w_ij``, in Warp, for CPU and GPU.

The kernel takes edges of one system, of one rank; it knows nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import warp as wp

wp.config.log_level = wp.LOG_WARNING  # no banner
_SCALARS = {torch.float32: wp.float32, torch.float64: wp.float64}


@wp.kernel
def _messages(
    h: wp.array(dtype=Any),
    w: wp.array(dtype=Any),
    sender: wp.array(dtype=wp.int64),
    receiver: wp.array(dtype=wp.int64),
    m: wp.array(dtype=Any),
) -> None:
    e = wp.tid()
    wp.atomic_add(m, wp.int32(receiver[e]), wp.tanh(h.dtype(0.1) * h[wp.int32(sender[e])]) * w[e])


@wp.kernel
def _gradients(
    h: wp.array(dtype=Any),
    w: wp.array(dtype=Any),
    sender: wp.array(dtype=wp.int64),
    receiver: wp.array(dtype=wp.int64),
    grad_m: wp.array(dtype=Any),
    grad_h: wp.array(dtype=Any),
    grad_w: wp.array(dtype=Any),
) -> None:
    e = wp.tid()
    j = wp.int32(sender[e])
    g = grad_m[wp.int32(receiver[e])]
    t = wp.tanh(h.dtype(0.1) * h[j])
    grad_w[e] = g * t
    wp.atomic_add(grad_h, j, g * h.dtype(0.1) * (h.dtype(1.0) - t * t) * w[e])


def _launch(kernel: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Run a kernel over edges, on torch's device and stream."""
    wp.init()  # does nothing from the second time on
    arrays = [wp.from_torch(t.detach().contiguous(), requires_grad=False) for t in (*inputs, *outputs)]
    place = outputs[0].device
    device = wp.device_from_torch(place)
    stream = wp.stream_from_torch(torch.cuda.current_stream(place)) if device.is_cuda else None
    wp.launch(kernel, dim=inputs[1].shape[0], inputs=arrays, device=device, stream=stream)


@torch.library.custom_op("nvdd_warp_kernel::messages", mutates_args=())
def messages(h: torch.Tensor, w: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor) -> torch.Tensor:
    """Sum messages into rows.

    Parameters
    ----------
    h : Tensor, shape (rows,)
        Features; read at senders.
    w : Tensor, shape (E,)
    sender, receiver : Tensor, shape (E,), int64

    Returns
    -------
    Tensor, shape (rows,)
    """
    m = torch.zeros_like(h)
    _launch(_messages, [h, w, sender, receiver], [m])
    return m


@torch.library.custom_op("nvdd_warp_kernel::messages_backward", mutates_args=())
def messages_backward(
    h: torch.Tensor, w: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor, grad_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients with respect to `h` and `w`."""
    grad_h, grad_w = torch.zeros_like(h), torch.zeros_like(w)
    _launch(_gradients, [h, w, sender, receiver, grad_m], [grad_h, grad_w])
    return grad_h, grad_w


@messages.register_fake
def _(h: torch.Tensor, w: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(h)


@messages_backward.register_fake
def _(
    h: torch.Tensor, w: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor, grad_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(h), torch.empty_like(w)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_m: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*messages_backward(*ctx.saved_tensors, grad_m), None, None)


messages.register_autograd(_backward, setup_context=_save)
