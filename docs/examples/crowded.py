"""A model in plain torch: evaluated, differentiated and run on any number of ranks.

``python docs/examples/crowded.py``, or on two ranks
``torchrun --standalone --nproc-per-node 2 docs/examples/crowded.py``.
"""

from __future__ import annotations

import ase
import ase.build
import torch

from nvdd_core.comm import Mesh, group_scope
from nvdd_core.dynamics import DomainParallel, HookContext, HookScope, VelocityVerlet, initial_velocities
from nvdd_core.errors import InputError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    Batch,
    DistributedManager,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    ShardedBatch,
    refresh_neighbors,
)
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind

# The model names its communication itself, so the framework adds none to its scatters.
SPEC = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL))
)


class Crowded:
    """A soft repulsion between argon atoms that is weaker where the neighbour is crowded."""

    cutoff = 5.0  # Angstrom
    layers = 2  # neighbours read what their own neighbours wrote
    neighbor_form = "full"  # every directed edge, ready for index_add
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(self, strength: float, dtype: torch.dtype, device: torch.device) -> None:
        self.strength, self.dtype, self.device = strength, dtype, device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Any strategy will do."""
        return SPEC | MLIPSpec(distribution=DistributionSpec(strategy=strategy))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Refuse every element but argon."""
        other = ids[numbers != 18]
        if other.numel():
            raise InputError(f"atom {int(other.min())} is not argon, the only element that this model knows")

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of each owned atom, eV; forces and stress follow from it."""
        sender, receiver = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        # the list reaches a skin further than the cutoff
        near = torch.where(r2 < self.cutoff**2, 1.0 - r2 / self.cutoff**2, torch.zeros_like(r2)) ** 2
        crowd = near.new_zeros(batch.n_local).index_add(0, receiver, near)
        crowd = refresh_neighbors(crowd)  # a ghost's own sum is on the rank that owns it
        pair = self.strength * near / (1.0 + crowd[sender])
        energy = pair.new_zeros(batch.n_local).index_add(0, receiver, pair)
        return {"node_energy": energy[: batch.n_owned]}


def load(*, dtype: torch.dtype, device: torch.device, strength: float = 0.3) -> Crowded:
    """Make the model; what a plugin's loader is, with one option, in eV."""
    return Crowded(strength, dtype, device)


class Printed:
    """A hook: what rank 0 sees of the whole system."""

    every = 10
    scope = HookScope.RANK_ZERO

    def __call__(self, ctx: HookContext) -> None:
        """Print one line."""
        print(f"step {ctx.step:3d}  T {ctx.info.temperature:.6f} K  total {ctx.info.total:.9f} eV")


class Fastest:
    """A hook that communicates: the highest speed of any atom, on every rank."""

    every = 20
    scope = HookScope.GLOBAL

    def __call__(self, ctx: HookContext) -> None:
        """Take the maximum over ranks; a rank without atoms takes part with zero."""
        speeds = ctx.state.velocities.square().sum(1).sqrt()
        fastest = torch.zeros(1, dtype=torch.float64, device=ctx.mesh.device)
        if speeds.numel():
            fastest[0] = speeds.max()
        ctx.mesh.all_reduce_max_(fastest)
        if ctx.mesh.rank == 0:
            print(f"step {ctx.step:3d}  fastest {float(fastest):.9f} A/fs")


def crystal() -> ase.Atoms:
    """Return 256 argon atoms, a little off their sites."""
    atoms = ase.build.bulk("Ar", "fcc", a=5.26, cubic=True) * (4, 4, 4)
    atoms.rattle(0.05, seed=1)
    return atoms


def main(mesh: Mesh) -> None:
    """Evaluate once, then run 40 steps."""
    # Only rank 0 needs the structure; the others get their share of it.
    sharded = ShardedBatch.scatter(Batch.from_ase(crystal()) if mesh.rank == 0 else None, mesh)
    model = DistributedModel(load(dtype=torch.float64, device=mesh.device), DomainConfig(skin=1.0), mesh)

    out = model(sharded, {"energy", "forces", "stress"})
    if mesh.rank == 0 and out.stress is not None:
        print(f"energy {float(out.energy):.9f} eV, stress xx {float(out.stress[0, 0, 0]):.9f} eV/A^3")

    sharded.rows["velocities"] = initial_velocities(
        sharded.masses, sharded.ids, 60.0, seed=3, sum_over_ranks=mesh.all_reduce_sum_
    )
    DomainParallel(VelocityVerlet(dt=2.0), model, [Printed(), Fastest()]).run(sharded, 40)

    whole = sharded.gather()  # a Batch on rank 0, None elsewhere
    if whole is not None:
        end = whole.to_ase()[0]
        print(f"atom 0 is at {end.positions[0].round(6).tolist()} A")


if __name__ == "__main__":
    with DistributedManager() as manager, group_scope(manager.mesh):
        main(manager.mesh)
