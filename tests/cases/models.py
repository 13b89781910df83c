"""Stand-in models in plain torch, written as a plugin author would, for Rule W tests."""

from __future__ import annotations

import torch

from nvdd_core.runtime import SPEC_MPNN_HALO, LocalBatch, MLIPSpec, refresh_neighbors, scatter_to_owners
from nvdd_core.spec import StrategyKind
from tests.cases.oracle import CUTOFF


class StandIn:
    """What the stand-ins share of the model contract."""

    cutoff = CUTOFF
    device = torch.device("cpu")
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    layers = 1
    neighbor_form = "half"

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.calls = 0

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return SPEC_MPNN_HALO

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Accept every element."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"node_energy": self.node_energy(batch)}

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        raise NotImplementedError


def _weights(batch: LocalBatch) -> torch.Tensor:
    r2 = batch.edge_vectors().square().sum(1)
    return torch.where(r2 < CUTOFF**2, (1.0 - r2 / CUTOFF**2) ** 2, torch.zeros_like(r2))


def _sum_edges(batch: LocalBatch, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(batch.n_local).index_add(0, index, values)


class TorchLJ(StandIn):
    """Plain truncated 12-6, epsilon = sigma = 1, by autograd."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        r2 = batch.edge_vectors().square().sum(1)
        inside = r2 < CUTOFF**2
        s6 = torch.where(inside, r2, torch.full_like(r2, 1e6)) ** -3
        pair = torch.where(inside, 2.0 * (s6 * s6 - s6), torch.zeros_like(r2))
        return _sum_edges(batch, batch.edge_index[1], pair)


class Toy2(StandIn):
    """Two layers of message passing; neighbours read ``h``."""

    layers = 2

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        w = _weights(batch)
        h = refresh_neighbors(_sum_edges(batch, receiver, w))
        m = _sum_edges(batch, receiver, torch.tanh(0.1 * h[sender]) * w)
        return 0.01 * m**2


class InPlaceToy2(Toy2):
    """The same, as ordinary torch code: no verb of ours, and what ``index_add_`` returns is dropped."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        w = _weights(batch)
        h = batch.positions.new_zeros(batch.n_local)
        h.index_add_(0, receiver, w)
        m = batch.positions.new_zeros(batch.n_local)
        m.index_add_(0, receiver, torch.tanh(0.1 * h[sender]) * w)
        return 0.01 * m**2


class Gate(StandIn):
    """A product over the edges in which a row is the sender, so partial products live in ghost rows."""

    layers = 2

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        w = _weights(batch)
        eta = scatter_to_owners(_sum_edges(batch, sender, torch.log1p(-0.05 * w))).exp()
        return _sum_edges(batch, receiver, w * eta[sender])


class Raising(Toy2):
    """Raises ValueError on one rank, at a place of choice: setup, forward, backward."""

    def __init__(self, place: str, rank: int) -> None:
        super().__init__()
        self.place, self.rank = place, rank

    def _maybe(self, place: str) -> None:
        from nvdd_core.runtime import current_dd_context

        context = current_dd_context()
        if place == self.place and context.mesh is not None and context.mesh.rank == self.rank:
            raise ValueError(f"deliberate failure in {place}")

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        import torch.distributed as dist

        if self.place == "setup" and dist.get_rank() == self.rank:
            raise ValueError("deliberate failure in setup")

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        self._maybe("forward")
        energy = super().node_energy(batch)
        if self.place == "backward":
            from nvdd_core.runtime import current_dd_context

            mesh = current_dd_context().mesh
            failing = mesh is not None and mesh.rank == self.rank

            def hook(grad: torch.Tensor) -> torch.Tensor:
                if failing:
                    raise ValueError("deliberate failure in backward")
                return grad

            energy.register_hook(hook)
        return energy
