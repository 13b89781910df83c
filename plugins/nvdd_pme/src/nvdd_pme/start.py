"""Starting Warp quietly, and launching its kernels on torch's tensors.

Key objects: `launch`, `array`. Invariant: Warp is started on first use of a kernel, never on import; the processes of
a host compile one after the other. Layer: plugin.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import warp as wp

from nvdd_core.environment import fallback_cache, one_at_a_time, stderr_without

BLOCK = 128
"""Threads of a block on a GPU."""

_NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"
_TYPES = {torch.float64: wp.float64, torch.int32: wp.int32, torch.int64: wp.int64}
_compiled: set[tuple[Any, str]] = set()
_streams: dict[tuple[torch.device, int], Any] = {}


def array(dtype: Any) -> Any:
    """Return Warp's type of a flat array, for annotations."""
    return wp.array(dtype=dtype)


def typed(function: Any, types: dict[str, Any]) -> Any:
    """Give a function the argument types that Warp reads."""
    function.__annotations__ = dict(types)
    return function


def launch(kernel: Any, dim: int, arguments: Sequence[Any]) -> None:
    """Run a kernel on torch's current stream; tensors are handed over flat and have to be contiguous."""
    if dim == 0:
        return
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    _start()
    target = wp.device_from_torch(device)
    inputs = [_described(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    known = (kernel, str(device))
    with (
        nullcontext()
        if known in _compiled
        else one_at_a_time(Path(wp.config.kernel_cache_dir) / "nvdd_pme.lock")
    ):
        wp.launch(kernel, dim=dim, inputs=inputs, device=target, stream=_stream(device), block_dim=BLOCK)
    _compiled.add(known)


def _described(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().view(-1)
    return wp.from_torch(flat, dtype=_TYPES[tensor.dtype], requires_grad=False, return_ctype=True)


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    key = (stream.device, stream.cuda_stream)  # every device has a stream 0
    if key not in _streams:
        _streams[key] = wp.stream_from_torch(stream)
    return _streams[key]


@cache
def _start() -> None:
    """Initialise Warp once per process, without its banner and without its warning that there is no GPU."""
    if wp.config.log_level == wp.LOG_INFO:
        wp.config.log_level = wp.LOG_WARNING
    # Warp settles on its folder while it starts, and fails there without one
    if wp.config.kernel_cache_dir is None:
        other = fallback_cache("warp", os.environ.get("WARP_CACHE_PATH"), "pme")
        wp.config.kernel_cache_dir = None if other is None else str(other)
    with nullcontext() if torch.cuda.is_available() else stderr_without(_NO_DRIVER):
        wp.init()
