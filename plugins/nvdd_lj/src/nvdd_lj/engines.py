"""The two ways to evaluate pairs: scratch memory and recorded kernel launches.

Key objects: `SimdEngine` (CPU, both list forms), `ThreadEngine` (any device, full lists; the gradient takes
both). Invariant: a launch is recorded once per kind of result and list; a step only sets the addresses that
changed and launches, on torch's current stream. Layer: plugin.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import warp as wp

from nvdd_lj.kernels import extend_kernel, full_kernel, gradient_kernel
from nvdd_lj.rows import PairRows
from nvdd_lj.simd import FAR, SCRATCH_VIRIAL, argument_types, simd_kernel
from nvdd_lj.start import descriptor, one_process_compiles, warp_device, warp_stream
from nvdd_lj.variants import Virial, Want, mat33_type, scalar_type, vec3_type, vec4_type

BLOCK = 128
"""Threads of a block on a GPU: small, so that a few thousand rows still reach every multiprocessor."""

Outputs = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Room for energy, forces, total virial and row virial; None where not wanted."""


class Engine(Protocol):
    """One way to evaluate pairs."""

    def needs_row_virial(self, want: Want) -> bool:
        """Whether `run` has to be given room for a virial per row."""
        ...

    def run(self, positions: torch.Tensor, cell: torch.Tensor, want: Want, out: Outputs) -> None:
        """Fill the outputs."""
        ...


class SimdEngine:
    """The sequential CPU kernel; one launch does everything."""

    def __init__(self, rows: PairRows, extend: bool) -> None:
        self._rows, self._extend = rows, extend
        self._device = warp_device(rows.device)
        self._launches: dict[Want, Any] = {}
        real = rows.coefficients
        self._packed = packed = real.new_empty((rows.n_extended + 1, 4))
        packed[-1] = FAR
        bits = (rows.home() < 0).to(torch.int64)
        if rows.species is not None:
            bits += 8 * rows.species
        integer = torch.int64 if rows.dtype == torch.float64 else torch.int32
        packed.view(integer)[:-1, 3] = bits.to(integer)
        packed.view(integer)[-1, 3] = 0
        self._none = real.new_empty(1)
        self._no_virial = torch.empty(1, dtype=torch.float64)
        self._ends = real.new_empty((rows.n_extended + 1, 4)) if rows.half else self._none
        self._virial_ends = self._none

    def needs_row_virial(self, want: Want) -> bool:
        """The kernel sums a total by itself."""
        return want.virial is Virial.ROWS

    def run(self, positions: torch.Tensor, cell: torch.Tensor, want: Want, out: Outputs) -> None:
        """See `Engine`."""
        launch = self._launches.get(want)
        if launch is None:
            launch = self._launches[want] = self._record(positions, cell, want)
        real = scalar_type(self._rows.dtype)
        energy, forces, virial, row_virial = out
        changing = ((0, positions, real), (1, cell, real), (11, energy, real), (12, forces, real))
        for index, tensor, dtype in (*changing, (13, virial, wp.float64), (14, row_virial, real)):
            if tensor is not None:
                launch.set_param_at_index_from_ctype(index, descriptor(tensor.view(-1), dtype))
        launch.launch()

    def _record(self, positions: torch.Tensor, cell: torch.Tensor, want: Want) -> Any:
        rows = self._rows
        if want.virial is Virial.ROWS and rows.half and self._virial_ends is self._none:
            self._virial_ends = self._none.new_empty((rows.n_extended + 1, SCRATCH_VIRIAL))
        none, no_virial = self._none, self._no_virial
        tensors = (
            *(positions, cell, rows.system, rows.image_rows, rows.image_shifts, self._packed),
            *(rows.row_splits, rows.senders, rows.coefficients, self._ends, self._virial_ends),
            *(none, none, no_virial, none),
        )
        numbers = (
            *(rows.n_owned, rows.n_local, rows.n_image, rows.coefficients.shape[0], rows.n_systems),
            *(int(self._extend), rows.cutoff**2),
        )
        types = list(argument_types(rows.dtype).values())
        arrays = [
            descriptor(tensor.reshape(-1), kind.dtype) for tensor, kind in zip(tensors, types, strict=False)
        ]
        kernel = simd_kernel(rows.variant(want))
        return _record(kernel, 1, [*arrays, *numbers], self._device)


class ThreadEngine:
    """One thread a receiver, on any device; two launches."""

    def __init__(self, rows: PairRows, extend: bool) -> None:
        self._rows, self._extend = rows, extend
        self._device = warp_device(rows.device)
        self._launches: dict[Want, Any] = {}
        real = rows.coefficients
        self._packed = real.new_empty((rows.n_extended, 4))
        self._none = real.new_empty((1, 6))
        self._no_home = torch.empty(1, dtype=torch.int64, device=rows.device)
        self._no_species = torch.empty(1, dtype=torch.int32, device=rows.device)
        self._pack: Any = None

    def needs_row_virial(self, want: Want) -> bool:
        """Threads don't share a total."""
        return want.virial is not Virial.NONE

    def run(self, positions: torch.Tensor, cell: torch.Tensor, want: Want, out: Outputs) -> None:
        """See `Engine`."""
        dtype = self._rows.dtype
        stream = warp_stream(self._rows.device)
        self.pack(positions, cell, stream)
        launch = self._launches.get(want)
        if launch is None:
            launch = self._launches[want] = self._record_pairs(want)
        energy, forces, _, row_virial = out
        if energy is not None:
            launch.set_param_at_index_from_ctype(7, descriptor(energy, scalar_type(dtype)))
        if forces is not None:
            launch.set_param_at_index_from_ctype(8, descriptor(forces, vec3_type(dtype)))
        if row_virial is not None:
            launch.set_param_at_index_from_ctype(9, descriptor(row_virial, scalar_type(dtype)))
        launch.launch(stream)

    def pack(self, positions: torch.Tensor, cell: torch.Tensor, stream: Any) -> torch.Tensor:
        """Write all extended rows, four numbers wide, and return them; valid until the next call."""
        rows = self._rows
        dtype = rows.dtype
        if self._pack is None:
            given = rows.n_local if self._extend else rows.n_extended
            inputs = [
                descriptor(positions, vec3_type(dtype)),
                descriptor(cell, mat33_type(dtype)),
                *(descriptor(t, wp.int64) for t in (rows.system, rows.image_rows, rows.image_shifts)),
                given,
                descriptor(self._packed, vec4_type(dtype)),
            ]
            self._pack = _record(extend_kernel(dtype), rows.n_extended, inputs, self._device)
        self._pack.set_param_at_index_from_ctype(0, descriptor(positions, vec3_type(dtype)))
        self._pack.set_param_at_index_from_ctype(1, descriptor(cell, mat33_type(dtype)))
        self._pack.launch(stream)
        return self._packed

    def gradient(self, positions: torch.Tensor, cell: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Differentiate the weighted sum of row energies.

        Parameters
        ----------
        positions, cell
            As in `run`, of rows given in extended form.
        weight : (n_owned,)
            Weight of each row's energy.

        Returns
        -------
        (n_extended, 3)
            With respect to every extended row.
        """
        rows = self._rows
        dtype = rows.dtype
        gradient = positions.new_zeros((rows.n_extended, 3))
        if not rows.n_owned:
            return gradient
        stream = warp_stream(rows.device)
        home = rows.home() if rows.half else self._no_home
        inputs = [
            descriptor(self.pack(positions, cell, stream), vec4_type(dtype)),
            *self._list(),
            descriptor(home, wp.int64),
            *self._table(),
            descriptor(weight, scalar_type(dtype)),
            descriptor(gradient, vec3_type(dtype)),
        ]
        kernel = gradient_kernel(dtype, rows.half, rows.species is not None, rows.linear_term)
        _record(kernel, rows.n_owned, inputs, self._device).launch(stream)
        return gradient

    def _record_pairs(self, want: Want) -> Any:
        rows = self._rows
        dtype = rows.dtype
        inputs = [
            descriptor(self._packed, vec4_type(dtype)),
            *self._list(),
            *self._table(),
            descriptor(self._none[0], scalar_type(dtype)),
            descriptor(self._none[:, :3], vec3_type(dtype)),
            descriptor(self._none, scalar_type(dtype)),
        ]
        return _record(full_kernel(rows.variant(want)), rows.n_owned, inputs, self._device)

    def _list(self) -> list[Any]:
        rows = self._rows
        species = self._no_species if rows.species is None else rows.species
        return [descriptor(tensor, wp.int32) for tensor in (rows.row_splits, rows.senders, species)]

    def _table(self) -> list[Any]:
        table = self._rows.coefficients
        flat = descriptor(table.view(-1, 4), vec4_type(table.dtype))
        return [flat, table.shape[0], self._rows.cutoff**2]


def _record(kernel: Any, dim: int, inputs: list[Any], device: Any) -> Any:
    """Prepare a launch; its descriptors are plain addresses, so the caller keeps the tensors."""
    known = (kernel, str(device)) in _compiled
    with nullcontext() if known else one_process_compiles():
        launch = wp.launch(kernel, dim=dim, inputs=inputs, device=device, block_dim=BLOCK, record_cmd=True)
    _compiled.add((kernel, str(device)))
    return launch


_compiled: set[tuple[Any, str]] = set()
