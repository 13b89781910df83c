"""The Lennard-Jones model: options in, energies, forces and virials out.

Key objects: `load` (the plugin's loader), `LennardJones`. Invariant: a model holds no results and no row of
the system; what it needs to evaluate a neighbour list again is kept with that list. Layer: plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ase.data import chemical_symbols

from nvdd_core.errors import InputError
from nvdd_core.graph import NeighborList
from nvdd_core.runtime.batch import LocalBatch
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.spec import StrategyKind
from nvdd_core.tensor import version_of
from nvdd_lj.ops import pair
from nvdd_lj.pairs import PairResults, PairWork
from nvdd_lj.parameters import BUILT_IN, LARGEST_NUMBER, Parameters, Shift, parse_options
from nvdd_lj.rows import PairRows
from nvdd_lj.spec import lj_spec
from nvdd_lj.variants import Virial, Want


def load(
    *,
    dtype: torch.dtype,
    device: torch.device,
    cutoff: object = None,
    shift: object = None,
    epsilon: object = None,
    sigma: object = None,
    **pairs: object,
) -> LennardJones:
    """Make a Lennard-Jones model.

    Parameters
    ----------
    dtype : torch.dtype
        float32 or float64.
    device : torch.device
        CPU or CUDA.
    cutoff, shift, epsilon, sigma, **pairs
        See `nvdd_lj.parameters.parse_options`. Without options: neon, argon, krypton and xenon.

    Raises
    ------
    InputError
        An unknown option, a value that makes no sense, or a dtype or device that no kernel serves.
    """
    named = {"cutoff": cutoff, "shift": shift, "epsilon": epsilon, "sigma": sigma}
    options = {name: value for name, value in named.items() if value is not None} | pairs
    return LennardJones(parse_options(options), dtype=dtype, device=device)


class LennardJones:
    """Truncated 12-6 pair potential.

    Parameters
    ----------
    parameters : Parameters
        Pair tables, cutoff and shift.
    dtype : torch.dtype
        float32 or float64.
    device : torch.device
        CPU or CUDA.
    """

    layers = 1
    outputs = frozenset({"energy", "forces", "stress", "node_energy", "node_virial"})

    def __init__(self, parameters: Parameters, *, dtype: torch.dtype, device: torch.device | str) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"lj: dtype {dtype} is not served; give float32 or float64")
        self.parameters = parameters
        self.dtype = dtype
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InputError(f"lj: device {self.device} is not served; give cpu or cuda")
        self.cutoff = parameters.cutoff
        self._table = torch.from_numpy(parameters.coefficients()).to(self.device)
        self._lookup = torch.from_numpy(parameters.lookup()).to(self.device)

    @property
    def neighbor_form(self) -> str:
        """Half lists on the CPU, where the kernel is sequential; full ones on a GPU."""
        return "half" if self.device.type == "cpu" else "full"

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under a strategy."""
        return lj_spec(strategy)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refuse elements without parameters.

        Parameters
        ----------
        numbers : (n,) int64
            Atomic numbers.
        ids : (n,) int64, optional
            Global row ids, for the message.

        Raises
        ------
        InputError
            Naming the element, the first atom, what is known and the options to give.
        """
        unknown = self._species(numbers) < 0
        if not bool(unknown.any()):
            return
        places = torch.nonzero(unknown).flatten()
        first = int(places[0] if ids is None else ids[places].min())
        counted = torch.unique(numbers[unknown]).tolist()
        raise InputError(_unknown_elements(self.parameters, counted, first, places.numel()))

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Evaluate what ``batch.requested`` names.

        Parameters
        ----------
        batch : LocalBatch
            This rank's rows and neighbour list.

        Returns
        -------
        dict
            ``node_energy`` (n_owned,), differentiable if positions or cell require a gradient; ``forces``
            (n_owned, 3), complete; ``virial`` (S, 3, 3) float64, this rank's part; ``node_virial``
            (n_owned, 3, 3), half of a pair at each end.
        """
        want = _want(batch.requested)
        with_gradient = torch.is_grad_enabled() and (
            batch.positions.requires_grad or batch.cell.requires_grad
        )
        if with_gradient or torch.compiler.is_compiling():
            return self._outputs(self._by_operator(batch, want), batch.requested)
        work = self._work(batch)
        return self._outputs(work.evaluate(batch.positions, batch.cell, want), batch.requested)

    __call__ = forward

    def _outputs(self, results: PairResults, requested: frozenset[str]) -> dict[str, torch.Tensor]:
        named = {
            "node_energy": results.energy,
            "forces": results.forces,
            "virial": results.virial if "stress" in requested else None,
            "node_virial": results.row_virial,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _work(self, batch: LocalBatch) -> PairWork:
        """Return the prepared evaluation of the batch's list, made anew when list, elements or systems changed."""
        kept: _Kept | None = batch.neighbors.kept.get(self)
        if kept is None or not kept.serves(batch):
            kept = _Kept.of(batch, PairWork(self._prepare(batch)))
            batch.neighbors.kept[self] = kept
        return kept.work

    def _prepare(self, batch: LocalBatch) -> PairRows:
        """Look up species once per list; a rank with a single species gets the kernel without a table."""
        neighbors = _for_owned(batch.neighbors)
        species = self._species(batch.numbers)
        if bool((species < 0).any()):
            self.check(batch.numbers, batch.ids)
        present = torch.unique(species)
        table = self._table[present][:, present].to(self.dtype).contiguous()
        if present.numel() == 0:
            table = self._table[:1, :1].to(self.dtype).contiguous()
        extended = None
        if present.numel() > 1:
            extended = _extend(torch.searchsorted(present, species), neighbors)
        return self._rows(batch, neighbors, extended, table)

    def _by_operator(self, batch: LocalBatch, want: Want) -> PairResults:
        """Evaluate through the torch operator, for autograd and torch.compile; keeps nothing."""
        table, species = self._table.to(self.dtype), None
        neighbors = _for_owned(batch.neighbors)
        if self.parameters.n_species > 1:
            # an element without parameters gets a row of the table that is not a number
            table = torch.nn.functional.pad(table, (0, 0, 0, 1, 0, 1), value=torch.nan)
            found = self._species(batch.numbers)
            species = _extend(torch.where(found < 0, table.shape[0] - 1, found), neighbors)
        rows = self._rows(batch, neighbors, species, table)
        energy, forces, virial, row_virial = pair(
            neighbors.extend(batch.positions, batch.cell, batch.system).to(self.dtype),
            rows.row_splits,
            rows.senders,
            rows.image_rows,
            rows.system,
            rows.species,
            rows.coefficients,
            rows.n_systems,
            rows.half,
            rows.cutoff,
            rows.linear_term,
            want.to_int(),
        )
        return PairResults(
            energy if want.energy else None,
            forces if want.forces else None,
            virial if want.virial else None,
            row_virial if want.virial is Virial.ROWS else None,
        )

    def _rows(
        self, batch: LocalBatch, neighbors: NeighborList, species: torch.Tensor | None, table: torch.Tensor
    ) -> PairRows:
        return PairRows(
            n_owned=neighbors.n_owned,
            n_local=neighbors.n_local,
            row_splits=neighbors.row_splits[: neighbors.n_owned + 1].contiguous(),
            senders=neighbors.senders.contiguous(),
            image_rows=neighbors.image_rows.contiguous(),
            image_shifts=neighbors.image_shifts.contiguous(),
            system=batch.system.contiguous(),
            n_systems=batch.cell.shape[0],
            half=neighbors.form == "half",
            species=species,
            coefficients=table,
            cutoff=self.cutoff,
            linear_term=self.parameters.shift is Shift.FORCE,
        )

    def _species(self, numbers: torch.Tensor) -> torch.Tensor:
        """Species index of each row, -1 if unknown."""
        valid = (numbers >= 0) & (numbers <= LARGEST_NUMBER)
        return self._lookup.to(numbers.device)[torch.where(valid, numbers, LARGEST_NUMBER + 1)]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A prepared evaluation of a list, and the elements and systems that it was prepared for."""

    numbers: torch.Tensor
    version: int
    n_systems: int
    work: PairWork

    @classmethod
    def of(cls, batch: LocalBatch, work: PairWork) -> _Kept:
        """Remember what `serves` compares."""
        numbers = batch.numbers
        return cls(numbers, version_of(numbers), batch.n_systems, work)

    def serves(self, batch: LocalBatch) -> bool:
        """Whether elements and systems are those that were prepared for."""
        return (
            self.numbers is batch.numbers
            and self.version == version_of(batch.numbers)
            and self.n_systems == batch.n_systems
        )


def _want(requested: frozenset[str]) -> Want:
    virial = Virial.TOTAL if "stress" in requested else Virial.NONE
    return Want(
        energy=bool(requested & {"energy", "node_energy"}),
        forces="forces" in requested,
        virial=Virial.ROWS if "node_virial" in requested else virial,
    )


def _for_owned(neighbors: NeighborList) -> NeighborList:
    """Return a list whose receivers are owned: a wide halo's half list may have pairs under a ghost."""
    return neighbors if neighbors.n_receivers == neighbors.n_owned else neighbors.full()


def _extend(species: torch.Tensor, neighbors: NeighborList) -> torch.Tensor:
    return torch.cat((species, species[neighbors.image_rows])).to(torch.int32)


def _unknown_elements(parameters: Parameters, numbers: list[int], first: int, count: int) -> str:
    names = [chemical_symbols[n] if 0 <= n <= LARGEST_NUMBER else f"atomic number {n}" for n in numbers]
    name = names[0] if 0 <= numbers[0] <= LARGEST_NUMBER else "X"
    built_in = f" ({name} has built-in values: eps/k_B = {BUILT_IN[name][0]:g} K)" if name in BUILT_IN else ""
    where = f"{count} atoms, the first is atom {first}" if count > 1 else f"atom {first}"
    return (
        f"lj: no parameters for {', '.join(names)} ({where}); known: "
        f"{', '.join(parameters.symbols) or 'none'}. Give --option epsilon.{name}=EV --option "
        f"sigma.{name}=ANGSTROM{built_in}, or --option epsilon=EV --option sigma=ANGSTROM for every element"
    )
