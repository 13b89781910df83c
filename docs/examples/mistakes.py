"""A model that is right, and three with one mistake each, for `nvdd validate`. In one process all are right."""

from __future__ import annotations

import torch

from nvdd_core.runtime import SPEC_MPNN_HALO, LocalBatch, MLIPSpec, refresh_neighbors
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind


class Model:
    """A soft repulsion that is weaker where the neighbour is crowded."""

    cutoff, layers, neighbor_form = 5.0, 2, "full"
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """The model refreshes what it reads, so nothing follows a scatter."""
        storage = HaloStorage(scatter=ScatterMode.LOCAL)
        return SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(strategy=strategy, storage=storage))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Every element will do."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of each owned atom."""
        sender, receiver = batch.edge_index
        near = (1.0 - batch.edge_vectors().square().sum(1) / self.cutoff**2).clamp(min=0.0) ** 2
        crowd = self.crowd(batch, near)
        energy = near.new_zeros(batch.n_local).index_add(0, receiver, near / (1.0 + crowd[sender]))
        return {"node_energy": energy[: batch.n_owned]}

    def crowd(self, batch: LocalBatch, near: torch.Tensor) -> torch.Tensor:
        """Sum over neighbours, and refresh what neighbours read."""
        return refresh_neighbors(near.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], near))


class Forgetful(Model):
    """Neighbours read sums that are complete on their owners only."""

    def crowd(self, batch: LocalBatch, near: torch.Tensor) -> torch.Tensor:
        """Sum over neighbours."""
        return near.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], near)


class Undeclared(Model):
    """Handlers could refresh the sums, but the spec says that nothing follows a scatter."""

    def crowd(self, batch: LocalBatch, near: torch.Tensor) -> torch.Tensor:
        """Sum over neighbours, into a buffer of rows."""
        return batch.positions.new_zeros(batch.n_local).index_add_(0, batch.edge_index[1], near)


class Parochial(Model):
    """A mean over atoms is taken over this rank's."""

    def crowd(self, batch: LocalBatch, near: torch.Tensor) -> torch.Tensor:
        """Sum over neighbours, relative to the mean."""
        crowd = super().crowd(batch, near)
        return crowd / crowd[: batch.n_owned].mean()
