"""Toy kernels: custom ops of torch that dispatch can't see into."""

from __future__ import annotations

from typing import Any

import torch

T = torch.Tensor


@torch.library.custom_op("toy::edge_sum", mutates_args=())
def edge_sum(x: T, senders: T, receivers: T, n: int, bias: T | None = None) -> T:
    """Sum tanh of the senders' rows over edges into ``n`` receivers; the kernel reads neighbours' rows."""
    out = x.new_zeros(n, x.shape[1])
    out.index_add_(0, receivers, torch.tanh(x[senders]))
    return out if bias is None else out + bias


@torch.library.custom_op("toy::edge_sum_backward", mutates_args=())
def edge_sum_backward(grad: T, x: T, senders: T, receivers: T) -> T:
    slope = 1 - torch.tanh(x[senders]) ** 2
    return torch.zeros_like(x).index_add_(0, senders, grad[receivers] * slope)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.bias = inputs[4] is not None


def _backward(ctx: Any, grad: T) -> Any:
    bias = grad.sum(0) if ctx.bias else None
    return edge_sum_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None, bias


edge_sum.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("toy::both", mutates_args=())
def both(x: T, weight: T) -> tuple[T, T]:
    """Return per-row squares, and their weighted sum over all rows handed in."""
    square = x * x
    return square, (square * weight).sum(0)


def _save_both(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _both_backward(ctx: Any, grad: T, grad_sum: T) -> Any:
    x, weight = ctx.saved_tensors
    return 2 * x * (grad + grad_sum * weight), None


both.register_autograd(_both_backward, setup_context=_save_both)


@torch.library.custom_op("toy::write", mutates_args=("out",))
def write(out: T, x: T) -> None:
    out.copy_(x)


LIBRARY = torch.library.Library("toy", "FRAGMENT")
LIBRARY.define("many.plain(Tensor x) -> Tensor")
LIBRARY.define("many.scaled(Tensor x, Tensor by) -> Tensor")
LIBRARY.impl("many.plain", lambda x: x + 1, "CompositeImplicitAutograd")
LIBRARY.impl("many.scaled", lambda x, by: x * by, "CompositeImplicitAutograd")
LIBRARY.define("stack(Tensor[] xs) -> Tensor")
LIBRARY.impl("stack", lambda xs: torch.stack(list(xs)).sum(0), "CompositeImplicitAutograd")
