"""Starting Warp quietly, and handing it torch's device, stream and tensors.

Key objects: `start_warp`, `warp_device`, `warp_stream`, `descriptor`, `one_process_compiles`. Invariant: Warp
is started on first use of a kernel, never on import, and says nothing a user of nvdd has no use for.
Layer: plugin.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import warp as wp

from nvdd_core.environment import fallback_cache, one_at_a_time, stderr_without

_NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"
_streams: dict[tuple[torch.device, int], Any] = {}


@cache
def start_warp() -> None:
    """Initialise Warp once per process, without its banner and without its warning that there is no GPU."""
    if wp.config.log_level == wp.LOG_INFO:
        wp.config.log_level = wp.LOG_WARNING
    # Warp settles on its folder while it starts, and fails there without one
    if wp.config.kernel_cache_dir is None:
        other = fallback_cache("warp", os.environ.get("WARP_CACHE_PATH"), "lj")
        wp.config.kernel_cache_dir = None if other is None else str(other)
    with nullcontext() if torch.cuda.is_available() else stderr_without(_NO_DRIVER):
        wp.init()


def warp_device(device: torch.device) -> Any:
    """Warp's name of a torch device."""
    start_warp()
    return wp.device_from_torch(device)


def warp_stream(device: torch.device) -> Any:
    """Warp's handle of torch's current stream, None on the CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    key = (stream.device, stream.cuda_stream)  # every device has a stream 0
    if key not in _streams:
        _streams[key] = wp.stream_from_torch(stream)
    return _streams[key]


def descriptor(tensor: torch.Tensor, dtype: Any) -> Any:
    """Describe a contiguous tensor to a recorded launch; far cheaper than a Warp array."""
    return wp.from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)


def one_process_compiles() -> AbstractContextManager[None]:
    """Let the processes of a host compile one after the other, so that all but the first find it done."""
    return one_at_a_time(Path(wp.config.kernel_cache_dir) / "nvdd_lj.lock")
