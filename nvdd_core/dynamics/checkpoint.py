"""The last state of a run on disk: exact, whole, independent of the number of ranks.

The format is safetensors: a JSON header and plain little-endian arrays, so reading runs no code, any tool
that knows safetensors can look inside, and rows are memory-mapped rather than loaded. `write_checkpoint`
streams blocks of rows through rank 0 into a file aside that is renamed when it is on disk; `Checkpoint`
reads any range of rows.

Invariant: row k of every ``rows.*`` array belongs to global id k, whatever the ranks were; values come back
with the same bits.
Layer: dynamics.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics.blocks import DEFAULT_BLOCK_ROWS, RowBlock, iter_row_blocks
from nvdd_core.dynamics.files import replace_file
from nvdd_core.dynamics.hooks import HookContext, HookScope, check_every
from nvdd_core.dynamics.integrators import Integrator
from nvdd_core.errors import InputError
from nvdd_core.runtime.batch import Batch

_FORMAT = "nvdd-checkpoint"
_VERSION = 1
_ROWS = "rows."
_GLOBALS = "global."
_FIELDS = "fields."
_STATE = ("positions", "velocities", "masses", "numbers", "system")
_MAX_HEADER = 2**24
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _Array:
    """Where one array lies in the file's data part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    path: Path | str,
    mesh: Mesh,
    ids: torch.Tensor,
    rows: Mapping[str, torch.Tensor],
    n_rows: int,
    *,
    step: int,
    globals_: Mapping[str, torch.Tensor] | None = None,
    info: Mapping[str, object] | None = None,
    block_rows: int = DEFAULT_BLOCK_ROWS,
) -> None:
    """Write a checkpoint (collective); under `path` there is the former file until the new one is complete.

    Parameters
    ----------
    path : Path
        File on rank 0.
    mesh : Mesh
        The group of ranks.
    ids : Tensor, shape (n,), int64
        Global ids of this rank's rows.
    rows : Mapping[str, Tensor]
        Per-row arrays (n, *F) of this rank; the same names, trailing shapes and dtypes on every rank.
    n_rows : int
        Rows over all ranks.
    step : int
        Completed steps.
    globals_ : Mapping[str, Tensor], optional
        Arrays of the whole system, such as the cell; rank 0's are written.
    info : Mapping[str, object], optional
        Anything that JSON can say.
    block_rows : int
        Rows that rank 0 holds at a time.

    Raises
    ------
    InputError
        If an array has a dtype that the format lacks.
    NvddError
        If the file can't be written.
    """
    globals_ = globals_ or {}
    arrays = _layout(rows, n_rows, globals_)
    blocks = iter_row_blocks(mesh, ids, rows, n_rows, block_rows)
    if mesh.rank != 0:
        for _ in blocks:
            pass
        return
    metadata = {"format": _FORMAT, "version": str(_VERSION), "n_rows": str(n_rows), "step": str(step)}
    metadata["info"] = json.dumps(dict(info or {}))
    with replace_file(Path(path)) as file:
        _write_all(file, arrays, metadata, blocks, globals_)


def _layout(
    rows: Mapping[str, torch.Tensor], n_rows: int, globals_: Mapping[str, torch.Tensor]
) -> dict[str, _Array]:
    """Place the arrays one after another, widest elements first so that each is aligned."""
    shapes = [(_GLOBALS + name, value.dtype, tuple(value.shape)) for name, value in globals_.items()]
    shapes += [(_ROWS + name, value.dtype, (n_rows, *value.shape[1:])) for name, value in rows.items()]
    arrays, start = {}, 0
    for name, dtype, shape in sorted(shapes, key=lambda entry: -entry[1].itemsize):
        if dtype not in _DTYPE_NAMES:
            raise InputError(
                f"checkpoint: '{name.partition('.')[2]}' has {dtype}, which the format lacks; "
                f"convert it to one of {sorted(_DTYPES)}"
            )
        arrays[name] = _Array(dtype, shape, start)
        start = arrays[name].stop
    return arrays


def _write_all(
    file: BinaryIO,
    arrays: Mapping[str, _Array],
    metadata: Mapping[str, str],
    blocks: Iterator[RowBlock],
    globals_: Mapping[str, torch.Tensor],
) -> None:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, array in arrays.items():
        span = [array.start, array.stop]
        entries[name] = {"dtype": _DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    data_start = 8 + len(header)
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(data_start + max((array.stop for array in arrays.values()), default=0))
    for name, value in globals_.items():
        file.seek(data_start + arrays[_GLOBALS + name].start)
        file.write(_bytes(value.cpu()))
    for block in blocks:
        for name, value in block.fields.items():
            array = arrays[_ROWS + name]
            file.seek(data_start + array.start + block.start * array.row_bytes)
            file.write(_bytes(value))


def _bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Checkpoint:
    """A checkpoint file opened for reading; arrays are read from the memory map when asked for.

    Attributes
    ----------
    path : Path
        The file.
    step : int
        Completed steps.
    n_rows : int
        Rows of the whole system.
    info : dict
        What the writer added: integrator, time step, whatever JSON can say.

    Raises
    ------
    InputError
        If the file is missing, cut short or no checkpoint of this version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with _reading(self.path), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("no header of a plausible length")
            header = json.loads(file.read(length))
            self._read_header(header)
            if size != 8 + length + self._data_bytes():
                raise ValueError(f"{size} bytes long, expected {8 + length + self._data_bytes()}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data_start = 8 + length

    def _read_header(self, header: dict[str, dict[str, object]]) -> None:
        metadata = header.pop("__metadata__", {})
        if metadata.get("format") != _FORMAT:
            raise ValueError("a safetensors file of another kind")
        if metadata["version"] != str(_VERSION):
            raise ValueError(
                f"version {metadata['version']} of the format, this nvdd reads version {_VERSION}"
            )
        self.step = int(str(metadata["step"]))
        self.n_rows = int(str(metadata["n_rows"]))
        self.info: dict[str, object] = json.loads(str(metadata["info"]))
        self._arrays = {name: _array_of(entry) for name, entry in header.items()}

    def _data_bytes(self) -> int:
        return max((array.stop for array in self._arrays.values()), default=0)

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the per-row arrays."""
        return tuple(name.removeprefix(_ROWS) for name in self._arrays if name.startswith(_ROWS))

    def rows(self, start: int = 0, stop: int | None = None) -> dict[str, torch.Tensor]:
        """Return rows `start` to `stop` (global ids) of every per-row array, as tensors of their own.

        Raises
        ------
        InputError
            If the range isn't within the file's rows.
        """
        stop = self.n_rows if stop is None else stop
        if not 0 <= start <= stop <= self.n_rows:
            raise InputError(f"{self.path}: rows {start} to {stop} asked for, it has rows 0 to {self.n_rows}")
        return {name: self._read(self._arrays[_ROWS + name], start, stop) for name in self.row_names}

    def globals(self) -> dict[str, torch.Tensor]:
        """Return the arrays of the whole system."""
        names = (name for name in self._arrays if name.startswith(_GLOBALS))
        return {name.removeprefix(_GLOBALS): self._read_whole(self._arrays[name]) for name in names}

    def batch(self) -> Batch:
        """Return the whole system as it was, all rows in memory.

        Raises
        ------
        InputError
            If the file lacks something that a run needs.
        """
        rows, whole = self.rows(), self.globals()
        missing = [name for name in _STATE if name not in rows] + [
            n for n in ("cell", "pbc") if n not in whole
        ]
        if missing:
            raise InputError(
                f"the checkpoint {self.path} has no {', '.join(missing)}; give one that 'nvdd run' or a "
                "CheckpointWriter wrote"
            )
        return Batch(
            **{name: rows[name] for name in _STATE},
            cell=whole["cell"],
            pbc=whole["pbc"],
            ids=torch.arange(self.n_rows),
            fields={name.removeprefix(_FIELDS): t for name, t in rows.items() if name.startswith(_FIELDS)},
        )

    def _read(self, array: _Array, start: int, stop: int) -> torch.Tensor:
        span = slice(array.start + start * array.row_bytes, array.start + stop * array.row_bytes)
        return self._tensor(array.dtype, (stop - start, *array.shape[1:]), span)

    def _read_whole(self, array: _Array) -> torch.Tensor:
        return self._tensor(array.dtype, array.shape, slice(array.start, array.stop))

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], span: slice) -> torch.Tensor:
        if span.start == span.stop:
            return torch.empty(shape, dtype=dtype)
        raw = bytearray(self._map[self._data_start + span.start : self._data_start + span.stop])
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every way in which a file can be no checkpoint into one error."""
    try:
        yield
    except OSError as exc:
        raise InputError(f"can't read the checkpoint {path}: {exc.strerror or exc}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(
            f"{path} is not a checkpoint that can be used: {exc}; give the file that 'nvdd run' wrote"
        ) from exc


def _array_of(entry: dict[str, object]) -> _Array:
    offsets, shape = entry["data_offsets"], entry["shape"]
    if not isinstance(offsets, list) or not isinstance(shape, list):
        raise TypeError("an array without shape or place")
    array = _Array(_DTYPES[str(entry["dtype"])], tuple(int(n) for n in shape), int(offsets[0]))
    if array.start < 0 or min(array.shape, default=0) < 0 or array.stop != int(offsets[1]):
        raise ValueError("an array's shape doesn't fit its place")
    return array


class CheckpointWriter:
    """Keeps the last state of a run in one file (a GLOBAL hook, which also writes after the last step).

    Writes positions, velocities, forces, masses, numbers, system and further per-row fields; cell and pbc;
    the step and the integrator's parameters. Noise is keyed by the step, so this is all that a restart
    needs: `Checkpoint.batch` gives it the rows, ``start_step`` of `DomainParallel.run` the step. On the same
    number of ranks it then repeats, bit by bit, what this run does after the checkpoint.

    Parameters
    ----------
    path : Path
        File on rank 0.
    every : int
        Steps between checkpoints.
    integrator : Integrator
        Its parameters are written.
    info : Mapping[str, object], optional
        What else a restart should find (structure, model, options); JSON values.
    block_rows : int
        Rows that rank 0 holds at a time.

    Raises
    ------
    InputError
        If `every` is below 1.
    NvddError
        If the file can't be written; the former checkpoint stays.
    """

    scope = HookScope.GLOBAL
    begins_anew = True

    def __init__(
        self,
        path: Path | str,
        every: int,
        integrator: Integrator,
        *,
        info: Mapping[str, object] | None = None,
        block_rows: int = DEFAULT_BLOCK_ROWS,
    ) -> None:
        self.path = Path(path)
        self.every = check_every(every, "checkpoint")
        self._integrator = integrator
        self._info = dict(info or {})
        self._written: int | None = None
        self._block_rows = block_rows

    def __call__(self, ctx: HookContext) -> None:
        """Replace the checkpoint by the state of `ctx` (collective)."""
        rows = {
            "positions": ctx.state.positions,
            "velocities": ctx.state.velocities,
            "forces": ctx.state.forces,
            "masses": ctx.state.masses,
            "numbers": ctx.sharded.numbers,
            "system": ctx.sharded.system,
            **{_FIELDS + name: value for name, value in ctx.sharded.fields.items()},
        }
        write_checkpoint(
            self.path,
            ctx.mesh,
            ctx.state.ids,
            rows,
            ctx.sharded.n_global,
            step=ctx.state.step,
            globals_={"cell": ctx.sharded.cell, "pbc": ctx.sharded.pbc},
            info={**self._info, "integrator": self._integrator.parameters()},
            block_rows=self._block_rows,
        )
        self._written = ctx.state.step

    def finish(self, ctx: HookContext) -> None:
        """Write the last step of a run, unless it was written already (collective)."""
        if self._written != ctx.state.step:
            self(ctx)
