"""Systems of atoms as tensors.

`Batch` holds one or several whole systems on one rank; it comes from ASE and goes back. `LocalBatch` is what a
model's ``forward`` sees: this rank's local rows in a common folded frame, with their neighbour list.

Invariant: a batch keeps the user's positions, unfolded, and never changes the objects it was made from.
Layer: runtime.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import ase
import ase.units
import numpy as np
import numpy.typing as npt
import torch

from nvdd_core.errors import InputError
from nvdd_core.graph import NeighborList
from nvdd_core.partition import Box
from nvdd_core.runtime.near_edges import NearEdges

# ASE's unit of time in fs: ASE stores velocities in A per this unit.
_ASE_TIME_FS = 1.0 / ase.units.fs

# Arrays that ASE keeps under names of its own; every other per-atom array travels as a field.
_ASE_KNOWN = {"numbers", "positions", "momenta", "masses"}


@dataclass
class Batch:
    """Whole systems, one after the other.

    Attributes
    ----------
    positions : Tensor, shape (N, 3), float64
        Angstrom, not folded.
    numbers : Tensor, shape (N,), int64
        Atomic numbers.
    cell : Tensor, shape (S, 3, 3), float64
        Cell vectors as rows, Angstrom.
    pbc : Tensor, shape (S, 3), bool
    system : Tensor, shape (N,), int64
        System of each atom, ascending.
    masses : Tensor, shape (N,), float64
        amu.
    velocities : Tensor, shape (N, 3), float64, or None
        Angstrom per fs; None where the source has none.
    ids : Tensor, shape (N,), int64
        Position in the source, from 0.
    fields : dict of str to Tensor, each (N, *F)
        Further per-atom data, by name.
    """

    positions: torch.Tensor
    numbers: torch.Tensor
    cell: torch.Tensor
    pbc: torch.Tensor
    system: torch.Tensor
    masses: torch.Tensor
    velocities: torch.Tensor | None
    ids: torch.Tensor
    fields: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def n_systems(self) -> int:
        """Number of systems."""
        return int(self.cell.shape[0])

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    @classmethod
    def from_ase(cls, atoms: ase.Atoms | Sequence[ase.Atoms]) -> Batch:
        """Copy one or several ASE structures.

        Numeric per-atom arrays (charges, tags, ...) that all structures have, in one shape, become `fields`; a warning
        names those that only some have.

        Raises
        ------
        InputError
            If there is no structure, or a field's whole numbers don't fit 64 bits with a sign.
        """
        frames = [atoms] if isinstance(atoms, ase.Atoms) else list(atoms)
        if not frames:
            raise InputError("no structure was given: expected at least one")
        moving = any(a.has("momenta") for a in frames)
        names = _common_fields(frames)
        counts = torch.tensor([len(a) for a in frames])
        n = int(counts.sum())
        return cls(
            positions=_join([a.positions for a in frames], np.float64),
            numbers=_join([a.numbers for a in frames], np.int64),
            cell=torch.as_tensor(np.stack([np.array(a.cell) for a in frames]), dtype=torch.float64),
            pbc=torch.as_tensor(np.stack([a.pbc for a in frames]), dtype=torch.bool),
            system=torch.repeat_interleave(torch.arange(len(frames)), counts),
            masses=_join([a.get_masses() for a in frames], np.float64),
            velocities=_join([a.get_velocities() for a in frames], np.float64) / _ASE_TIME_FS
            if moving
            else None,
            ids=torch.arange(n),
            fields={name: _join_field(name, [a.arrays[name] for a in frames]) for name in names},
        )

    def to_ase(self) -> list[ase.Atoms]:
        """Return ASE structures, one a system, atoms ordered by id."""
        order = torch.argsort(self.ids)
        out = []
        for s in range(self.n_systems):
            rows = order[self.system[order] == s]
            atoms = ase.Atoms(
                numbers=self.numbers[rows].numpy(),
                positions=self.positions[rows].numpy(),
                cell=self.cell[s].numpy(),
                pbc=self.pbc[s].numpy(),
                masses=self.masses[rows].numpy(),
            )
            if self.velocities is not None:
                atoms.set_velocities(self.velocities[rows].numpy() * _ASE_TIME_FS)
            for name, values in self.fields.items():
                atoms.set_array(name, values[rows].numpy())
            out.append(atoms)
        return out

    def validate(self) -> None:
        """Refuse what no model can evaluate.

        Raises
        ------
        InputError
            Naming the quantity, the atom's index in the source and what to do.
        """
        if len(self) == 0:
            raise InputError("the structure has no atoms; give at least one")
        self._validate_layout()
        for name, rows in (
            ("position", self.positions),
            ("velocity", self.velocities),
            ("mass", self.masses),
        ):
            if rows is not None:
                _check_finite(name, rows, self.ids)
        if bool((self.masses <= 0).any()):
            bad = int(self.ids[(self.masses <= 0).nonzero()[0, 0]])
            raise InputError(
                f"atom {bad} has mass {float(self.masses[self.ids == bad][0])}: give a positive mass"
            )
        for s in range(self.n_systems):
            if not torch.isfinite(self.cell[s]).all():
                raise InputError(
                    f"the cell of system {s} holds a value that is not finite: {self.cell[s].tolist()}; mend the file"
                )
        Box.from_cells(self.cell, self.pbc, "system")

    def _validate_layout(self) -> None:
        n, n_systems = len(self), self.n_systems
        _expect("positions", self.positions, (n, 3), torch.float64)
        _expect("numbers", self.numbers, (n,), torch.int64)
        _expect("system", self.system, (n,), torch.int64)
        _expect("masses", self.masses, (n,), torch.float64)
        _expect("ids", self.ids, (n,), torch.int64)
        _expect("cell", self.cell, (n_systems, 3, 3), torch.float64)
        _expect("pbc", self.pbc, (n_systems, 3), torch.bool)
        if self.velocities is not None:
            _expect("velocities", self.velocities, (n, 3), torch.float64)
        for name, rows in self.fields.items():
            if rows.shape[:1] != (n,):
                raise InputError(f"field '{name}' has shape {tuple(rows.shape)}: expected {n} rows")
        if not torch.equal(self.ids.sort()[0], torch.arange(n)):
            raise InputError(f"ids of a batch must be 0 to {n - 1}, each once")
        if int(self.system.min()) < 0 or int(self.system.max()) >= n_systems:
            raise InputError(f"system of a batch must lie in 0 to {n_systems - 1}")


def _expect(name: str, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(rows.shape) != shape or rows.dtype != dtype:
        raise InputError(
            f"{name} of a batch has shape {tuple(rows.shape)} and {rows.dtype}; expected {shape} and {dtype}"
        )


def _field_shapes(atoms: ase.Atoms) -> set[tuple[str, tuple[int, ...]]]:
    """Return names and row shapes of the arrays that can be fields."""
    return {
        (name, array.shape[1:])
        for name, array in atoms.arrays.items()
        if name not in _ASE_KNOWN and array.dtype.kind in "fiub"
    }


def _common_fields(frames: Sequence[ase.Atoms]) -> list[str]:
    """Return the names of arrays that all structures have in one shape; warn of others, which a model might use."""
    shapes = [_field_shapes(atoms) for atoms in frames]
    common = set.intersection(*shapes)
    left_out = sorted({name for name, _ in set.union(*shapes) - common})
    if left_out:
        warnings.warn(
            f"{', '.join(left_out)}: not a column of every structure, in one shape, so it is left out of all of them",
            stacklevel=3,
        )
    return sorted(name for name, _ in common)


def _join(parts: Sequence[np.ndarray], dtype: npt.DTypeLike) -> torch.Tensor:
    return torch.as_tensor(np.concatenate([np.array(p, dtype=dtype) for p in parts]))


def _join_field(name: str, parts: Sequence[np.ndarray]) -> torch.Tensor:
    """Join a field; dtypes that torch lacks, or can't index, become the nearest that it has."""
    found = np.result_type(*parts)
    dtype = found.newbyteorder("=")
    if found.kind == "f" and found.itemsize > 8:
        dtype = np.dtype(np.float64)
    if found.kind == "u" and found.itemsize > 1:
        dtype = np.dtype(np.int64)
        if any(part.size and part.max() > np.iinfo(np.int64).max for part in parts):
            raise InputError(
                f"field '{name}' holds {max(int(p.max()) for p in parts)}: give at most 2**63 - 1"
            )
    return _join(parts, dtype)


def _check_finite(name: str, rows: torch.Tensor, ids: torch.Tensor) -> None:
    bad = (~torch.isfinite(rows.reshape(rows.shape[0], -1)).all(1)).nonzero()[:, 0]
    if bad.numel():
        first = int(bad[0])
        raise InputError(
            f"the {name} of atom {int(ids[first])} is not finite: {rows[first].tolist()} "
            f"({bad.numel()} such atom{'s' if bad.numel() > 1 else ''} in all); mend the structure"
        )


@dataclass(frozen=True)
class LocalBatch:
    """One rank's share of the systems, as a model sees it.

    Attributes
    ----------
    positions : Tensor, shape (n_local, 3)
        Owned rows first, then ghosts; folded, in the model's dtype. Differentiable.
    cell : Tensor, shape (S, 3, 3)
        In the model's dtype, open axes completed by unit vectors. Differentiable with respect to a strain.
    pbc : Tensor, shape (S, 3), bool
    numbers, system, ids : Tensor, shape (n_local,), int64
    n_owned : int
    neighbors : NeighborList
        May hold pairs beyond the cutoff (skin): compare distances with the model's own cutoff.
    fields : dict of str to Tensor, each (n_local, *F)
    requested : frozenset of str
        What the caller wants, of energy, forces, stress, node_energy, node_virial.
    parts : tuple of NeighborList
        For a composition: each member's own list, in their order. Empty where nobody made any.
    near : NearEdges
        What `near_edges` chose.
    """

    positions: torch.Tensor
    cell: torch.Tensor
    pbc: torch.Tensor
    numbers: torch.Tensor
    system: torch.Tensor
    ids: torch.Tensor
    n_owned: int
    neighbors: NeighborList
    fields: dict[str, torch.Tensor]
    requested: frozenset[str]
    parts: tuple[NeighborList, ...] = ()
    near: NearEdges = field(default_factory=NearEdges, repr=False, compare=False)

    @property
    def n_local(self) -> int:
        """Owned and ghost rows."""
        return int(self.numbers.shape[0])

    @property
    def n_systems(self) -> int:
        """Systems of the whole batch, whether this rank has rows of them or not."""
        return int(self.cell.shape[0])

    @property
    def edge_index(self) -> torch.Tensor:
        """Sender and receiver of every directed edge, (2, E) int64."""
        return self.neighbors.coo()[0]

    @property
    def edge_shifts(self) -> torch.Tensor:
        """Shift of each edge's sender in whole cells, (E, 3) int64."""
        return self.neighbors.coo()[1]

    def edge_vectors(self) -> torch.Tensor:
        """Return vectors receiver -> sender of every directed edge, (E, 3), Angstrom; differentiable."""
        edges = self.neighbors.full()
        points = edges.extend(self.positions, self.cell, self.system)
        return points[edges.senders.long()] - points[edges.receivers.long()]

    def near_edges(self, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return directed edges without the pairs of the skin, for a model to which these cost more than to leave out.

        Parameters
        ----------
        cutoff : float
            Angstrom.

        Returns
        -------
        edge_index : Tensor, shape (2, n), int64
        edge_shifts : Tensor, shape (n, 3), int64
            As the properties of these names, edges within the cutoff. To a model that declares ``pads``, edges between
            rows that stand for none, too, so that the number stays.
        """
        return self.near.of(self.neighbors, self.positions.detach(), self.cell.detach(), self.system, cutoff)
