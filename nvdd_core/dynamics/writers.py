"""Hooks that write a run: the trajectory (extended XYZ) and the log (CSV).

Both only ever add whole pieces at the end of their file: a frame is put together aside, from blocks of
rows, and copied when it is complete; a log line is flushed as it is written. So a run that is killed loses
nothing that it had written, and a file that an earlier run left is continued after its last whole frame.

Invariant: rank 0 alone touches the files and never holds more than one block of rows of other ranks.
Layer: dynamics.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

import torch

from nvdd_core.dynamics.blocks import DEFAULT_BLOCK_ROWS, iter_row_blocks
from nvdd_core.dynamics.extxyz import frame_header, frame_rows, has_other_masses
from nvdd_core.dynamics.files import writing
from nvdd_core.dynamics.hooks import HookContext, HookScope, StepInfo, check_every
from nvdd_core.errors import InputError

_SPOOL_BYTES = 64 * 2**20
_BASE_COLUMNS = ("step", "time_fs", "energy", "kinetic", "total", "temperature")


class TrajectoryWriter:
    """Appends frames to an extended XYZ file (a GLOBAL hook).

    Parameters
    ----------
    path : Path
        File to write on rank 0.
    every : int
        Steps between frames.
    append : bool
        Continue an existing file after its last whole frame instead of replacing it.
    block_rows : int
        Rows that rank 0 holds at a time.

    Raises
    ------
    InputError
        If `every` is below 1; at the first frame, if the batch has several systems.
    NvddError
        If the file can't be written; the whole frames in it stay.
    """

    scope = HookScope.GLOBAL

    def __init__(
        self, path: Path | str, every: int, *, append: bool = False, block_rows: int = DEFAULT_BLOCK_ROWS
    ) -> None:
        self.path = Path(path)
        self.every = check_every(every, "trajectory")
        self._append = append
        self._block_rows = block_rows
        self._file: BinaryIO | None = None
        self._with_masses: bool | None = None

    def __call__(self, ctx: HookContext) -> None:
        """Append the frame of `ctx` (collective)."""
        if ctx.sharded.cell.shape[0] != 1:
            raise InputError(
                f"a trajectory file holds one system, this batch has {ctx.sharded.cell.shape[0]}; "
                "run the systems one by one, or without a trajectory"
            )
        if self._with_masses is None:
            other = has_other_masses(ctx.state.masses, ctx.sharded.numbers).to(torch.float64)
            self._with_masses = bool(ctx.mesh.all_reduce_max_(other.reshape(1)) > 0)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as frame:
            self._write_frame(frame, ctx, self._with_masses)
            if ctx.mesh.rank == 0:
                with writing(self.path, "Frames written before are kept"):
                    self._add(frame)

    def _write_frame(self, frame: IO[bytes], ctx: HookContext, with_masses: bool) -> None:
        """Put the frame together in `frame` (rank 0), from blocks of all ranks' rows."""
        n_rows = ctx.sharded.n_global
        if ctx.mesh.rank == 0:
            cell, pbc = ctx.sharded.cell[0], ctx.sharded.pbc[0]
            frame.write(frame_header(n_rows, cell, pbc, ctx.info, with_masses=with_masses).encode())
        fields = {
            "numbers": ctx.sharded.numbers,
            "positions": ctx.state.positions,
            "velocities": ctx.state.velocities,
            "forces": ctx.state.forces,
            "masses": ctx.state.masses,
        }
        for block in iter_row_blocks(ctx.mesh, ctx.state.ids, fields, n_rows, self._block_rows):
            frame.write(frame_rows(**block.fields, with_masses=with_masses).encode())

    def _add(self, frame: IO[bytes]) -> None:
        """Copy a complete frame to the end of the file, or leave the file as it was."""
        file = self._file = self._file or _open_trajectory(self.path, self._append)
        end = file.tell()
        frame.seek(0)
        try:
            shutil.copyfileobj(frame, file, 2**20)
            file.flush()
        except BaseException:
            # Close first: what the buffer still holds must not follow the cut.
            self._file, self._append = None, True
            _close_quietly(file)
            with suppress(OSError):  # then the next opening cuts
                _cut(self.path, end)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._append = True


def _open_trajectory(path: Path, append: bool) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if append and path.exists():
        trim_partial_frame(path)
    file = path.open("ab" if append else "wb")
    file.seek(0, 2)
    return file


def _close_quietly(file: IO[bytes] | IO[str]) -> None:
    with suppress(OSError):  # the error that led here is the one to tell
        file.close()


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def trim_partial_frame(path: Path, last_step: int | None = None) -> int:
    """Cut a last frame that a killed run left unfinished, and return the number of whole frames.

    With `last_step`, frames of later steps are cut, too.

    Raises
    ------
    InputError
        If the file isn't an XYZ file.
    """
    n_frames = 0
    with path.open("r+b") as file:
        while True:
            start = file.tell()
            count = file.readline()
            if not count:
                return n_frames
            if not count.endswith(b"\n"):
                break
            if not count.strip().isdigit():
                raise InputError(
                    f"{path} is not an XYZ trajectory: expected a number of rows at byte {start}, "
                    f"found {count[:40]!r}; give another file name"
                )
            head = file.readline()
            if last_step is not None and _step_of(head) > last_step:
                break
            if not (head.endswith(b"\n") and all(file.readline().endswith(b"\n") for _ in range(int(count)))):
                break
            n_frames += 1
        file.truncate(start)
    return n_frames


def _step_of(head: bytes) -> int:
    found = re.search(rb"\bstep=(\d+)", head)
    return int(found[1]) if found else 0


def trim_log(path: Path, last_step: int) -> None:
    """Cut the lines of a log after `last_step`, and a last one that a killed run left unfinished.

    Raises
    ------
    InputError
        If the file isn't such a log.
    """
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            step = line.partition(b",")[0]
            if not line.endswith(b"\n"):
                break
            if number and not step.isdigit():
                raise InputError(
                    f"{path} is not the log of a run: line {number + 1} begins with no step, but {step[:40]!r}; "
                    "give another folder"
                )
            if number and int(step) > last_step:
                break
            size += len(line)
    _cut(path, size)


class LogWriter:
    """Appends a line of numbers to a CSV file (a RANK_ZERO hook).

    Columns: step, time_fs, energy, kinetic, total (eV), temperature (K), pressure_gpa where there is one,
    then `StepInfo.extra`. Numbers are written so that they read back exactly.

    Parameters
    ----------
    path : Path
        File to write.
    every : int
        Steps between lines.
    append : bool
        Continue an existing file, which must have the same columns, instead of replacing it.

    Raises
    ------
    InputError
        If `every` is below 1; at the first line, if the file to be continued has other columns.
    NvddError
        If the file can't be written.
    """

    scope = HookScope.RANK_ZERO

    def __init__(self, path: Path | str, every: int, *, append: bool = False) -> None:
        self.path = Path(path)
        self.every = check_every(every, "log")
        self._append = append
        self._file: IO[str] | None = None

    def __call__(self, ctx: HookContext) -> None:
        """Append the numbers of `ctx.info` and flush."""
        self.write(ctx.info)

    def write(self, info: StepInfo) -> None:
        """Append one line and flush it."""
        values = _log_values(info)
        with writing(self.path, "Lines written before are kept"):
            if self._file is None:
                self._file = _open_log(self.path, ",".join(values), self._append)
            try:
                self._file.write(",".join(repr(value) for value in values.values()) + "\n")
                self._file.flush()
            except OSError:
                _close_quietly(self._file)
                self._file, self._append = None, True
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._append = True


def _log_values(info: StepInfo) -> dict[str, int | float]:
    base = (info.step, info.time_fs, info.energy, info.kinetic, info.total, info.temperature)
    values: dict[str, int | float] = dict(zip(_BASE_COLUMNS, base, strict=True))
    if info.pressure_gpa is not None:
        values["pressure_gpa"] = info.pressure_gpa
    values.update((name, float(value)) for name, value in info.extra.items())
    return values


def _open_log(path: Path, header: str, append: bool) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if append and path.exists() and path.stat().st_size:
        data = path.read_bytes()
        found = data[: data.find(b"\n")].decode(errors="replace")
        if found != header:
            raise InputError(
                f"{path} has the columns {found!r}, this run writes {header!r}; "
                "give another file name, or don't append"
            )
        _cut(path, data.rfind(b"\n") + 1)
        return path.open("a", encoding="ascii")
    file = path.open("w", encoding="ascii")
    file.write(header + "\n")
    return file
