"""Members of compositions: charges that depend on positions (O-31), what reads them, and a pair potential by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from nvdd_core.adapters import ModuleHookAdapter
from nvdd_core.runtime import SPEC_MPNN_HALO, ForceStrategy, LocalBatch, MLIPSpec, autograd_target
from nvdd_core.spec import (
    DistributionSpec,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ScatterMode,
    StrategyKind,
)
from tests.cases.models import StandIn, Toy2

COULOMB = 14.399645  # eV Angstrom
_LOCAL = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL))
)


def _sum(batch: LocalBatch, values: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], values)


class Charges(StandIn):
    """O-31: q_i = z_i (1 + 0.05 tanh h_i), h_i = sum_j w_ij; sodium is +1, everything else -1. No energy."""

    neighbor_form = "full"
    outputs = frozenset({"energy", "forces", "stress", "node_energy", "charges"})

    def __init__(self, cutoff: float = 4.0, frozen: bool = False) -> None:
        super().__init__()
        self.cutoff, self.frozen = cutoff, frozen

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return _LOCAL | MLIPSpec(outputs={"charges": OutputSpec(OutputKind.PER_NODE)})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 2, 0.0)
        sign = torch.where(batch.numbers == 11, 1.0, -1.0).to(w.dtype)
        charges = sign * (1.0 + 0.05 * torch.tanh(_sum(batch, w)))
        if self.frozen:
            charges = charges.detach()
        return {"node_energy": charges.new_zeros(batch.n_owned), "charges": charges[: batch.n_owned]}


class Coulomb(StandIn):
    """A smoothly cut 1/r of the field ``charges``."""

    neighbor_form = "full"

    def __init__(self, cutoff: float = 6.0) -> None:
        super().__init__()
        self.cutoff = cutoff

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return _LOCAL

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        q = batch.fields["charges"]
        assert q.shape == (batch.n_local,)
        sender, receiver = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        inside = r2 < self.cutoff**2
        r = torch.where(inside, r2, 1.0).sqrt()
        w = torch.where(inside, (1.0 - r2 / self.cutoff**2) ** 2, 0.0)
        return _sum(batch, 0.5 * COULOMB * q[sender] * q[receiver] * w / r)


class ChargedInOne(Charges):
    """`Charges` and `Coulomb` as one model, on one rank only: the chain rule is autograd's own."""

    cutoff_outer = 6.0

    def __init__(self) -> None:
        super().__init__(4.0)
        self.inner, self.outer = Charges(4.0), Coulomb(self.cutoff_outer)
        self.cutoff = self.cutoff_outer

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        charges = self.inner.forward(batch)["charges"]
        batch.fields["charges"] = charges
        return {"node_energy": self.outer.node_energy(batch)}


class Detached(StandIn):
    """Loses its graph."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        return _sum(batch, batch.edge_vectors().detach().square().sum(1))


class DirectCharges(Charges):
    """Says that it computes forces itself."""

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return super().distribution_spec(strategy) | MLIPSpec(force_strategy=ForceStrategy.DIRECT)


class PerSystem(StandIn):
    """A well around the origin of each owned row's pairs, given as shares of each system's energy."""

    outputs = frozenset({"energy", "forces", "stress"})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 3, 0.0)
        rows = _sum(batch, w)[: batch.n_owned]
        owned = batch.system[: batch.n_owned]
        return {"energy": rows.new_zeros(batch.n_systems).index_add(0, owned, rows)}

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return _LOCAL


class OwnForces(Toy2):
    """Message passing that takes its derivatives itself, forces and virial as shares of local rows and ranks."""

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        forces = OutputSpec(OutputKind.PER_NODE, Reduce.ALL_REDUCE)
        return _LOCAL | MLIPSpec(outputs={"forces": forces}, force_strategy=ForceStrategy.DIRECT)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            rows = autograd_target(batch.positions)
            strain = batch.cell.new_zeros(batch.cell.shape).requires_grad_(True)
            symmetric = 0.5 * (strain + strain.mT)
            moved = rows + (rows[:, None] @ symmetric[batch.system])[:, 0]
            cell = batch.cell + batch.cell @ symmetric
            energy = self.node_energy(replace(batch, positions=moved, cell=cell))[: batch.n_owned]
            grads = torch.autograd.grad(energy.sum() + 0.0 * moved.sum(), [rows, strain])
        return {"node_energy": energy.detach(), "forces": -grads[0], "virial": grads[1]}


def _shift(module: torch.nn.Module, args: object, kwargs: object, output: torch.Tensor) -> torch.Tensor:
    """What a hook of the member `Hooked` does on several ranks: it leaves its mark, which energies show."""
    return output + module.mark


class Layer(torch.nn.Module):
    """Adds nothing of its own."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Hooked(StandIn):
    """A pair sum whose submodule ``layer`` is hooked on several ranks; every `Hooked` has the same pattern."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.module = torch.nn.ModuleDict({"layer": Layer(mark)})

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        hook = ModuleHookAdapter("layer", after="tests.cases.composed:_shift")
        return _LOCAL | MLIPSpec(distribution=DistributionSpec(third_party_helpers=(hook,)))

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 3, 0.0)
        rows: torch.Tensor = self.module["layer"](_sum(batch, w))
        return rows
