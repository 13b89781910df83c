"""The models ``ewald`` and ``pme``: the Coulomb energy of point charges in periodic cells.

Key objects: `load_ewald`, `load_pme`, `Coulomb`. The energy is half of charge times potential: pairs within the cutoff,
the reciprocal sum, each charge's own term, and for a net charge the uniform background that neutralises it. All is
computed in float64. Invariant: a model holds no row of the system. Layer: plugin.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import ase.units
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec, current_dd_context, to_local
from nvdd_core.spec import StrategyKind
from nvdd_pme.bases import Bases, in_bases, shorter_basis
from nvdd_pme.charges import Charges, parse_charges
from nvdd_pme.parameters import Options, Splitting, choose_mesh, choose_waves
from nvdd_pme.real_space import Pairs, owned_receivers, pair_energy, pair_potential
from nvdd_pme.reciprocal import ReciprocalEngine, ReplicatedMesh, n_ranks
from nvdd_pme.sharded import ShardedMesh
from nvdd_pme.spec import coulomb_spec
from nvdd_pme.waves import WaveSum

COULOMB = ase.units.Hartree * ase.units.Bohr
"""e^2 / (4 pi epsilon_0), eV Angstrom."""

ENGINES = ("auto", "replicated", "sharded")
SHARDED_FROM = {"gpus": 512**3, "one host": 192**3, "hosts": 96**3}
"""Mesh points from which several ranks share the mesh, where nobody says otherwise.

GPUs transform a mesh sooner than they exchange it, so there it is a matter of memory; CPU ranks of one host have each
other's meshes in shared memory, others have to send all of them (measurements: this plugin's README).
"""

_LOG = logging.getLogger("nvdd.plugins")
_PER_ROW = frozenset({"node_energy", "charge_gradient"})


def load_ewald(
    *,
    dtype: torch.dtype,
    device: torch.device,
    charges: object = None,
    cutoff: float = 9.0,
    accuracy: float = 1e-5,
    alpha: float | None = None,
    k_cutoff: float | None = None,
) -> Coulomb:
    """Make the Ewald sum.

    Parameters
    ----------
    dtype : torch.dtype
        Of positions and results, float32 or float64; sums are float64.
    device : torch.device
    charges : str or mapping, optional
        Charges by element, ``"Na=1,Cl=-1"``, e; default: a column of the structure file or another model's.
    cutoff : float
        Of real space, Angstrom.
    accuracy : float
        Asked relative force error, from which `alpha` (1/Angstrom) and `k_cutoff` (1/Angstrom) follow.
    alpha, k_cutoff : float, optional

    Raises
    ------
    InputError
        An option that makes no sense.
    """
    options = Options.read("ewald", cutoff=cutoff, accuracy=accuracy, alpha=alpha, k_cutoff=k_cutoff)
    return Coulomb("ewald", options, _Waves(), charges, dtype=dtype, device=device)


def load_pme(
    *,
    dtype: torch.dtype,
    device: torch.device,
    charges: object = None,
    cutoff: float = 9.0,
    accuracy: float = 1e-5,
    alpha: float | None = None,
    order: int | None = None,
    spacing: float | None = None,
    engine: str = "auto",
) -> Coulomb:
    """Make particle-mesh Ewald.

    Parameters
    ----------
    dtype, device, charges, cutoff, accuracy, alpha
        As for `load_ewald`.
    order : int, optional
        Of splines, 4 to 8.
    spacing : float, optional
        Largest distance of mesh points, Angstrom.
    engine : str
        ``replicated`` (each rank has the whole mesh), ``sharded`` (each has a part) or ``auto`` (by size).

    Raises
    ------
    InputError
        An option that makes no sense.
    """
    options = Options.read("pme", cutoff=cutoff, accuracy=accuracy, alpha=alpha, order=order, spacing=spacing)
    if engine not in ENGINES:
        raise InputError(f"pme: option engine = {engine!r}: expected one of {', '.join(ENGINES)}")
    return Coulomb("pme", options, _Mesh(engine), charges, dtype=dtype, device=device)


# Where a sum over ranks goes on by itself. A CPU computes it, and two ranks take 43.5 instead of 42.4 ms.
BESIDE = {"cuda"}


class LongRange(Protocol):
    """The reciprocal part of one model."""

    def choose(self, cell: torch.Tensor, options: Options) -> Splitting:
        """Return what fits a cell."""
        ...

    def engine(self, chosen: Splitting) -> partial[torch.Tensor]:
        """Make a `nvdd_pme.reciprocal.ReciprocalEngine` of what was chosen, for one cell and one neighbour list."""
        ...


class _Waves:
    """Structure factors."""

    choose = staticmethod(choose_waves)

    def engine(self, chosen: Splitting) -> partial[torch.Tensor]:
        return partial(WaveSum(), alpha=chosen.alpha, reach=chosen.size, k_cutoff=chosen.k_cutoff)


class _Mesh:
    """A mesh, whole on every rank or spread over them."""

    choose = staticmethod(choose_mesh)

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def engine(self, chosen: Splitting) -> partial[torch.Tensor]:
        large = math.prod(chosen.size) >= _most_points(current_dd_context().mesh)
        sharded = self._engine == "sharded" or (self._engine == "auto" and large)
        engine: ReciprocalEngine = ShardedMesh() if sharded else ReplicatedMesh(one_cell=True)
        return partial(engine, alpha=chosen.alpha, mesh=chosen.size, order=chosen.order)


def _most_points(ranks: Mesh | None) -> float:
    """Return how many points a mesh may have that every rank has whole."""
    if ranks is None or ranks.size == 1:
        return math.inf
    if ranks.device.type == "cuda":
        return SHARDED_FROM["gpus"]
    return SHARDED_FROM["one host" if ranks.shares_memory else "hosts"]


class Coulomb:
    """Energy of point charges in cells that are periodic in three dimensions.

    Parameters
    ----------
    name : str
        ``ewald`` or ``pme``.
    options : Options
    long_range : LongRange
    charges : str, mapping or None
        See `nvdd_pme.charges.parse_charges`.
    dtype : torch.dtype
    device : torch.device

    Attributes
    ----------
    chosen : tuple of Splitting
        What was chosen for each system of the last evaluation, in a basis of short lattice vectors.
    """

    layers = 1
    outputs = frozenset({"energy", "forces", "stress", "node_energy", "charge_gradient"})

    def __init__(
        self,
        name: str,
        options: Options,
        long_range: LongRange,
        charges: object,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"{name}: dtype {dtype} is not served; give float32 or float64")
        self.name, self.options, self.dtype = name, options, dtype
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InputError(f"{name}: device {self.device} is not served; give cpu or cuda")
        self.cutoff = options.cutoff
        self.chosen: tuple[Splitting, ...] = ()
        self._charges = Charges(name, parse_charges(name, charges))
        self._long_range = long_range

    @property
    def neighbor_form(self) -> str:
        """Half lists on the CPU, where the kernel is sequential; full ones on a GPU."""
        return "half" if self.device.type == "cpu" else "full"

    @property
    def given_fields(self) -> frozenset[str]:
        """See `nvdd_core.runtime.Model`."""
        return self._charges.fields

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under a strategy."""
        return coulomb_spec(strategy)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Raise InputError for an element that the option ``charges`` leaves out."""
        self._charges.check(numbers, ids)

    def describe(self) -> str:
        """Return the asked error and what was chosen for it, for people; after an evaluation."""
        return "; ".join([self.options.promise, *dict.fromkeys(map(str, self.chosen))])

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Evaluate this rank's share (collective).

        Returns
        -------
        dict
            ``energy`` (S,), eV, a share of each system's; or, where outputs of rows are asked for, ``node_energy``
            (n_owned,), eV, and ``charge_gradient`` (n_owned,), dE/dq, V. All differentiable.
        """
        lists, charges = self._lists_of(batch), self._charges(batch)
        if not batch.requested & _PER_ROW:
            return {"energy": COULOMB * self._energy(batch, lists, charges)}
        potential = COULOMB * self._potential(batch, lists, charges)
        return {
            "node_energy": (0.5 * charges[: batch.n_owned] * potential).to(self.dtype),
            "charge_gradient": potential.to(self.dtype),
        }

    __call__ = forward

    # -- the two ways to the energy ------------------------------------------------------------------------------

    def _energy(self, batch: LocalBatch, lists: _Lists, charges: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the energies, (S,), e^2/Angstrom."""
        engines = self._begun(batch, lists, charges)
        points, extended = self._extended(batch, lists, charges)
        near = pair_energy(
            points,
            extended,
            lists.system,
            lists.energy,
            n_systems=batch.n_systems,
            alpha=self.options.splitting,
            cutoff=self.cutoff,
        )
        own = torch.stack([charges[rows].square().sum() for rows in lists.owned])
        far = torch.stack(self._reciprocal(batch, lists, charges, engines, potential=False))
        energy: torch.Tensor = near - self.options.splitting / math.sqrt(math.pi) * own + far
        return energy

    def _potential(self, batch: LocalBatch, lists: _Lists, charges: torch.Tensor) -> torch.Tensor:
        """Return dE/dq of owned rows, (n_owned,), e/Angstrom."""
        points, extended = self._extended(batch, lists, charges)
        near = pair_potential(
            points, extended, lists.potential, alpha=self.options.splitting, cutoff=self.cutoff
        )
        near = near.new_zeros(batch.n_local).index_add(0, lists.rows, near)[: batch.n_owned]
        far = torch.zeros_like(near)
        for rows, values in zip(
            lists.owned,
            self._reciprocal(batch, lists, charges, lists.engines, potential=True),
            strict=True,
        ):
            far[rows] = values
        own = (2.0 * self.options.splitting / math.sqrt(math.pi)) * charges[: batch.n_owned]
        potential: torch.Tensor = near - own + far
        return potential

    def _extended(
        self, batch: LocalBatch, lists: _Lists, charges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places and charges of the extended rows."""
        positions, system = to_local(batch.positions).double(), to_local(batch.system)
        points = owned_receivers(batch.neighbors).extend(positions, batch.cell.double(), system)
        return points, charges[lists.rows]

    def _begun(
        self, batch: LocalBatch, lists: _Lists, charges: torch.Tensor
    ) -> Sequence[Callable[..., torch.Tensor]]:
        """Begin to sum meshes over ranks, which goes on while pairs are computed; return engines (collective)."""
        if n_ranks() == 1 or charges.device.type not in BESIDE:
            return lists.engines
        positions, cells = to_local(batch.positions).double(), lists.cells(batch)
        engines: list[Callable[..., torch.Tensor]] = []
        for engine, rows, cell in zip(lists.engines, lists.owned, cells, strict=True):
            if isinstance(engine.func, ReplicatedMesh):
                begun = engine.func.begin(positions[rows], charges[rows], cell, **engine.keywords)
                engines.append(partial(engine, begun=begun))
            else:
                engines.append(engine)
        return engines

    def _reciprocal(
        self,
        batch: LocalBatch,
        lists: _Lists,
        charges: torch.Tensor,
        engines: Sequence[Callable[..., torch.Tensor]],
        *,
        potential: bool,
    ) -> list[torch.Tensor]:
        """Return for each system this rank's share of the reciprocal energy, or the potential at its owned rows."""
        positions, cells = to_local(batch.positions).double(), lists.cells(batch)
        return [
            engine(positions[rows], charges[rows], cell, potential=potential)
            for engine, rows, cell in zip(engines, lists.owned, cells, strict=True)
        ]

    # -- what is chosen and kept -----------------------------------------------------------------------------------

    def _lists_of(self, batch: LocalBatch) -> _Lists:
        """Return what is kept with the neighbour list, and look at cells and charges when there is a new one.

        A list is made anew whenever a cell, its boundaries or a column of the structure changes, so that a step
        without a new one reads nothing back from a device.
        """
        lists: _Lists | None = batch.neighbors.kept.get(self)
        if lists is None:
            self._refuse_open(batch)
            self._charges.check_column(batch)
            bases = self._choose(batch)
            engines = tuple(self._long_range.engine(chosen) for chosen in self.chosen)
            lists = batch.neighbors.kept[self] = _Lists(batch, engines, bases)
        return lists

    def _refuse_open(self, batch: LocalBatch) -> None:
        periodic = batch.pbc.all(1).tolist()
        if not all(periodic):
            raise InputError(
                f"{self.name}: system {periodic.index(False)} is not periodic in all three directions, so its Coulomb "
                "sum is another one; set pbc='T T T' with vacuum around a slab or a molecule"
            )

    def _choose(self, batch: LocalBatch) -> Bases:
        """Choose a basis and parameters for each cell, and say so when parameters change; return bases."""
        cells = batch.cell.detach().double().cpu()
        bases = tuple(map(shorter_basis, cells))
        chosen = tuple(self._long_range.choose(cell, self.options) for cell in in_bases(cells, bases))
        if chosen != self.chosen:
            self.chosen = chosen
            _LOG.info("%s: %s", self.name, self.describe())
        return bases


class _Lists:
    """What belongs to one neighbour list.

    Attributes
    ----------
    rows, system : Tensor, shape (n_extended,), int64
        Local row and system of each extended row of `owned_receivers`.
    owned : tuple of slice or Tensor
        Owned rows of each system.
    engines : tuple of partial
        Of the reciprocal part, one a system.
    bases : tuple of Tensor or None
        In which engines have cells, see `shorter_basis`; on the device, so that no step sends them there.
    energy, potential : Pairs
    """

    def __init__(self, batch: LocalBatch, engines: tuple[partial[torch.Tensor], ...], bases: Bases) -> None:
        self.engines = engines
        self.bases = tuple(basis if basis is None else basis.to(batch.cell.device) for basis in bases)
        edges = owned_receivers(batch.neighbors)
        self.rows = edges.extended_rows
        system = to_local(batch.system)
        self.system = system[self.rows]
        self.owned: tuple[slice | torch.Tensor, ...] = (slice(batch.n_owned),)
        if batch.n_systems > 1:
            mine = system[: batch.n_owned]
            self.owned = tuple((mine == s).nonzero()[:, 0] for s in range(batch.n_systems))
        self.energy, self.potential = Pairs.for_energy(edges, to_local(batch.ids)), Pairs.for_potential(edges)

    def cells(self, batch: LocalBatch) -> list[torch.Tensor]:
        """Return each system's cell as its engine has it."""
        return in_bases(batch.cell.double(), self.bases)
