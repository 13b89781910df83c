"""Starting Warp quietly, and launching its kernels on torch's tensors, device and stream.

Key object: `launch`. Invariant: Warp is started on first use of a kernel, never on import, and says nothing a
user of nvdd has no use for. Layer: plugin.
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

_NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"
_compiled: set[Any] = set()
_streams: dict[tuple[torch.device, int], Any] = {}


def launch(kernel: Any, dim: int, arguments: Sequence[torch.Tensor | float], types: Any) -> None:
    """Run a kernel; its first argument says on which device.

    Parameters
    ----------
    kernel : warp kernel
    dim : int
        Threads.
    arguments : sequence of Tensor, int or float
        Contiguous tensors, in the kernel's order.
    types : mapping
        Type of each argument, as Warp has it.
    """
    first = arguments[0]
    if dim == 0 or not isinstance(first, torch.Tensor):
        return
    _start()
    device = wp.device_from_torch(first.device)
    given = [
        wp.from_torch(value.detach(), dtype=kind.dtype, requires_grad=False, return_ctype=True)
        if isinstance(value, torch.Tensor)
        else value
        for value, kind in zip(arguments, types.values(), strict=True)
    ]
    key = (kernel, first.device)
    with (
        nullcontext()
        if key in _compiled
        else one_at_a_time(Path(wp.config.kernel_cache_dir) / "nvdd_dftd3.lock")
    ):
        wp.launch(kernel, dim=dim, inputs=given, device=device, stream=_stream(first.device))
    _compiled.add(key)


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
        other = fallback_cache("warp", os.environ.get("WARP_CACHE_PATH"), "dftd3")
        wp.config.kernel_cache_dir = None if other is None else str(other)
    with nullcontext() if torch.cuda.is_available() else stderr_without(_NO_DRIVER):
        wp.init()
