"""A foreign model on two ranks, with each kind of adapter that can mend it.

``python docs/examples/mended.py``; it starts the two ranks itself.
"""

from __future__ import annotations

import ase
import foreign  # stands for somebody else's package
import torch

from nvdd_core.adapters import FunctionAdapter, MethodAdapter, ModuleHookAdapter, OpAdapter, PythonAdapter
from nvdd_core.comm import Mesh
from nvdd_core.errors import SpecError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    Batch,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    ShardedBatch,
    WorkerPool,
    distributed_method,
    neighbor_refresh_adapters,
    refresh_neighbors,
    scatter_to_owners,
)
from nvdd_core.spec import DistributionSpec, StrategyKind


def refreshed_input(module, args, kwargs):
    """Refresh what a layer reads of its neighbours; a torch forward pre-hook."""
    h, *edges = args
    return (refresh_neighbors(h), *edges), kwargs


@distributed_method
def refreshed_layer(context, original, layer, h, *edges):
    """Do the same as the replacement of a method; a single process runs the original."""
    return original(layer, refresh_neighbors(h), *edges)


def refreshed_sum(original, h, sender, receiver):
    """Do it after the sum, as the replacement of a function."""
    return scatter_to_owners(original(h, sender, receiver))


ADAPTERS = {
    "nothing": (),
    "ModuleHookAdapter": (ModuleHookAdapter("rounds.*", before=refreshed_input),),
    "MethodAdapter": (MethodAdapter(foreign.Layer, "forward", refreshed_layer),),
    "neighbor_refresh_adapters": neighbor_refresh_adapters(foreign.Net().rounds, always=True),
    "FunctionAdapter": (FunctionAdapter(foreign.aggregate, refreshed_sum),),
    # The kernel in the place of the function, and what the kernel needs.
    "OpAdapter": (
        PythonAdapter(foreign, "aggregate", foreign.neighbor_sum),
        OpAdapter("foreign::neighbor_sum", gather_inputs=[0]),
    ),
}


class Model:
    """The foreign network as a model of nvdd; the energy of an atom is the sum of its features."""

    cutoff, layers, neighbor_form, dtype, device = 1.1, 2, "full", torch.float64, torch.device("cpu")
    outputs = frozenset({"energy"})

    def __init__(self, adapters) -> None:
        self.module, self.adapters = foreign.Net(), adapters

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """The preset, and the adapters."""
        return SPEC_MPNN_HALO | MLIPSpec(
            distribution=DistributionSpec(strategy=strategy, third_party_helpers=self.adapters)
        )

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Every element will do."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of each owned atom."""
        features = batch.numbers[:, None].double() / 10.0
        features = self.module(features, *batch.edge_index)
        return {"node_energy": features[: batch.n_owned, 0]}


def energy(mesh: Mesh, name: str) -> str:
    """Evaluate a chain of six atoms."""
    chain = ase.Atoms("HHeLiBeBC", positions=[[float(i), 0.0, 0.0] for i in range(6)])
    sharded = ShardedBatch.scatter(Batch.from_ase(chain) if mesh.rank == 0 else None, mesh)
    try:
        model = DistributedModel(Model(ADAPTERS[name]), DomainConfig(), mesh)
        return f"{float(model(sharded, {'energy'}).energy):.9f}"
    except SpecError as error:
        return f"SpecError: {str(error).split(':')[0]} ..."


def main() -> None:
    """Print the energy of one process, and that of two ranks for each kind of adapter."""
    print(f"{'one process':28s}{energy(Mesh.single('cpu'), 'nothing')}")
    with WorkerPool(2) as pool:
        for name in ADAPTERS:
            print(f"{name:28s}{pool.run(energy, name)[0]}")


if __name__ == "__main__":
    main()
