"""The model: a loader, `load`, and a small message-passing network in plain torch."""

from __future__ import annotations

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec
from nvdd_core.spec import DistributionSpec, StrategyKind

from .spec import SPEC


def load(*, dtype: torch.dtype, device: torch.device, cutoff: float = 5.0, seed: int = 0) -> Ember:
    """Make the model; `cutoff` (Angstrom) and `seed` are the options that users give.

    Raises
    ------
    InputError
        An option that makes no sense.
    """
    if not isinstance(cutoff, int | float) or not 0.0 < cutoff < 100.0:
        raise InputError(f"ember: option cutoff = {cutoff!r}: give a length between 0 and 100 Angstrom")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"ember: option seed = {seed!r}: give a whole number")
    return Ember(float(cutoff), seed).to(device, dtype)


class Ember(torch.nn.Module):
    """Two rounds of messages; weights are drawn, where a real model reads them from a file."""

    layers = 2  # atoms read what their neighbours computed from their own neighbours
    neighbor_form = "full"  # every directed edge, ready for index_add
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(self, cutoff: float, seed: int, width: int = 8) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embedding = torch.nn.Embedding(119, width)
        self.filters = torch.nn.ModuleList(torch.nn.Linear(4, width) for _ in range(self.layers))
        self.updates = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(self.layers))
        self.readout = torch.nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
            parameter.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.readout.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.readout.weight.device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under a strategy; only the choice of rows and ghosts differs."""
        return SPEC | MLIPSpec(distribution=DistributionSpec(strategy=strategy))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Refuse what is no element."""
        bad = ids[(numbers < 1) | (numbers > 118)]
        if bad.numel():
            raise InputError(f"ember: atom {int(bad.min())} is no element")

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of each owned atom, eV; forces and stress follow from it."""
        sender, receiver = batch.edge_index
        basis = self.basis(batch.edge_vectors())
        h = self.embedding(batch.numbers)
        for filters, update in zip(self.filters, self.updates, strict=True):
            message = h[sender] * filters(basis) * basis[:, :1]
            summed = batch.positions.new_zeros(batch.n_local, h.shape[1]).index_add_(0, receiver, message)
            h = h + torch.tanh(update(summed))
        return {"node_energy": self.readout(h)[: batch.n_owned, 0]}

    def basis(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return (E, 4) smooth functions of the distance that end at the cutoff; the list reaches further."""
        inside = (1.0 - vectors.square().sum(1) / self.cutoff**2).clamp(min=0.0)
        return torch.stack([inside**k for k in (3, 4, 5, 6)], dim=1)
