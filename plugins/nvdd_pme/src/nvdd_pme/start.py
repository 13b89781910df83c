"""Starting Warp quietly, and launching its kernels on torch's tensors.

Key objects: `launch`, `array`. Invariant: Warp is started on first use of a kernel, never on import; the processes of
a host compile one after the other. Layer: plugin.
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

BLOCK = 128
"""Threads of a block on a GPU."""

_TYPES = {torch.float64: wp.float64, torch.int32: wp.int32, torch.int64: wp.int64}
_compiled: set[tuple[Any, str]] = set()


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
    stream = _stream(torch.cuda.current_stream(device).cuda_stream, device) if device.type == "cuda" else None
    known = (kernel, str(device))
    with nullcontext() if known in _compiled else _one_process_compiles():
        wp.launch(kernel, dim=dim, inputs=inputs, device=target, stream=stream, block_dim=BLOCK)
    _compiled.add(known)


def _described(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().view(-1)
    return wp.from_torch(flat, dtype=_TYPES[tensor.dtype], requires_grad=False, return_ctype=True)


_streams: dict[int, Any] = {}


def _stream(handle: int, device: torch.device) -> Any:
    if handle not in _streams:
        _streams[handle] = wp.stream_from_torch(torch.cuda.current_stream(device))
    return _streams[handle]


@cache
def _start() -> None:
    """Initialise Warp once a process, without its banner and without its warning that there is no GPU."""
    if wp.config.log_level == wp.LOG_INFO:
        wp.config.log_level = wp.LOG_WARNING
    _find_cache()
    if torch.cuda.is_available():
        wp.init()
        return
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
            said = b"".join(line for line in text if b"Could not find or load the NVIDIA CUDA" not in line)
            if said:
                os.write(2, said)


def _find_cache() -> None:
    """Let Warp keep compiled kernels in a folder of this user's where its own can't be written to."""
    usual = (
        os.environ.get("WARP_CACHE_PATH")
        or os.environ.get("XDG_CACHE_HOME")
        or os.path.expanduser("~/.cache")
    )
    if wp.config.kernel_cache_dir is not None:
        return
    try:
        Path(usual).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=usual):
            return
    except OSError:
        wp.config.kernel_cache_dir = tempfile.mkdtemp(prefix="nvdd-warp-")


@contextmanager
def _one_process_compiles() -> Iterator[None]:
    """Let all but the first process of a host find the kernel compiled; without a lock each compiles for itself."""
    if sys.platform == "win32":
        yield
        return
    folder = Path(wp.config.kernel_cache_dir or tempfile.gettempdir())
    try:
        handle = (folder / "nvdd_pme.lock").open("a")
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
