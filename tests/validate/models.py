"""Toy models, each with one deliberate fault, and the right ones that they were made of."""

from __future__ import annotations

import os

import torch

from nvdd_core.adapters import MethodAdapter
from nvdd_core.comm import all_reduce_sum_symmetric
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    LocalBatch,
    MLIPSpec,
    Scope,
    current_dd_context,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
)
from nvdd_core.spec import (
    DistributionSpec,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ScatterMode,
    StrategyKind,
)

CUTOFF = 2.5


def mode(scatter: ScatterMode) -> MLIPSpec:
    """The preset with another scatter mode."""
    storage = HaloStorage(scatter=scatter)
    return SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(storage=storage))


class Toy:
    """What all of them share."""

    cutoff = CUTOFF
    layers = 1
    neighbor_form = "full"
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    spec = mode(ScatterMode.LOCAL)

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return self.spec | MLIPSpec(distribution=DistributionSpec(strategy=strategy))

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        pass

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def weights(batch: LocalBatch) -> torch.Tensor:
    r2 = batch.edge_vectors().square().sum(1)
    return torch.where(r2 < CUTOFF**2, (1.0 - r2 / CUTOFF**2) ** 2, torch.zeros_like(r2))


def sum_edges(batch: LocalBatch, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(batch.n_local).index_add(0, index, values)


class Pair(Toy):
    """Right: a pair potential."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        return {"node_energy": sum_edges(batch, batch.edge_index[1], weights(batch))}


class TwoLayers(Toy):
    """Right: neighbours read what refresh_neighbors brings."""

    layers = 2

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        h = refresh_neighbors(sum_edges(batch, receiver, w))
        m = sum_edges(batch, receiver, torch.tanh(0.1 * h[sender]) * w)
        return {"node_energy": 0.01 * m**2}


class Forgot(TwoLayers):
    """Declares one layer and refreshes nothing; its buffers are plain."""

    layers = 1

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        h = torch.zeros(batch.n_local, dtype=w.dtype).index_add(0, receiver, w)  # stale
        m = torch.zeros(batch.n_local, dtype=w.dtype).index_add(0, receiver, torch.tanh(0.1 * h[sender]) * w)
        return {"node_energy": 0.01 * m**2}


class StaleByMode(Toy):
    """Plain torch on buffers made from positions, under a mode that refreshes nothing."""

    layers = 1

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        h = batch.positions.new_zeros(batch.n_local)
        h.index_add_(0, receiver, w)
        m = batch.positions.new_zeros(batch.n_local)
        m.index_add_(0, receiver, torch.tanh(0.1 * h[sender]) * w)
        return {"node_energy": 0.01 * m**2}


class Gate(Toy):
    """Sums into senders, so ghosts hold shares, under a mode that throws these away."""

    layers = 2
    spec = mode(ScatterMode.REFRESH)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        eta = batch.positions.new_zeros(batch.n_local)
        eta = eta.index_add(0, sender, torch.log1p(-0.05 * w)).exp()
        return {"node_energy": sum_edges(batch, receiver, w * eta[sender])}


class RightGate(Gate):
    """Right: the same, with the verb."""

    spec = mode(ScatterMode.LOCAL)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        eta = scatter_to_owners(sum_edges(batch, sender, torch.log1p(-0.05 * w))).exp()
        return {"node_energy": sum_edges(batch, receiver, w * eta[sender])}


class SelfTerm(Toy):
    """Adds a complete term to owned and ghost rows alike, under a mode that sums ghosts home."""

    layers = 2
    spec = mode(ScatterMode.HALO_CORRECTION)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        everyone = torch.arange(batch.n_local)
        h = batch.positions.new_zeros(batch.n_local)
        h = h.index_add(0, everyone, 0.1 * batch.numbers.to(w.dtype)).index_add(0, receiver, w)
        m = sum_edges(batch, receiver, torch.tanh(0.1 * h[sender]) * w)
        return {"node_energy": 0.01 * m**2}


class EnergyTwice(Toy):
    """Returns an energy that is complete on every rank, under a rule that sums it once more."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        return {"energy": system_sum(node, batch.system, batch.n_systems), "node_energy_": node}

    outputs = frozenset({"energy", "forces", "stress"})


class EnergyOnce(EnergyTwice):
    """Right: the same with the rule that fits."""

    spec = mode(ScatterMode.LOCAL) | MLIPSpec(
        outputs={"energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.OWNED_ONLY)}
    )


class EnergyShare(EnergyTwice):
    """Returns this rank's share under a rule that takes it for complete."""

    spec = EnergyOnce.spec

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        return {"energy": system_sum(node, batch.system, batch.n_systems, Scope.LOCAL)}


class SummedTwice(Toy):
    """Sums over ranks what is summed already, and goes on with it."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        total = system_sum(node, batch.system, batch.n_systems)
        mesh = current_dd_context().mesh
        if mesh is not None:
            total = all_reduce_sum_symmetric(total, mesh)
        return {"node_energy": node * torch.tanh(0.001 * total[batch.system])}


def local_total(values: torch.Tensor) -> torch.Tensor:
    """A helper as foreign code has it: the sum over all rows that it is given."""
    return values.sum()


class LocalHelper(Toy):
    """Scales by a helper's sum over this rank's owned rows."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        total = local_total(node[: batch.n_owned])
        return {"node_energy": node[: batch.n_owned] * torch.tanh(0.001 * total)}


class GhostHelper(Toy):
    """The same with ghosts among the rows."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = refresh_neighbors(sum_edges(batch, batch.edge_index[1], weights(batch)))
        return {"node_energy": node * torch.tanh(0.001 * local_total(node))}


class LocalMean(Toy):
    """Subtracts a mean over this rank's rows."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))[: batch.n_owned]
        mean = node.mean()
        return {"node_energy": (node - mean) ** 2}


class SegmentMean(Toy):
    """Sums rows by system in plain torch and goes on with this rank's share."""

    spec = mode(ScatterMode.REFRESH)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = batch.positions.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], weights(batch))
        total = torch.zeros(batch.n_systems, dtype=self.dtype).index_add(0, batch.system, node)
        return {"node_energy": node * torch.tanh(0.001 * total[batch.system])}


class GraphOutput(Toy):
    """Gives a further output per system whose ghosts are counted, in a rule that sums shares."""

    outputs = Toy.outputs | {"charge"}
    spec = mode(ScatterMode.LOCAL) | MLIPSpec(
        outputs={"charge": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)}
    )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = refresh_neighbors(sum_edges(batch, batch.edge_index[1], weights(batch)))
        charge = node.new_zeros(batch.n_systems).index_add(0, batch.system, node)
        return {"node_energy": node, "charge": charge}


class Scalar(Toy):
    """Right: gives a further output that is a single number, complete on every rank."""

    outputs = Toy.outputs | {"lowest"}
    spec = mode(ScatterMode.LOCAL) | MLIPSpec(outputs={"lowest": OutputSpec(OutputKind.GLOBAL)})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        total = system_sum(node.square(), batch.system, batch.n_systems)
        return {"node_energy": node, "lowest": total.min()}


class Leaves(Pair):
    """Ends the process, but not where it is alone."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        if "NVDD_WORKER" in os.environ:
            raise SystemExit(0)
        return super().forward(batch)


class LeavesAtOnce(Pair):
    """Ends the process when it is made."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        raise SystemExit(0)


class GraphShare(GraphOutput):
    """Gives this rank's share of it in a rule that takes it for complete."""

    spec = mode(ScatterMode.LOCAL) | MLIPSpec(
        outputs={"charge": OutputSpec(OutputKind.PER_GRAPH, Reduce.OWNED_ONLY)}
    )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))
        charge = system_sum(node, batch.system, batch.n_systems, Scope.LOCAL)
        return {"node_energy": node, "charge": charge}


class TwoFaults(StaleByMode):
    """Stale ghosts by mode, and a share under a rule that takes it for complete."""

    outputs = GraphShare.outputs
    spec = GraphShare.spec

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = super().forward(batch)["node_energy"]
        return {"node_energy": node, "charge": system_sum(node, batch.system, batch.n_systems, Scope.LOCAL)}


class NodeShares(Toy):
    """Gives a further output per row as shares on local rows, in a rule that takes owned rows for complete."""

    outputs = Toy.outputs | {"density"}
    spec = mode(ScatterMode.LOCAL) | MLIPSpec(outputs={"density": OutputSpec(OutputKind.PER_NODE)})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        return {"node_energy": sum_edges(batch, receiver, w), "density": sum_edges(batch, sender, w)}


@torch.jit.script
def scripted_sum(buffer: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return buffer.index_add(0, index, values)


class Scripted(Toy):
    """Lets scripted code scatter, which no handler sees."""

    spec = mode(ScatterMode.REFRESH)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, receiver = batch.edge_index
        w = weights(batch)
        h = scripted_sum(batch.positions.new_zeros(batch.n_local), receiver, w)
        m = sum_edges(batch, receiver, torch.tanh(0.1 * h[sender]) * w)
        return {"node_energy": 0.01 * m**2}


class LongSighted(Toy):
    """Looks at all rows that it is given, up to twice its declared cutoff."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        x = batch.positions
        d2 = (x[: batch.n_owned, None] - x[None]).square().sum(2)
        reach = (2.0 * CUTOFF) ** 2
        w = torch.where((d2 < reach) & (d2 > 0), (1.0 - d2 / reach) ** 2, torch.zeros_like(d2))
        return {"node_energy": w.sum(1)}


class Raises(Toy):
    """Raises on ranks only."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        if current_dd_context().is_distributed:
            raise ValueError("this toy can't share")
        return {"node_energy": sum_edges(batch, batch.edge_index[1], weights(batch))}


class RaisesAlone(Toy):
    """Raises always."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        raise ValueError("this toy is broken")


class OneWay(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class OnceOnly(OneWay):
    """The identity, which can be differentiated once."""

    @staticmethod
    def backward(ctx, grad):
        return OneWay.apply(grad)


class NoSecondDerivative(Toy):
    """Right, though forces can't be differentiated."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], OnceOnly.apply(weights(batch)))
        return {"node_energy": node**2}


class Thrower(torch.autograd.Function):
    """The identity, whose derivative raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this toy's backward expects a gradient of another shape")


class Fragile(torch.autograd.Function):
    """The identity, whose second derivative is broken, which is not the same as missing."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return Thrower.apply(grad)


class BrokenSecondDerivative(Toy):
    """Its second derivative raises."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], Fragile.apply(weights(batch)))
        return {"node_energy": node**2}


class Foreign:
    """Somebody else's class."""

    def value(self) -> float:
        return 1.0


NAMELESS = MLIPSpec(
    distribution=DistributionSpec(
        third_party_helpers=(MethodAdapter(Foreign, "value", lambda original, instance: original(instance)),)
    )
)


class NamelessAdapter(Pair):
    """Right; an adapter of its spec is a lambda, which no other process finds by name."""

    spec = mode(ScatterMode.LOCAL) | NAMELESS


class NamelessStale(StaleByMode):
    """Wrong, with such an adapter."""

    spec = StaleByMode.spec | NAMELESS


class Detached(Toy):
    """Values are right; a sum over ranks without a gradient makes forces wrong."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        node = sum_edges(batch, batch.edge_index[1], weights(batch))[: batch.n_owned]
        total = node.sum()
        mesh = current_dd_context().mesh
        if mesh is not None and mesh.size > 1:
            total = mesh.all_reduce_sum_(total.detach().clone())
        return {"node_energy": node * torch.tanh(0.001 * total)}


class Layer(torch.nn.Module):
    """One layer of message passing as a module; it forgets to refresh what it returns."""

    def forward(self, h: torch.Tensor, batch: LocalBatch, w: torch.Tensor) -> torch.Tensor:
        sender, receiver = batch.edge_index
        return torch.zeros_like(h).index_add(0, receiver, torch.tanh(0.1 * h[sender]) * w)


class Stacked(torch.nn.Module, Toy):
    """Three layers as submodules."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        torch.nn.Module.__init__(self)
        Toy.__init__(self, dtype, device)
        self.blocks = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        w = weights(batch)
        h = batch.numbers.to(w.dtype)
        for block in self.blocks:
            h = block(h, batch, w)
        return {"node_energy": h}
