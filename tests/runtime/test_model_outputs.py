"""Ways in which a model may give its results: per row, per system, as shares on local rows, and outputs of its own."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from nvdd_core.errors import DistributedError, InputError, PluginValidationError, SpecError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    DistributedModel,
    DomainConfig,
    ForceStrategy,
    LocalBatch,
    MLIPSpec,
    autograd_target,
    system_sum,
    to_local,
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
from tests.cases import oracle
from tests.cases.models import Toy2
from tests.cases.ranks import System, collect, mesh, share

POS, CELL = oracle.fcc(3, 3, 3)
CRYSTAL = System(POS, CELL, (True,) * 3)
OTHER = System(*oracle.fcc(2, 2, 2), (True,) * 3)
LOCAL = MLIPSpec(distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL)))
STRATEGIES = list(StrategyKind)


class PerSystem(Toy2):
    """Gives the energy of each system: complete on every rank, or this rank's share of it."""

    outputs = frozenset({"energy", "forces", "stress"})

    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.reduce = reduce

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        energy = OutputSpec(OutputKind.PER_GRAPH, self.reduce)
        return SPEC_MPNN_HALO | LOCAL | MLIPSpec(outputs={"energy": energy})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        rows = self.node_energy(batch)
        if self.reduce is Reduce.OWNED_ONLY:
            return {"energy": system_sum(rows, batch.system, batch.n_systems)}
        owned = batch.system[: batch.n_owned]
        return {"energy": rows.new_zeros(batch.n_systems).index_add(0, owned, rows[: batch.n_owned])}


class OwnForces(Toy2):
    """Takes derivatives itself and gives shares of forces on local rows, to be summed into owners."""

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        forces = OutputSpec(OutputKind.PER_NODE, Reduce.ALL_REDUCE)
        return (
            SPEC_MPNN_HALO | LOCAL | MLIPSpec(outputs={"forces": forces}, force_strategy=ForceStrategy.DIRECT)
        )

    outputs = frozenset({"energy", "forces", "node_energy"})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            target = autograd_target(batch.positions)
            energy = self.node_energy(batch)[: batch.n_owned]
            (grad,) = torch.autograd.grad(energy.sum() + 0.0 * target.sum(), target)
        return {"node_energy": energy.detach(), "forces": -grad}


class Extras(Toy2):
    """Further outputs: one per row, one per row as shares, one per system."""

    outputs = frozenset({"energy", "forces", "weight", "share", "count", "undeclared"})

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return (
            SPEC_MPNN_HALO
            | LOCAL
            | MLIPSpec(
                outputs={
                    "weight": OutputSpec(OutputKind.PER_NODE),
                    "share": OutputSpec(OutputKind.PER_NODE, Reduce.ALL_REDUCE),
                    "count": OutputSpec(OutputKind.PER_GRAPH),
                }
            )
        )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        sender, _ = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        inside = (r2 < self.cutoff**2).to(r2.dtype)
        counts = system_sum_local(inside.new_ones(batch.n_owned), batch)
        return {
            "node_energy": self.node_energy(batch),
            "weight": torch.stack([batch.ids.double(), 2.0 * batch.ids.double()], 1),
            # each edge counted at its sender, which may be a ghost: right only once summed into owners
            "share": inside.new_zeros(batch.n_local).index_add(0, sender, inside),
            "count": counts,
        }


def system_sum_local(values: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    return values.new_zeros(batch.n_systems).index_add(0, batch.system[: batch.n_owned], values)


def run(make: Any, systems: list[System], strategy: StrategyKind, wanted: set[str]) -> dict[str, np.ndarray]:
    group = mesh()
    sharded = share(systems, group)
    model = DistributedModel(make(), DomainConfig(strategy=strategy), group)
    out = model(sharded, wanted)
    found = {"energy": out.energy.numpy()}
    if out.forces is not None:
        found["forces"] = collect(out.forces, sharded.ids, sharded.n_global, group)
    if out.stress is not None:
        found["stress"] = out.stress.numpy()
    for name, value in out.extra.items():
        per_row = name in ("weight", "share")
        found[name] = collect(value, sharded.ids, sharded.n_global, group) if per_row else value.numpy()
    return found


def per_system_complete() -> PerSystem:
    return PerSystem(Reduce.OWNED_ONLY)


def per_system_share() -> PerSystem:
    return PerSystem(Reduce.ALL_REDUCE)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [per_system_complete, per_system_share, OwnForces])
def test_energies_per_system_and_own_forces(
    make: Any, strategy: StrategyKind, world: int, rank_pool: Any
) -> None:
    wanted = {"energy", "forces"} | (set() if make is OwnForces else {"stress"})
    right = run(Toy2, [CRYSTAL, OTHER], StrategyKind.HALO, wanted)
    assert abs(right["energy"][0] - oracle.toy2(POS, CELL, (True,) * 3)) < 1e-9
    for found in rank_pool(world).run(run, make, [CRYSTAL, OTHER], strategy, wanted):
        for name, value in right.items():
            assert np.abs(found[name] - value).max() < 1e-9, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_of_a_models_own(strategy: StrategyKind, rank_pool: Any) -> None:
    wanted = {"weight", "count"} | ({"share"} if strategy is not StrategyKind.WIDE_HALO else set())
    edges = oracle.directed_edges(POS, CELL, (True,) * 3, 2.5)
    degree = np.bincount(edges[0], minlength=len(POS))
    for world in (1, 3):
        results = (
            rank_pool(world).run(run, Extras, [CRYSTAL, OTHER], strategy, wanted)
            if world > 1
            else [run(Extras, [CRYSTAL, OTHER], strategy, wanted)]
        )
        for found in results:
            n = len(POS) + len(OTHER.pos)
            assert np.array_equal(found["weight"], np.stack([np.arange(n), 2.0 * np.arange(n)], 1))
            assert found["count"].tolist() == [len(POS), len(OTHER.pos)]
            if "share" in wanted:
                assert np.array_equal(found["share"][: len(POS)], degree)


class ByTag(Toy2):
    """Sums rows into systems by ``index_add`` on ``batch.system`` and goes on with the sums."""

    def __init__(self, scatter: ScatterMode) -> None:
        super().__init__()
        self.scatter = scatter

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        storage = HaloStorage(scatter=self.scatter)
        return SPEC_MPNN_HALO | MLIPSpec(
            distribution=DistributionSpec(strategy=strategy, storage=storage, system_reductions=True)
        )

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        rows = self.node_energy(batch)
        total = rows.new_zeros(batch.n_systems).index_add(0, batch.system, rows)
        return {"node_energy": rows * to_local(total)[to_local(batch.system)]}


class OwnStress(OwnForces):
    """Gives a virial that is complete on every rank, and says so."""

    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        stress = OutputSpec(OutputKind.PER_GRAPH, Reduce.OWNED_ONLY)
        return super().distribution_spec(strategy) | MLIPSpec(outputs={"stress": stress})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        return {**super().forward(batch), "virial": 2.0 * batch.cell}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scatter", [ScatterMode.LOCAL, ScatterMode.REFRESH])
def test_declared_system_reductions_hold_in_every_mode(
    scatter: ScatterMode, strategy: StrategyKind, rank_pool: Any
) -> None:
    wanted = {"energy", "forces", "stress"}
    make = partial(ByTag, scatter)
    right = run(make, [CRYSTAL, OTHER], StrategyKind.HALO, wanted)
    for found in rank_pool(2).run(run, make, [CRYSTAL, OTHER], strategy, wanted):
        for name, value in right.items():
            assert np.abs(found[name] - value).max() < 1e-9, name


def test_a_complete_virial_counts_once(rank_pool: Any) -> None:
    wanted = {"energy", "forces", "stress"}
    right = run(OwnStress, [CRYSTAL], StrategyKind.HALO, wanted)
    for found in rank_pool(2).run(run, OwnStress, [CRYSTAL], StrategyKind.HALO, wanted):
        assert np.abs(found["stress"] - right["stress"]).max() < 1e-12


def test_undeclared_output_is_refused() -> None:
    with pytest.raises(SpecError, match=r"undeclared.*OutputSpec"):
        run(Extras, [CRYSTAL], StrategyKind.HALO, {"undeclared"})


def test_one_word_is_no_set_of_outputs() -> None:
    sharded = share([CRYSTAL], mesh())
    with pytest.raises(InputError, match="outputs is the text 'energy'"):
        DistributedModel(Toy2())(sharded, "energy")


class Shares(OwnForces):
    """Forces on local rows, declared complete."""

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return SPEC_MPNN_HALO | LOCAL | MLIPSpec(force_strategy=ForceStrategy.DIRECT)


def refuse_shares() -> str:
    with pytest.raises(PluginValidationError) as caught:
        run(Shares, [CRYSTAL], StrategyKind.HALO, {"energy", "forces"})
    return str(caught.value)


def test_shares_declared_complete_are_refused_with_the_way_out(rank_pool: Any) -> None:
    for message in rank_pool(2).run(refuse_shares):
        assert "Reduce.ALL_REDUCE" in message


# -- derivatives of losses --


class Scaled(Toy2):
    """TOY2 times a parameter, with a parameter inside as well."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        self.inner = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        from nvdd_core.runtime import refresh_neighbors

        sender, receiver = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 2, torch.zeros_like(r2))
        h = refresh_neighbors(w.new_zeros(batch.n_local).index_add(0, receiver, w))
        m = w.new_zeros(batch.n_local).index_add(0, receiver, torch.tanh(self.inner * h[sender]) * w)
        return 0.01 * self.outer * m**2


def loss_gradients(strategy: StrategyKind) -> dict[str, np.ndarray]:
    """Gradients of a loss on energy, forces and stress, with respect to parameters and positions."""
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = Scaled()
    distributed = DistributedModel(model, DomainConfig(strategy=strategy), group)
    distributed(sharded)
    positions = sharded.positions.detach().clone().requires_grad_(True)
    sharded.rows["positions"] = positions
    out = distributed.differentiable(sharded, {"energy", "forces", "stress", "node_energy"})
    keyed = torch.sin(sharded.ids.double())
    loss = (out.forces.square().sum(1) * keyed).sum() + (out.node_energy * keyed).sum()
    if group.rank == 0:
        loss = loss + out.energy.sum() ** 2 * 1e-3 + out.stress.square().sum()
    else:
        loss = loss + 0.0 * (out.energy.sum() + out.stress.sum())
    grads = torch.autograd.grad(loss, [model.outer, model.inner, positions])
    found = {
        n: group.all_reduce_sum_(g.reshape(1).clone()).numpy() for n, g in zip("oi", grads, strict=False)
    }
    found["positions"] = collect(grads[2], sharded.ids, sharded.n_global, group)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_a_loss_do_not_depend_on_ranks(strategy: StrategyKind, rank_pool: Any) -> None:
    right = loss_gradients(StrategyKind.HALO)
    for found in rank_pool(2).run(loss_gradients, strategy):
        for name, value in right.items():
            assert np.abs(found[name] - value).max() <= 1e-10 * max(1.0, np.abs(value).max()), name


def test_differentiable_wants_a_current_domain() -> None:
    sharded = share([CRYSTAL], mesh())
    with pytest.raises(InputError, match="evaluate once"):
        DistributedModel(Toy2()).differentiable(sharded)


class Shortcut(Toy2):
    """A pair model that leaves positions out of the graph on a rank without edges."""

    layers = 1

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        _, receiver = batch.edge_index
        rows = batch.positions.new_zeros(batch.n_owned)
        if len(receiver):
            near = torch.relu(1.0 - batch.edge_vectors().square().sum(1) / self.cutoff**2)
            rows = rows.index_add(0, receiver, near**3)
        return {"node_energy": rows}

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return SPEC_MPNN_HALO | LOCAL


def shortcut_gradients() -> dict[str, np.ndarray]:
    """Gradients of losses on rows, forces and the energy where one rank has no edge."""
    group = mesh()
    pos = np.array([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0], [0.0, 1.4, 0.3], [40.0, 0.0, 0.0]])
    sharded = share([System(pos, np.zeros((3, 3)), (False,) * 3)], group)
    distributed = DistributedModel(Shortcut(), DomainConfig(grid_dims=(group.size, 1, 1)), group)
    distributed(sharded)
    positions = sharded.positions.detach().clone().requires_grad_(True)
    sharded.rows["positions"] = positions
    out = distributed.differentiable(sharded, {"forces", "node_energy"})
    keyed = torch.sin(1.0 + sharded.ids.double())
    losses = {
        "node_energy": (keyed * out.node_energy).sum(),
        "forces": (keyed[:, None] * out.forces**2).sum(),
        "energy": out.energy.sum() ** 2 * float(group.rank == 0),
    }
    found = {}
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, [positions], retain_graph=True)
        found[name] = collect(gradient, sharded.ids, sharded.n_global, group)
    return found


def test_a_rank_without_edges_takes_part_in_every_derivative(rank_pool: Any) -> None:
    right = shortcut_gradients()
    for found in rank_pool(2).run(shortcut_gradients, timeout=30):
        for name, value in right.items():
            assert np.abs(value).max() > 1e-3
            assert np.abs(found[name] - value).max() < 1e-10, name


# -- results that no rule could combine --


class Odd(Toy2):
    """Gives something wrong, by name."""

    outputs = frozenset({"energy", "forces", "stress", "node_energy", "charge"})

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        charge = OutputSpec(OutputKind.GLOBAL if self.how == "global" else OutputKind.PER_NODE)
        return SPEC_MPNN_HALO | LOCAL | MLIPSpec(outputs={"charge": charge})

    def forward(self, batch: LocalBatch) -> Any:
        self.calls += 1
        energy = self.node_energy(batch)
        charge = energy.detach()
        if self.how == "global":
            charge = energy.detach()[: batch.n_owned].sum()
        found: Any = {"node_energy": energy, "charge": charge}
        found |= {"virial": energy.new_full((3,), torch.nan)}  # nobody asked for it
        if self.how == "late" and self.calls > 1:
            found["charge"] = charge.new_zeros(batch.n_local + 5)
        wrong = {
            "detached": {"node_energy": energy.detach()},
            "integer": {"node_energy": energy.long()},
            "number": {"node_energy": 3.0},
            "nan": {"charge": charge * torch.nan},
        }
        if self.how == "tuple":
            return (energy,)
        return found | wrong.get(self.how, {})


def odd_message(how: str, world: int) -> tuple[str, str]:
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = DistributedModel(Odd(how), DomainConfig(skin=0.3), group)
    try:
        for _ in range(2):
            model(sharded, {"energy", "forces", "charge"})
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("detached", "PluginValidationError", "does not depend on positions"),
        ("integer", "PluginValidationError", "expected floating point"),
        ("number", "PluginValidationError", "as float; expected a tensor"),
        ("tuple", "PluginValidationError", "gave tuple; expected a dictionary"),
        ("late", "PluginValidationError", "shape"),
        ("nan", "NumericalError", "'charge' is not finite"),
        ("global", "PluginValidationError", "differs between ranks"),
        ("right", "", ""),
    ],
)
def test_odd_results(how: str, kind: str, text: str, rank_pool: Any) -> None:
    for name, message in rank_pool(2).run(odd_message, how, 2):
        assert name == kind, message
        assert text in message


class Disagreeing(PerSystem):
    """Declares each rank's share to be complete."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        rows = self.node_energy(batch)[: batch.n_owned]
        return {"energy": system_sum_local(rows, batch)}


def disagreeing() -> str:
    with pytest.raises(PluginValidationError) as caught:
        run(lambda: Disagreeing(Reduce.OWNED_ONLY), [CRYSTAL], StrategyKind.HALO, {"energy", "forces"})
    return str(caught.value)


def test_shares_declared_complete_on_every_rank(rank_pool: Any) -> None:
    for message in rank_pool(2).run(disagreeing):
        assert "'energy' is declared complete" in message
        assert "system_sum" in message


# -- checkpointed layers in a kept graph --


class Checkpointed(Scaled):
    """Runs its layers again for their gradient."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        inner = super().node_energy

        def body(positions: torch.Tensor) -> torch.Tensor:
            return inner(dataclasses.replace(batch, positions=positions))

        out: torch.Tensor = torch.utils.checkpoint.checkpoint(body, batch.positions, use_reentrant=False)
        return out


def checkpointed_gradient(make_name: str, inside: bool) -> Any:
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = {"plain": Scaled, "checkpointed": Checkpointed}[make_name]()
    distributed = DistributedModel(model, DomainConfig(), group)
    distributed(sharded)
    out = distributed.differentiable(sharded, {"energy", "node_energy"})
    loss = (out.node_energy * torch.sin(sharded.ids.double())).sum() + 0.0 * out.energy.sum()
    scope = distributed.differentiating(sharded) if inside else contextlib.nullcontext()
    try:
        with scope:
            (grad,) = torch.autograd.grad(loss, [model.inner])
    except DistributedError as exc:
        return str(exc)
    return float(group.all_reduce_sum_(grad.reshape(1).clone())[0])


def test_checkpointed_layers_of_a_kept_graph(rank_pool: Any) -> None:
    right = checkpointed_gradient("plain", False)
    for found in rank_pool(2).run(checkpointed_gradient, "checkpointed", True):
        assert found == pytest.approx(right, rel=1e-12)
    for found in rank_pool(2).run(checkpointed_gradient, "checkpointed", False):
        assert "differentiating" in found
