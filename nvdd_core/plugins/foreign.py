"""Foreign code run in this process: what it may leave behind, and how to tell what it raised.

Key objects: `surroundings_kept`, `error_text`, `wanted_end`. Invariant: after `surroundings_kept` the working
directory and ``sys.path`` are what they were, apart from entries that well-behaved code appended. Layer: plugins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def surroundings_kept() -> Iterator[list[str]]:
    """Run foreign code; put back its changes to the working directory and to ``sys.path``.

    Yields
    ------
    list of str
        Filled at the end with what had to be put back, for people. Entries appended to ``sys.path`` stay and aren't
        told when the code raised nothing: later imports of its own may need them.
    """
    path, entries, folder = sys.path, list(sys.path), _folder()
    told: list[str] = []
    keep = False
    try:
        yield told
        keep = True
    finally:
        if not _is_same(path, entries, appended=keep):
            told.append("changed sys.path, which was put back")
            sys.path = path
            path[:] = entries
        if folder is not None and _folder() != folder:
            told.append("changed the working directory, which was put back")
            os.chdir(folder)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted meanwhile
        return None


def _is_same(path: list[str], entries: list[str], *, appended: bool) -> bool:
    """Whether `path` still is ``sys.path`` and holds `entries`, and nothing else unless `appended`."""
    n = len(entries)
    if sys.path is not path or path[:n] != entries:
        return False
    return len(path) == n or (appended and all(isinstance(entry, str) for entry in path[n:]))


def error_text(error: BaseException) -> str:
    """Return an error's own text in one line, whatever its ``__str__`` does."""
    try:
        return " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException as odd:  # foreign code, while the first error still has to be told
        return f"(its message can't be made: {type(odd).__name__})"


def wanted_end(error: BaseException) -> str:
    """Return what to say of an exception that ends a process past every handler, ``SystemExit`` for one."""
    try:
        told = ", ".join(map(repr, error.args))
    except KeyboardInterrupt:
        raise
    except BaseException as odd:
        told = f"its arguments can't be told: {type(odd).__name__}"
    return f"a plugin or library wanted to end the process: {type(error).__name__}({told})"
