"""Standard streams: usable from the start, and standard output kept for the answer alone.

Key objects: `ensure_streams`, `stdout_kept`. Layer: cli.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def stdout_kept(*, only: bool = True) -> Iterator[TextIO]:
    """Yield standard output; with `only`, send what others print there to standard error meanwhile.

    Libraries write through Python's object, through the file descriptor and through C's buffer; all are redirected.
    """
    ours = sys.stdout
    if not only:
        yield ours
        return
    ours.flush()
    kept = os.dup(1)
    try:
        mine = ours.fileno() == 1
    except OSError:  # replaced by something in memory, by a test for one
        mine = False
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if mine:
                with open(kept, "w", encoding="utf-8", closefd=False) as direct:
                    yield direct
            else:
                yield ours
    finally:
        _flush_c()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_c() -> None:
    """Write out what C code has printed so far; into a pipe it would otherwise come at the end of the process."""
    import ctypes  # only where an answer has to stand alone

    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)


def ensure_streams() -> None:
    """Make standard input, output and error usable, whatever this process was started with.

    A closed one becomes the null device: otherwise the next file or socket that is opened takes its descriptor, and
    gets what somebody prints. Text that the encoding lacks is escaped, so that a name can't turn into a traceback.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            os.set_inheritable(opened, True)  # workers as well
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
