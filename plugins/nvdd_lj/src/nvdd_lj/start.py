"""Starting Warp quietly, and handing it torch's device, stream and tensors.

Key objects: `start_warp`, `warp_device`, `warp_stream`, `descriptor`, `one_process_compiles`. Invariant: Warp
is started on first use of a kernel, never on import, and says nothing a user of nvdd has no use for.
Layer: plugin.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import warp as wp

if sys.platform != "win32":
    import fcntl

_LOG = logging.getLogger("nvdd.plugins")
_NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"


@cache
def start_warp() -> None:
    """Initialise Warp once per process, without its banner."""
    if wp.config.log_level == wp.LOG_INFO:
        wp.config.log_level = wp.LOG_WARNING
    _find_cache()
    if torch.cuda.is_available():
        wp.init()
    else:
        _without_driver_warning()


def warp_device(device: torch.device) -> Any:
    """Warp's name of a torch device."""
    start_warp()
    return wp.device_from_torch(device)


def warp_stream(device: torch.device) -> Any:
    """Warp's handle of torch's current stream, None on the CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return _stream(stream.cuda_stream, stream)


def descriptor(tensor: torch.Tensor, dtype: Any) -> Any:
    """Describe a contiguous tensor to a recorded launch; far cheaper than a Warp array."""
    return wp.from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)


@contextmanager
def one_process_compiles() -> Iterator[None]:
    """Let the processes of a host compile one after the other, so that all but the first find it done.

    Without the lock (where the file system has none) each compiles for itself: slower, but as right.
    """
    if sys.platform == "win32":
        yield
        return
    path = Path(wp.config.kernel_cache_dir or tempfile.gettempdir()) / "nvdd_lj.lock"
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


def _find_cache() -> None:
    """Let Warp keep compiled kernels in a temporary folder where its own can't be written to.

    Warp settles on its folder while it starts, and fails there without one; a container without a home is a
    common place for that.
    """
    caches = (
        "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    )
    usual = os.environ.get("WARP_CACHE_PATH") or os.path.join(os.path.expanduser(caches), "warp")
    if wp.config.kernel_cache_dir is not None or _can_write(Path(usual)):
        return
    # one folder a user: others may not write to it, so that nobody runs a kernel that another one put there
    own = Path(tempfile.gettempdir()) / f"nvdd-warp-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or (hasattr(os, "getuid") and own.stat().st_uid != os.getuid()):
        own = Path(tempfile.mkdtemp(prefix="nvdd-warp-"))
    wp.config.kernel_cache_dir = str(own)
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning("lj: %s can't be written to, so compiled kernels go to %s", usual, own)


def _can_write(folder: Path) -> bool:
    """Tell whether a folder, which may not be there yet, can hold files of ours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


_streams: dict[int, Any] = {}


def _stream(handle: int, stream: torch.cuda.Stream) -> Any:
    if handle not in _streams:
        _streams[handle] = wp.stream_from_torch(stream)
    return _streams[handle]


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
