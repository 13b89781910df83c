"""Compositions: sums equal to the members' own results, on any number of ranks, at the price of one exchange."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.errors import InputError, PluginValidationError, SpecError
from nvdd_core.runtime import (
    DistributedModel,
    DistributedPipelineModel,
    DomainConfig,
    ForceStrategy,
    Model,
    PipelineModel,
)
from nvdd_core.spec import StrategyKind
from nvdd_lj.model import load as load_lj
from tests.cases import composed, models, oracle
from tests.cases.ranks import Result, System, assert_same, collect, evaluate, mesh, share

PERIODIC = (True,) * 3
CRYSTAL = System(*oracle.fcc(3, 3, 3), PERIODIC)
SKEW = System(*oracle.triclinic(), PERIODIC)
SMALL = System(*oracle.fcc(1, 1, 1), PERIODIC)
DROPLET = System(oracle.fcc(2, 2, 2)[0] + 0.4, np.zeros((3, 3)), (False,) * 3)
WORLDS = (2, 3, 4)
ON_RANKS = {2: ("crystal", "skew"), 3: ("crystal", "droplet"), 4: ("crystal", "small")}
STRATEGIES = list(StrategyKind)
SKIN = 0.3


def lj(cutoff: float, dtype: torch.dtype = torch.float64) -> Model:
    return load_lj(
        dtype=dtype, device=torch.device("cpu"), epsilon=1.0, sigma=1.0, cutoff=cutoff, shift="none"
    )


class ShortToy2(models.InPlaceToy2):
    """Its list, not its formula, is shorter than that of others; ordinary torch code that dispatch exchanges."""


# What is composed: the members' makers by name, and their weights.
COMPOSITIONS: dict[str, tuple[dict[str, Callable[[], Any]], dict[str, float]]] = {
    "two lj": ({"near": lambda: lj(1.7), "far": lambda: lj(2.9)}, {}),
    "lj and toy2": ({"lj": lambda: lj(3.1), "toy2": ShortToy2}, {"toy2": -0.5}),
    "toy2 and lj": ({"toy2": models.Toy2, "lj": lambda: lj(1.9)}, {"lj": 0.25}),
    "gate and toy2": ({"gate": models.Gate, "toy2": models.InPlaceToy2, "lj": models.TorchLJ}, {"gate": 2.0}),
    "systems": (
        {"systems": composed.PerSystem, "lj": lambda: lj(1.9), "toy2": models.Toy2},
        {"systems": 3.0},
    ),
}

COMPOSITIONS["own forces and toy2"] = (
    {"own": composed.OwnForces, "toy2": models.InPlaceToy2, "lj": lambda: lj(1.9)},
    {"own": 1.5},
)


def make(name: str) -> PipelineModel:
    makers, weights = COMPOSITIONS[name]
    return PipelineModel({key: maker() for key, maker in makers.items()}, weights=weights)


def summed(name: str, system: System) -> Result:
    """The members one by one, in this process."""
    makers, weights = COMPOSITIONS[name]
    total: Result | None = None
    stress = all(system.pbc)
    for key, maker in makers.items():
        found, factor = evaluate(maker, [system], stress=stress), weights.get(key, 1.0)
        found.energy, found.forces = factor * found.energy, factor * found.forces
        found.stress = None if found.stress is None else factor * found.stress
        if total is None:
            total = found
        else:
            total.energy, total.forces = total.energy + found.energy, total.forces + found.forces
            total.stress = None if found.stress is None else total.stress + found.stress
    assert total is not None
    return total


SYSTEMS = {"crystal": CRYSTAL, "skew": SKEW, "small": SMALL, "droplet": DROPLET}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("where", SYSTEMS)
def test_one_process_gives_the_sum_of_the_members(name: str, where: str) -> None:
    system = SYSTEMS[where]
    right = summed(name, system)
    for strategy in STRATEGIES:
        config = DomainConfig(skin=SKIN, strategy=strategy)
        found = evaluate(lambda: make(name), [system], config, stress=all(system.pbc))
        assert np.abs(found.energy - right.energy).max() <= 1e-12 * max(1.0, np.abs(right.energy).max())
        assert np.abs(found.forces - right.forces).max() <= 1e-12 * max(1.0, np.abs(right.forces).max())
        if found.stress is not None:
            assert np.abs(found.stress - right.stress).max() <= 1e-12 * max(1.0, np.abs(right.stress).max())


def _all_ways(places: tuple[str, ...]) -> list[tuple[str, str, str, Result]]:
    found = []
    for name in COMPOSITIONS:
        for where in places:
            system = SYSTEMS[where]
            for strategy in STRATEGIES:
                config = DomainConfig(skin=SKIN, strategy=strategy)
                result = evaluate(lambda name=name: make(name), [system], config, stress=all(system.pbc))
                found.append((name, where, strategy.value, result))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_give_the_sum_of_the_members(rank_pool: Any, world: int) -> None:
    places = ON_RANKS[world]
    right = {(name, where): summed(name, SYSTEMS[where]) for name in COMPOSITIONS for where in places}
    for ways in rank_pool(world).run(_all_ways, places, timeout=300):
        for name, where, strategy, result in ways:
            assert_same(result, right[name, where], f"{name} {where} {strategy}", edges=False)


def _exchanges() -> dict[str, dict[str, int]]:
    """Collectives of a steady step of each: one composition and its members alone."""
    makers = {
        "lj": lambda: lj(1.7),
        "toy2": models.Toy2,
        "two lj": lambda: make("two lj"),
        "three": lambda: PipelineModel({"a": lj(1.7), "b": lj(2.9), "c": models.Toy2()}),
    }
    found = {}
    for name, maker in makers.items():
        group = mesh()
        sharded = share([CRYSTAL], group)
        model = DistributedModel(maker(), DomainConfig(skin=SKIN), group)
        model(sharded)
        before = group.counter.snapshot()
        model(sharded)
        found[name] = dict(group.counter.since(before).calls)
    return found


def test_all_members_share_one_exchange_of_positions(rank_pool: Any) -> None:
    for found in rank_pool(2).run(_exchanges, timeout=120):
        assert found["two lj"] == found["lj"]
        assert found["three"] == found["toy2"]


def test_a_member_sees_the_edges_of_its_own_cutoff() -> None:
    class Seeing(models.TorchLJ):
        cutoff = 1.5
        neighbor_form = "full"

        def node_energy(self, batch: Any) -> torch.Tensor:
            self.seen = batch
            return super().node_energy(batch)

    near, far = Seeing(), lj(3.1)
    sharded = share([CRYSTAL], mesh())
    model = DistributedModel(PipelineModel({"near": near, "far": far}), DomainConfig(skin=0.2))
    model(sharded)
    alone = DistributedModel(Seeing(), DomainConfig(skin=0.2))
    alone(share([CRYSTAL], mesh()))
    assert near.seen.neighbors.form == "full"
    assert near.seen.neighbors.n_edges == alone.domain.neighbors.n_edges < model.domain.neighbors.n_edges
    assert near.seen.edge_vectors().square().sum(1).max() <= 1.7**2
    first = near.seen.neighbors
    sharded.positions.add_(0.01)  # less than half the skin: the lists stay what they are
    model(sharded)
    assert near.seen.neighbors is first
    sharded.positions.add_(0.2)
    model(sharded)
    assert near.seen.neighbors is not first


def test_equal_cutoffs_share_one_list() -> None:
    model = DistributedModel(PipelineModel({"a": lj(2.5), "b": lj(2.5)}))
    model(share([CRYSTAL], mesh()))
    one, other = model.domain.parts
    assert one is other is model.domain.neighbors


def test_width_of_a_wide_halo_is_the_widest_product() -> None:
    members = {"lj": lj(4.0), "toy2": models.Toy2()}
    config = DomainConfig(strategy=StrategyKind.WIDE_HALO, skin=0.5)
    assert DistributedPipelineModel(members, config)._builder.width == pytest.approx(2 * (2.5 + 0.5))
    members["lj"] = lj(7.0)
    assert DistributedPipelineModel(members, config)._builder.width == pytest.approx(7.0 + 0.5)


def test_several_systems_and_energies_of_rows() -> None:
    systems = [CRYSTAL, SKEW]
    right = [evaluate(maker, systems) for maker in COMPOSITIONS["lj and toy2"][0].values()]
    found = evaluate(lambda: make("lj and toy2"), systems)
    assert found.energy == pytest.approx(right[0].energy - 0.5 * right[1].energy, abs=1e-11)
    model = DistributedModel(make("lj and toy2"))
    sharded = share(systems, mesh())
    out = model(sharded, {"energy", "node_energy"})
    assert out.node_energy is not None
    assert float(out.node_energy.sum()) == pytest.approx(float(out.energy.sum()), abs=1e-11)


# -- charges of one member feed another (O-31) ---------------------------------------------------------------------


def salt() -> System:
    a = 5.64
    f = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    pos = a * np.concatenate([f, f + np.array([0.5, 0, 0])])
    k = np.arange(8)
    return System(
        pos + 0.1 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1), a * np.eye(3), PERIODIC
    )


class Salt(System):
    """Four sodium ions, then four chloride ions."""

    def atoms(self) -> Any:
        atoms = super().atoms()
        atoms.set_chemical_symbols(["Na"] * 4 + ["Cl"] * 4)
        return atoms


SALT = Salt(salt().pos, salt().cell, PERIODIC)


def charged(frozen: bool = False) -> PipelineModel:
    return PipelineModel({"q": composed.Charges(frozen=frozen), "lj": lj(2.0), "coulomb": composed.Coulomb()})


def _salt_energy(pos: np.ndarray, cell: np.ndarray) -> float:
    return float(evaluate(charged, [Salt(pos, cell, PERIODIC)], stress=False).energy[0])


def test_forces_and_stress_go_through_the_charges() -> None:
    found = evaluate(charged, [SALT])
    alone = evaluate(composed.ChargedInOne, [SALT])
    repulsion = evaluate(lambda: lj(2.0), [SALT])
    assert np.abs(found.forces - alone.forces - repulsion.forces).max() <= 1e-12
    assert np.abs(found.stress - alone.stress - repulsion.stress).max() <= 1e-12
    h = 1e-5
    for atom, axis in ((0, 0), (5, 2)):
        ends = []
        for sign in (1, -1):
            pos = SALT.pos.copy()
            pos[atom, axis] += sign * h
            ends.append(_salt_energy(pos, SALT.cell))
        assert -(ends[0] - ends[1]) / (2 * h) == pytest.approx(found.forces[atom, axis], abs=1e-7)
    ends = []
    for sign in (1, -1):
        strain = np.eye(3)
        strain[0, 0] += sign * h
        ends.append(_salt_energy(SALT.pos @ strain, SALT.cell @ strain))
    slope = (ends[0] - ends[1]) / (2 * h) / np.linalg.det(SALT.cell)
    assert slope == pytest.approx(found.stress[0, 0, 0], abs=1e-8)
    frozen = evaluate(lambda: charged(frozen=True), [SALT])
    assert frozen.energy == pytest.approx(found.energy, abs=1e-11)
    assert np.abs(frozen.forces - found.forces).max() > 1e-2, "the case would not notice a lost chain rule"


def _charged_ways() -> list[tuple[str, Result]]:
    ways = [DomainConfig(skin=SKIN, strategy=strategy) for strategy in STRATEGIES]
    return [(way.strategy.value, evaluate(charged, [SALT], way)) for way in ways]


@pytest.mark.parametrize("world", WORLDS)
def test_charges_of_ghosts_are_their_owners(rank_pool: Any, world: int) -> None:
    right = evaluate(charged, [SALT])
    for ways in rank_pool(world).run(_charged_ways, timeout=120):
        for strategy, result in ways:
            assert_same(result, right, strategy, edges=False)
            # positions and charges, and the adjoint of each
            assert result.calls["exchange"] == 2
            assert result.calls["reverse"] == 2


def _charges() -> np.ndarray:
    group = mesh()
    sharded = share([SALT], group)
    out = DistributedModel(charged(), None, group)(sharded, {"energy", "charges"})
    return collect(out.extra["charges"], sharded.ids, 8, group)


def test_charges_are_an_output_of_the_composition(rank_pool: Any) -> None:
    right = _charges()
    assert right[:4].min() > 1.0
    assert right[4:].max() < -1.0
    for found in rank_pool(2).run(_charges, timeout=60):
        assert np.abs(found - right).max() <= 1e-14


def test_a_wire_names_members_where_several_could_be_meant() -> None:
    members = {"one": composed.Charges(), "two": composed.Charges(3.0), "coulomb": composed.Coulomb()}
    with pytest.raises(InputError, match="'one' and 'two' give 'charges'; write 'one/charges'"):
        PipelineModel(members, wires={"charges": "charges"})
    wired = evaluate(lambda: PipelineModel(members, wires={"two/charges": "coulomb/charges"}), [SALT])
    plain = {"two": composed.Charges(3.0), "coulomb": composed.Coulomb()}
    assert wired.energy == evaluate(lambda: PipelineModel(plain), [SALT]).energy
    assert PipelineModel(members, wires={}).outputs >= {"one/charges", "two/charges"}
    with pytest.raises(InputError, match="no member has an output 'spin'"):
        PipelineModel(members, wires={"spin": "charges"})
    with pytest.raises(InputError, match="no member 'ewald'"):
        PipelineModel(members, wires={"one/charges": "ewald/charges"})
    with pytest.raises(InputError, match="feeds nobody"):
        PipelineModel({"coulomb": composed.Coulomb(), "q": composed.Charges()}, wires={"charges": "charges"})
    with pytest.raises(InputError, match="two outputs feed the field 'charges'"):
        PipelineModel(members, wires={"one/charges": "coulomb/charges", "two/charges": "coulomb/charges"})


def test_charges_go_from_one_member_to_those_after_it() -> None:
    one, two, coulomb, other = composed.Charges(), composed.Charges(3.0), composed.Coulomb(), models.TorchLJ()
    with pytest.raises(
        InputError, match=r"'one' and 'two' all give 'charges', and 'coulomb', .* could read any"
    ):
        PipelineModel({"one": one, "two": two, "coulomb": coulomb})
    nearest = PipelineModel({"lj": lj(2.0), "one": one, "coulomb": coulomb, "other": other, "two": two})
    assert [(wire.source, wire.readers) for wire in nearest.wires] == [(1, {2, 3})]
    for apart in (
        {"one": one, "two": two},
        {"one": one, "two": two, "lj": lj(2.0)},
        {"one": one, "lj": lj(2.0)},
    ):
        assert not PipelineModel(apart).wires  # nobody could read them


def test_a_field_has_one_source() -> None:
    coulomb = composed.Coulomb()
    coulomb.given_fields = frozenset({"charges"})
    members = {"q": composed.Charges(), "toy2": models.Toy2(), "coulomb": coulomb}
    message = (
        "member 'coulomb' has its 'charges' from an option of its own, and 'charges' of member 'q' would feed"
    )
    with pytest.raises(InputError, match=message):
        PipelineModel(members)
    assert PipelineModel(members, wires={"charges": "toy2/charges"}).wires
    assert not PipelineModel(members, wires={}).wires


def test_a_derivative_is_never_lost_silently() -> None:
    q, coulomb = composed.Charges(), composed.Coulomb()
    direct = PipelineModel({"q": composed.DirectCharges(), "coulomb": coulomb})
    with pytest.raises(SpecError, match="member 'q' computes forces itself"):
        direct.distribution_spec(StrategyKind.HALO)
    reader = PipelineModel({"q": q, "lj": lj(2.0)}, wires={"charges": "lj/charges"})
    with pytest.raises(SpecError, match="member 'lj' computes forces itself"):
        reader.distribution_spec(StrategyKind.HALO)
    detached = DistributedModel(PipelineModel({"lj": models.TorchLJ(), "lost": composed.Detached()}))
    with pytest.raises(PluginValidationError, match=r"member 'lost': .*does not depend on positions"):
        detached(share([CRYSTAL], mesh()))


# -- how members fit together --------------------------------------------------------------------------------------


def test_the_spec_is_that_of_all_members() -> None:
    for name, kind in (
        ("two lj", ForceStrategy.DIRECT),
        ("lj and toy2", ForceStrategy.MIXED),
        ("gate and toy2", ForceStrategy.AUTOGRAD),
    ):
        for strategy in STRATEGIES:
            spec = make(name).distribution_spec(strategy)
            assert spec.force_strategy is kind
            assert spec.strategy is strategy
            assert type(spec).from_dict(spec.to_dict()) == spec
    model = make("lj and toy2")
    assert (model.cutoff, model.layers, model.neighbor_form) == (3.1, 2, "half")
    assert model.outputs == {"energy", "forces", "stress", "node_energy"}
    with pytest.raises(InputError, match=r"ForceStrategy\.MIXED"):
        DistributedModel(model).differentiable(share([CRYSTAL], mesh()))
    with pytest.raises(SpecError, match="each member by the member's own spec"):
        DistributedModel(model, spec=model.distribution_spec(StrategyKind.HALO))


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ({}, {}, "no members"),
        ([lj(2.0), lj(2.0, torch.float32)], {}, "in torch.float64, 'LennardJones2' in torch.float32"),
        ({"a/b": lj(2.0)}, {}, "without a slash"),
        ({"a": lj(2.0)}, {"weights": {"b": 1.0}}, "no member 'b'"),
        ({"a": lj(2.0)}, {"weights": {"a": float("nan")}}, "the weight of 'a' is nan"),
        ([lj(2.0)], {"weights": [1.0, 2.0]}, "2 weights for 1 members"),
        ({"a": PipelineModel([lj(2.0)])}, {}, "is a composition itself"),
    ],
)
def test_members_that_do_not_fit_are_refused(members: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineModel(members, **options)


def test_a_missing_element_is_named_by_the_member() -> None:
    members = {"toy2": models.Toy2(), "lj": load_lj(dtype=torch.float64, device=torch.device("cpu"))}
    with pytest.raises(InputError, match="member 'lj': lj: no parameters for Na"):
        DistributedModel(PipelineModel(members))(share([SALT], mesh()))


def test_a_composition_travels() -> None:
    model = make("lj and toy2")
    evaluate(lambda: model, [CRYSTAL])
    again = pickle.loads(pickle.dumps(make("two lj")))
    assert evaluate(lambda: again, [CRYSTAL]).energy == evaluate(lambda: make("two lj"), [CRYSTAL]).energy


# -- adapters ------------------------------------------------------------------------------------------------------


def _hooked() -> tuple[float, list[tuple[str, str, str | None, str]], int]:
    group = mesh()
    first, second = composed.Hooked(1.0), composed.Hooked(10.0)
    model = DistributedPipelineModel({"first": first, "second": second}, None, group, weights=[1.0, 3.0])
    out = model(share([CRYSTAL], group))
    told = [(s.name, s.target, s.plugin, s.state.value) for s in model.adapter_status()]
    left = sum(len(m._forward_hooks) for hooked in (first, second) for m in hooked.module.modules())
    return float(out.energy[0]), told, left


def test_hooks_bind_to_the_members_own_modules(rank_pool: Any) -> None:
    alone, told, _ = _hooked()  # in one process nothing is hooked
    assert [state for *_, state in told] == ["pending"] * 2
    for energy, told, left in rank_pool(2).run(_hooked, timeout=60):
        assert energy == pytest.approx(alone + 108 * (1.0 + 3.0 * 10.0), abs=1e-9)
        assert [name.partition("/")[0] for name, *_ in told] == ["first", "second"]
        assert {(target, plugin, state) for _, target, plugin, state in told} == {
            ("layer", "tests", "restored")
        }
        assert left == 0
