"""Charges that depend on their surroundings, and a screened Coulomb energy that reads them: two models in one."""

from __future__ import annotations

import ase.build
import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    Batch,
    DistributedModel,
    LocalBatch,
    MLIPSpec,
    PipelineModel,
    ShardedBatch,
)
from nvdd_core.spec import DistributionSpec, HaloStorage, OutputKind, OutputSpec, ScatterMode, StrategyKind

# Neither model sums into ghosts, nor reads there what a neighbour wrote.
SPEC = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL)),
    outputs={"charges": OutputSpec(OutputKind.PER_NODE)},
)


class Base:
    """What both share."""

    dtype, device = torch.float64, torch.device("cpu")
    layers, neighbor_form = 1, "full"
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Any strategy will do."""
        return SPEC | MLIPSpec(distribution=DistributionSpec(strategy=strategy))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Accept every element."""


def sums(batch: LocalBatch, of_edges: torch.Tensor) -> torch.Tensor:
    """Sum over the edges into each row."""
    return of_edges.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], of_edges)


class Charges(Base):
    """Sodium is +1 and chlorine -1, more so where it is crowded."""

    cutoff = 4.0
    outputs = Base.outputs | {"charges"}

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return charges, and no energy."""
        crowd = sums(batch, (1.0 - batch.edge_vectors().square().sum(1) / self.cutoff**2).clamp_min(0.0) ** 2)
        sign = torch.where(batch.numbers == 11, 1.0, -1.0)
        charges = (sign * (1.0 + 0.05 * torch.tanh(crowd)))[: batch.n_owned]
        return {"node_energy": torch.zeros_like(charges), "charges": charges}


class Screened(Base):
    """A Coulomb energy that goes smoothly to zero at the cutoff."""

    cutoff = 6.0

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of owned rows; charges are there for ghosts, too."""
        sender, receiver = batch.edge_index
        q, r = batch.fields["charges"], batch.edge_vectors().square().sum(1).sqrt()
        smooth = (1.0 - (r / self.cutoff) ** 2).clamp_min(0.0) ** 2
        return {"node_energy": sums(batch, 7.1998 * q[sender] * q[receiver] * smooth / r)[: batch.n_owned]}


def main() -> None:
    """Evaluate both as one model."""
    salt = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    salt.rattle(0.1, seed=1)
    model = PipelineModel(
        {"q": Charges(), "coulomb": Screened()},
        weights={"coulomb": 0.9},
        wires={"charges": "charges"},  # output of a member -> field of those after it; here also the default
    )
    mesh = Mesh.single()
    out = DistributedModel(model, mesh=mesh)(
        ShardedBatch.scatter(Batch.from_ase(salt), mesh), {"energy", "forces", "charges"}
    )
    charges = out.extra["charges"]
    print(f"energy {float(out.energy):.6f} eV, charges {charges.min():.4f} to {charges.max():.4f}")


if __name__ == "__main__":
    main()
