"""Files that are whole or absent, and errors that say which file and what was kept.

`replace_file` writes aside and renames; `writing` turns the operating system's errors into ours.

Invariant: under the final name there is the old file or the complete new one, never a part.
Layer: dynamics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nvdd_core.errors import NvddError


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Turn an `OSError` of the body into an `NvddError` that names `path` and says what was `kept`."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise NvddError(
            f"can't write {path}: {reason}. {kept}; free some space or choose another output folder"
        ) from exc


def aside_of(path: Path) -> Path:
    """Return the name under which `path` is prepared; what a killed run left there is overwritten."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file aside; after the body it is synchronised to disk and takes the name `path`.

    If the body raises, the file aside is removed and what was at `path` stays.

    Raises
    ------
    NvddError
        If the file can't be written.
    """
    aside = aside_of(path)
    with writing(path, "What was there before is unchanged"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        _synchronise_folder(path.parent)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` as JSON, aside and then renamed.

    Raises
    ------
    NvddError
        If the file can't be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with replace_file(path) as file:
        file.write(text.encode())


def _synchronise_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the file system offers it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse; the file is whole all the same
        return
    finally:
        os.close(handle)
