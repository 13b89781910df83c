"""MACE as a model of nvdd: local rows in, energies of owned atoms out.

Key objects: `load` (the plugin's loader), `MaceModel`. The model's own blocks compute, two of their parts another way
(`nvdd_mace.blockwise`); what is distributed are hooks on them (`nvdd_mace.adapters`). Forces and stress are the
framework's derivatives, not mace's own.
Invariant: a model holds no row of the system. Layer: plugin.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from ase.data import chemical_symbols

from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec, current_dd_context, refresh_neighbors
from nvdd_core.spec import StrategyKind
from nvdd_mace.backends import converted, require_backend
from nvdd_mace.blockwise import Blocks, edges_at_once, is_left_alone, serves_blocks
from nvdd_mace.checkpoint import read_model
from nvdd_mace.inspection import (
    LARGEST_NUMBER,
    after_linear_up,
    chosen_head,
    exchanged_widths,
    flag,
    one,
    plain_parameters,
    served,
    settle_harmonics,
)
from nvdd_mace.repulsion import settle_repulsion
from nvdd_mace.spec import mace_spec
from nvdd_mace.trial import settle


def load(
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    checkpoint: object = None,
    head: str | None = None,
    trust: object = False,
    trainable: object = False,
    backend: str = "e3nn",
    blockwise: object = "auto",
) -> MaceModel:
    """Make a model from a file that mace-torch wrote.

    Parameters
    ----------
    dtype : torch.dtype
        float32 or float64; the file's numbers are converted.
    device : torch.device
        CPU or CUDA.
    checkpoint : str or path
        The ``.model`` file. It is read without running anything in it, see `nvdd_mace.checkpoint`.
    head : str, optional
        Which head of a model with several; default the only one, or the one called default.
    trust : bool
        Let the file run code: for files whose parts mace's own constructors can't rebuild.
    trainable : bool
        Keep gradients of parameters, for `DistributedModel.differentiable`; costs memory otherwise.
    backend : str
        ``e3nn``; ``cueq`` or ``oeq`` convert by mace's own converters, where these packages are installed.
    blockwise : bool, int or "auto"
        Whether e3nn's work is done a block of edges or rows at a time and nothing of it is kept, which is quicker and
        takes a fraction of the memory, see `nvdd_mace.blockwise`; a number says how many edges are a block.

    Raises
    ------
    InputError
        A file that is missing, is no model or would run code; an option that makes no sense.
    """
    if checkpoint is None:
        raise InputError(
            "mace: give the model file that mace-torch wrote: --option checkpoint=PATH (a .model file)"
        )
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"mace: dtype {dtype} is not served; give float32 or float64")
    require_backend(backend)
    trains = flag("trainable", trainable)
    block = edges_at_once(blockwise, trains=trains)
    if block and backend != "e3nn" and not is_left_alone(blockwise):
        raise InputError(
            f"mace: blockwise is for backend=e3nn; kernels of backend={backend} keep no messages"
        )
    path = one("checkpoint", checkpoint, "the path of one file; committees of models are not served")
    module = read_model(path, trust=flag("trust", trust))
    model = MaceModel(module.to(dtype), dtype=dtype, device=device, head=head, trainable=trains)
    model = model if backend == "e3nn" else converted(model, backend)
    if block and backend == "e3nn" and (serves_blocks(model.module) or not is_left_alone(blockwise)):
        model.around = Blocks(model.module, block)
    settle(model)
    return model


class MaceModel:
    """A live module of mace.

    Parameters
    ----------
    module : Module
        A ``MACE`` or ``ScaleShiftMACE``; it is moved to `device` and `dtype` and changed in place.
    dtype : torch.dtype
    device : torch.device or str
    head : str, optional
    trainable : bool

    Attributes
    ----------
    around : context manager
        Entered for the time of an evaluation.

    Raises
    ------
    InputError
        When the module is of a kind that isn't served, or has no such head.
    """

    neighbor_form = "full"
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        head: str | None = None,
        trainable: bool = False,
    ) -> None:
        served(module)
        plain_parameters(module)
        settle_repulsion(module)
        self.dtype = dtype
        self.device = torch.device(device)
        module.to(dtype=dtype, device=self.device).eval().requires_grad_(trainable)
        self.module: Any = cast(Any, module)
        self.head = chosen_head(module, head)
        self.around: AbstractContextManager[None] = nullcontext()
        self.cutoff = float(self.module.r_max)
        self.layers = len(self.module.interactions)
        numbers = [int(z) for z in self.module.atomic_numbers]
        self.symbols = tuple(chemical_symbols[z] for z in numbers)
        # an element that the model lacks has the last place, and attributes that are not a number
        lookup = torch.full((LARGEST_NUMBER + 2,), len(numbers), dtype=torch.int64)
        lookup[numbers] = torch.arange(len(numbers))
        attributes = torch.eye(len(numbers), dtype=dtype)
        unknown = torch.full((1, len(numbers)), torch.nan, dtype=dtype)
        self._lookup = lookup.to(self.device)
        self._attributes = torch.cat([attributes, unknown]).to(self.device)
        settle_harmonics(self.module, dtype, self.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        settle_harmonics(self.module, self.dtype, self.device)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the model's heads."""
        return tuple(getattr(self.module, "heads", None) or ("Default",))

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under a strategy."""
        return mace_spec(strategy, self.layers, after_linear_up=after_linear_up(self.module))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refuse elements that the model was not made for.

        Parameters
        ----------
        numbers : (n,) int64
            Atomic numbers.
        ids : (n,) int64, optional
            Global row ids, for the message.

        Raises
        ------
        InputError
            Naming the elements, the first atom and what is known.
        """
        unknown = self._species(numbers) == len(self.symbols)
        if not bool(unknown.any()):
            return
        places = torch.nonzero(unknown).flatten()
        first = int(places[0] if ids is None else ids[places].min())
        found = [_name(int(z)) for z in torch.unique(numbers[unknown])]
        where = (
            f"{places.numel()} atoms, the first is atom {first}" if places.numel() > 1 else f"atom {first}"
        )
        raise InputError(
            f"mace: the model does not know {', '.join(found)} ({where}); it knows {', '.join(self.symbols)}"
        )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Evaluate the energies of owned atoms.

        Parameters
        ----------
        batch : LocalBatch
            This rank's rows and neighbour list.

        Returns
        -------
        dict
            ``node_energy`` (n_owned,), eV, differentiable.
        """
        if batch.n_owned == 0:
            return {"node_energy": self._without_rows(batch)}
        with self.around:
            out = self.module(self.inputs(batch), training=False, compute_force=False)
        return {"node_energy": out["node_energy"][: batch.n_owned]}

    def _without_rows(self, batch: LocalBatch) -> torch.Tensor:
        """Make the exchanges of a rank that owns nothing: mace's products can't do without a row.

        They hang on positions and parameters, so that this rank takes part in the backward exchanges as well.
        """
        zero = batch.positions.sum() * 0.0
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                zero = zero + parameter.sum() * 0.0
        if current_dd_context().exchanges:
            for width in exchanged_widths(self.module):
                refresh_neighbors(zero.expand(0, width))
        return zero.expand(0)

    def inputs(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the dictionary that mace's forward takes, with the edges that mace itself would list."""
        positions = batch.positions if batch.positions.requires_grad else batch.positions.detach()
        edge_index, unit_shifts = batch.near_edges(self.cutoff)  # mace works on no pair of the skin
        # mace adds the shift to the receiver, nvdd to the sender
        unit_shifts = -unit_shifts.to(positions.dtype)
        n_systems = batch.n_systems
        if n_systems == 1:
            shifts = unit_shifts @ batch.cell[0]
        else:
            of_edge = batch.system.index_select(0, edge_index[0])
            shifts = torch.einsum("ei,eij->ej", unit_shifts, batch.cell.index_select(0, of_edge))
        device = positions.device
        return {
            "positions": positions,
            "node_attrs": self._attributes.index_select(0, self._species(batch.numbers)),
            "edge_index": edge_index,
            "shifts": shifts,
            "unit_shifts": unit_shifts,
            "cell": batch.cell.reshape(-1, 3),
            "batch": batch.system,
            "ptr": torch.zeros(n_systems + 1, dtype=torch.int64, device=device),  # only its length is read
            "head": torch.full((n_systems,), self.heads.index(self.head), device=device),
        }

    __call__ = forward

    def _species(self, numbers: torch.Tensor) -> torch.Tensor:
        """Place of each row's element in the model's table; their number if it lacks it."""
        valid = (numbers >= 0) & (numbers <= LARGEST_NUMBER)
        return self._lookup.to(numbers.device)[torch.where(valid, numbers, LARGEST_NUMBER + 1)]


def _name(number: int) -> str:
    return chemical_symbols[number] if 0 < number <= LARGEST_NUMBER else f"atomic number {number}"
