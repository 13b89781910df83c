"""Starting Warp quietly, and launching its kernels on torch's tensors, device and stream.

Key object: `launch`. Invariant: Warp is started on first use of a kernel, never on import, and says nothing a
user of nvdd has no use for. Layer: plugin.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import warp as wp

if sys.platform != "win32":
    import fcntl

_NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"
_compiled: set[Any] = set()


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
    stream = None
    if first.is_cuda:
        stream = wp.stream_from_torch(torch.cuda.current_stream(first.device))
    given = [
        wp.from_torch(value.detach(), dtype=kind.dtype, requires_grad=False, return_ctype=True)
        if isinstance(value, torch.Tensor)
        else value
        for value, kind in zip(arguments, types.values(), strict=True)
    ]
    key = (kernel, first.device)
    with nullcontext() if key in _compiled else _one_process_compiles():
        wp.launch(kernel, dim=dim, inputs=given, device=device, stream=stream)
    _compiled.add(key)


@cache
def _start() -> None:
    """Initialise Warp once per process, without its banner."""
    if wp.config.log_level == wp.LOG_INFO:
        wp.config.log_level = wp.LOG_WARNING
    if torch.cuda.is_available():
        wp.init()
    else:
        _without_driver_warning()


@contextmanager
def _one_process_compiles() -> Iterator[None]:
    """Let the processes of a host compile one after the other, so that all but the first find it done.

    Without the lock (where the file system has none) each compiles for itself: slower, but as right.
    """
    if sys.platform == "win32":
        yield
        return
    path = Path(wp.config.kernel_cache_dir or tempfile.gettempdir()) / "nvdd_dftd3.lock"
    try:
        handle = path.open("a")
    except OSError:
        yield
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _without_driver_warning() -> None:
    """Start Warp on a machine without a GPU; its native part prints a warning that no setting silences."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # the process has no stderr
        wp.init()
        return
    with tempfile.TemporaryFile() as text:
        os.dup2(text.fileno(), 2)
        try:
            wp.init()
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            text.seek(0)
            kept = b"".join(line for line in text if _NO_DRIVER not in line)
            if kept:
                os.write(2, kept)
