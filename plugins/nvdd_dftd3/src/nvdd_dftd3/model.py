"""The DFT-D3 model: options in, energies out.

Key objects: `load` (the plugin's loader), `DftD3`. Invariant: a model holds no results and no row of the system;
tables of a neighbour list's elements are kept with that list.
Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ase.data import chemical_symbols

from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec, refresh_neighbors
from nvdd_core.spec import StrategyKind
from nvdd_core.tensor import version_of
from nvdd_dftd3.ops import coordination, dispersion, system_energy
from nvdd_dftd3.parameters import Parameters, parse_options
from nvdd_dftd3.references import LARGEST_NUMBER, References
from nvdd_dftd3.spec import dftd3_spec


def load(
    *,
    dtype: torch.dtype,
    device: torch.device,
    functional: object = None,
    s6: object = None,
    s8: object = None,
    a1: object = None,
    a2: object = None,
    cutoff: object = None,
    cn_cutoff: object = None,
) -> DftD3:
    """Make a DFT-D3 model.

    Parameters
    ----------
    dtype : torch.dtype
        Of positions and results, float32 or float64; it computes in float64 either way.
    device : torch.device
        CPU or CUDA.
    functional, s6, s8, a1, a2, cutoff, cn_cutoff
        See `nvdd_dftd3.parameters.parse_options`.

    Raises
    ------
    InputError
        An unknown functional, a value that makes no sense, or a dtype or device that no kernel serves.
    """
    options = {
        "functional": functional,
        "s6": s6,
        "s8": s8,
        "a1": a1,
        "a2": a2,
        "cutoff": cutoff,
        "cn_cutoff": cn_cutoff,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return DftD3(parse_options(given), dtype=dtype, device=device)


class DftD3:
    """Two-body dispersion of DFT-D3 with rational (Becke-Johnson) damping.

    Parameters
    ----------
    parameters : Parameters
    dtype : torch.dtype
        float32 or float64.
    device : torch.device
        CPU or CUDA.
    """

    layers = 2  # pair energies read the coordination numbers of neighbours
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(self, parameters: Parameters, *, dtype: torch.dtype, device: torch.device | str) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dftd3: dtype {dtype} is not served; give float32 or float64")
        self.parameters = parameters
        self.dtype = dtype
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InputError(f"dftd3: device {self.device} is not served; give cpu or cuda")
        self.cutoff = parameters.reach

    @property
    def neighbor_form(self) -> str:
        """Half lists on the CPU, where memory counts; full ones on a GPU, where they are found at once."""
        return "half" if self.device.type == "cpu" else "full"

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under a strategy."""
        return dftd3_spec(strategy)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refuse elements without references.

        Parameters
        ----------
        numbers : (n,) int64
            Atomic numbers.
        ids : (n,) int64, optional
            Global row ids, for the message.

        Raises
        ------
        InputError
            Naming the element and the first atom.
        """
        unknown = (numbers < 1) | (numbers > LARGEST_NUMBER)
        if not bool(unknown.any()):
            return
        places = torch.nonzero(unknown).flatten()
        atoms = places if ids is None else ids[places]
        first = int(torch.argmin(atoms))
        number = int(numbers[places[first]])
        name = chemical_symbols[number] if 0 < number < len(chemical_symbols) else "no element"
        raise InputError(
            f"dftd3: no parameters for atomic number {number} ({name}), atom {int(atoms[first])} "
            f"({places.numel()} such atom{'s' if places.numel() > 1 else ''} in all); DFT-D3 has the elements from "
            f"H to {chemical_symbols[LARGEST_NUMBER]}"
        )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return a share of each system's ``energy`` (S,), eV, or, where asked for, ``node_energy`` (n_owned,).

        Half of a pair goes to each end. Forces and stress follow from either, from the first at once.
        """
        neighbors, given = batch.neighbors, self._prepare(batch)
        points = neighbors.extend(batch.positions.double(), batch.cell.double(), batch.system)
        half = neighbors.form == "half"
        edges = (neighbors.row_splits, neighbors.senders, given.rows, half)
        references = given.references
        counted = refresh_neighbors(coordination(points, given.radii, *edges, self.parameters.cn_cutoff))
        tables = (given.species, references.cn, references.c6, references.pairs)
        pairs = (points, counted, *tables, *edges, neighbors.n_owned, self.parameters.cutoff)
        if "node_energy" in batch.requested:
            return {"node_energy": dispersion(*pairs).to(self.dtype)}
        derive = torch.is_grad_enabled() and points.requires_grad
        energy, _, _ = system_energy(*pairs, batch.system, batch.n_systems, derive)
        return {"energy": energy}

    __call__ = forward

    def _prepare(self, batch: LocalBatch) -> _Kept:
        """Return the tables for the batch's list, made anew when list or elements changed."""
        kept: _Kept | None = batch.neighbors.kept.get(self)
        if kept is None or not kept.serves(batch):
            self.check(batch.numbers, batch.ids)
            kept = batch.neighbors.kept[self] = _Kept.of(batch, self.parameters)
        return kept


@dataclass(frozen=True, eq=False)
class _Kept:
    """Tables of one neighbour list's rows, and the elements that they were made for."""

    numbers: torch.Tensor
    version: int
    rows: torch.Tensor
    species: torch.Tensor
    radii: torch.Tensor
    references: References

    @classmethod
    def of(cls, batch: LocalBatch, parameters: Parameters) -> _Kept:
        """Look elements up."""
        numbers = batch.numbers
        present, species = torch.unique(numbers, return_inverse=True)
        references = References.of(present.tolist(), parameters, numbers.device)
        return cls(
            numbers,
            version_of(numbers),
            batch.neighbors.extended_rows.int(),
            species.int(),
            references.radii[species],
            references,
        )

    def serves(self, batch: LocalBatch) -> bool:
        """Whether elements are those that were prepared for."""
        return self.numbers is batch.numbers and self.version == version_of(batch.numbers)
