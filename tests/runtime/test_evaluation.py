"""What a DistributedModel must notice between and inside evaluations."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, InputError, NumericalError, PluginValidationError, SpecError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    Batch,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    ShardedBatch,
    refresh_neighbors,
)
from nvdd_core.spec import DistributionSpec, ShardedStorage, StrategyKind
from tests.cases import oracle
from tests.cases.models import StandIn, TorchLJ, Toy2, _sum_edges, _weights
from tests.cases.ranks import System, collect, evaluate, mesh, share

ALL = (True, True, True)
CRYSTAL = System(*oracle.fcc(3, 3, 3), ALL)


class ByElement(TorchLJ):
    """LJ scaled by the atomic number."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        return super().node_energy(batch) * batch.numbers.double()


def test_another_batch_is_another_system() -> None:
    model = DistributedModel(ByElement(), DomainConfig(skin=0.3))
    argon, krypton = (share([System(CRYSTAL.pos, CRYSTAL.cell, ALL, s)], Mesh.single()) for s in ("Ar", "Kr"))
    first, other, again = (float(model(b).energy) for b in (argon, krypton, argon))
    assert first == again
    assert abs(other - 2 * first) < 1e-9


def _changed_in_place() -> list[float]:
    """One rank changes an element, then every rank opens the cell."""
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = DistributedModel(ByElement(), DomainConfig(skin=0.3), group)
    out = [float(model(sharded).energy)]
    sharded.numbers[sharded.ids == 5] = 36
    out.append(float(model(sharded).energy))
    sharded.pbc[:] = False
    out.append(float(model(sharded).energy))
    return out


def test_changes_in_place_are_seen(rank_pool) -> None:
    alone = _changed_in_place()
    assert len(set(alone)) == 3
    for found in rank_pool(3).run(_changed_in_place):
        assert np.abs(np.subtract(found, alone)).max() < 1e-8


class Picky(TorchLJ):
    """LJ that says which rows it was shown and refuses."""

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        unknown = numbers > 18
        if bool(unknown.any()):
            found = torch.unique(numbers[unknown]).tolist()
            raise InputError(f"{int(unknown.sum())} of {found}, first {int(ids[unknown][0])}")


def _refusal(changed: dict[int, int]) -> str:
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = DistributedModel(Picky(), DomainConfig(skin=0.3), group)
    model(sharded)
    for row, number in changed.items():
        sharded.numbers[sharded.ids == row] = number
    sharded.replace_rows(sharded.rows)
    with pytest.raises(InputError) as caught:
        model(sharded)
    return str(caught.value).removeprefix("rank 0: ")


@pytest.mark.parametrize("changed", [{100: 36, 3: 54, 50: 36, 51: 92}, {107: 26}])
def test_elements_that_are_lacking_are_told_alike_by_any_number_of_ranks(rank_pool, changed) -> None:
    alone = _refusal(changed)
    assert alone == f"{len(changed)} of {sorted(set(changed.values()))}, first {min(changed)}"
    assert rank_pool(3).run(_refusal, changed) == [alone] * 3


def _collision() -> str:
    group = mesh()
    pos = CRYSTAL.pos.copy()
    pos[31] = pos[100]
    with pytest.raises(NumericalError) as caught:
        DistributedModel(TorchLJ(), DomainConfig(skin=0.3), group)(
            share([System(pos, CRYSTAL.cell, ALL)], group)
        )
    return str(caught.value)


def test_atoms_in_one_place_are_named(rank_pool) -> None:
    alone = _collision()
    assert "atom 31 has a force or energy that is not finite" in alone
    assert "not finite; atoms 31 and 100 are 0 A apart" in alone
    for found in rank_pool(3).run(_collision):
        assert "atom 31 has a force" in found
        assert "atoms 31 and 100 are" in found


class Checkpointed(Toy2):
    """Toy2 whose second layer is computed again in the backward pass."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        w = _weights(batch)

        def layer(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return _sum_edges(batch, receiver, torch.tanh(0.1 * refresh_neighbors(h)[sender]) * w)

        m = checkpoint(layer, _sum_edges(batch, receiver, w), w, use_reentrant=False)
        return 0.01 * m**2


def test_checkpointed_layer(rank_pool) -> None:
    alone = evaluate(Toy2, [CRYSTAL])
    for found in rank_pool(2).run(evaluate, Checkpointed, [CRYSTAL]):
        assert np.abs(found.forces - alone.forces).max() < 1e-9
        assert np.abs(found.stress - alone.stress).max() < 1e-9


class OwnedBuffer(Toy2):
    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        return batch.positions.new_zeros(batch.n_owned).index_add(0, batch.edge_index[1], _weights(batch))


def _owned_buffer() -> str:
    try:
        evaluate(OwnedBuffer, [CRYSTAL])
    except SpecError as exc:
        return str(exc)
    return ""


def test_buffer_of_owned_rows_is_refused(rank_pool) -> None:
    for text in rank_pool(2).run(_owned_buffer):
        assert "owned rows" in text


def _one_rank_skips() -> str:
    group = mesh()
    try:
        if group.rank:
            group.all_reduce_sum_(torch.ones(2))
        group.all_gather_ints([1])
    except DistributedError as exc:
        return str(exc)
    return ""


def test_different_calls_are_named(rank_pool) -> None:
    answers = rank_pool(2).run(_one_rank_skips)
    assert any("ranks make different calls" in a and "all_gather" in a for a in answers)


class Shaped(StandIn):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        return batch.positions.sum() * torch.ones(self.shape, dtype=torch.float64)


def test_results_of_a_wrong_shape_are_refused() -> None:
    for shape in ((1,), (108, 1), ()):
        with pytest.raises(PluginValidationError, match="node_energy"):
            evaluate(lambda s=shape: Shaped(s), [CRYSTAL])


class Unserved(TorchLJ):
    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return SPEC_MPNN_HALO.replace(distribution=DistributionSpec(storage=ShardedStorage()))


def test_a_spec_that_is_not_served_is_refused() -> None:
    with pytest.raises(SpecError, match="ShardedStorage"):
        DistributedModel(Unserved())


def test_without_a_skin_each_move_costs_one_evaluation() -> None:
    lj = TorchLJ()
    model, sharded = DistributedModel(lj), share([CRYSTAL], Mesh.single())
    for k in range(4):
        model(sharded)
        assert lj.calls == k + 1
        sharded.positions.add_(0.01)
    model(sharded)
    model(sharded)
    assert lj.calls == 6
    assert model.n_rebuilds == 5


def test_loading_sends_no_rows_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Counting(Mesh):
        def broadcast_object(self, value, src=0):
            sizes.append(len(pickle.dumps(value)))
            return super().broadcast_object(value, src)

    for repeat in (1, 4):
        pos = np.concatenate([CRYSTAL.pos] * repeat)
        batch = Batch.from_ase(System(pos, CRYSTAL.cell, ALL).atoms())
        ShardedBatch.scatter(batch, Counting(0, 1, torch.device("cpu"), None))
    assert abs(sizes[1] - sizes[0]) < 64


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("positions", torch.zeros(108, 3), "float64"),
        ("numbers", torch.zeros(107, dtype=torch.int64), "numbers"),
        ("ids", torch.zeros(108, dtype=torch.int64), "each once"),
        ("system", torch.ones(108, dtype=torch.int64), "0 to 0"),
    ],
)
def test_malformed_batches(name: str, value: torch.Tensor, words: str) -> None:
    batch = Batch.from_ase(CRYSTAL.atoms())
    setattr(batch, name, value)
    with pytest.raises(InputError, match=words):
        batch.validate()


def _outputs_are_independent() -> tuple[float, float, bool]:
    """O-32, O-38: results share no storage, carry no history, and inputs stay as they were."""
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = DistributedModel(Toy2(), DomainConfig(skin=0.3), group)
    first = model(sharded)
    kept, forces = float(first.energy), first.forces.clone()
    before = sharded.positions.clone()
    second = model(sharded)
    clean = first.energy.grad_fn is None and first.forces.grad_fn is None
    clean &= first.forces.data_ptr() != second.forces.data_ptr() or first.forces.numel() == 0
    clean &= torch.equal(before, sharded.positions) and torch.equal(first.forces, forces)
    total = collect(second.forces - first.forces, sharded.ids, sharded.n_global, group)
    return kept - float(first.energy), float(np.abs(total).max()), clean


@pytest.mark.parametrize("world", [1, 3])
def test_outputs_are_independent(rank_pool, world: int) -> None:
    for drift, difference, clean in rank_pool(world).run(_outputs_are_independent):
        assert drift == 0.0
        assert difference == 0.0
        assert clean


def test_columns_with_any_name_travel(rank_pool) -> None:
    """Names that the core uses inside must not meet those of a file."""
    alone = evaluate(TorchLJ, [CRYSTAL])
    for found, whole in rank_pool(2).run(_odd_columns):
        assert abs(found - alone.energy[0]) < 1e-9
        assert whole


def _odd_columns() -> tuple[float, bool]:
    group = mesh()
    names = ("frac", "folded", "_frac")
    atoms = CRYSTAL.atoms()
    for k, name in enumerate(names):
        atoms.set_array(name, np.arange(324.0).reshape(108, 3) + k)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if group.rank == 0 else None, group)
    energy = float(DistributedModel(TorchLJ(), None, group)(sharded).energy)
    back = sharded.gather()
    return energy, back is None or all(
        np.array_equal(back.fields[name].numpy(), atoms.arrays[name]) for name in names
    )


def _scaled(values: torch.Tensor, how: str) -> None:
    if how == "numpy":
        values.numpy()[:] *= 1.01
    elif how == "data":
        values.data.mul_(1.01)
    else:
        values.mul_(1.01)


@pytest.mark.parametrize("how", ["numpy", "data", "torch"])
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_changed_in_place_is_noticed(how: str, inference: bool) -> None:
    atoms = CRYSTAL.atoms()
    atoms.set_array("charges", np.ones(len(atoms)))
    atoms.set_array("unknown", np.full(len(atoms), np.nan))  # doesn't equal itself
    with torch.inference_mode(inference):
        sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single())
        model = DistributedModel(TorchLJ(), DomainConfig(skin=0.3))
        model(sharded, {"energy"})
        for changed in ("cell", "charges"):
            assert not model.moved_flag(sharded).any()
            _scaled(sharded.cell if changed == "cell" else sharded.fields[changed], how)
            assert model.moved_flag(sharded)[0] > 0
            fresh = ShardedBatch.scatter(sharded.gather(), sharded.mesh)
            right = float(DistributedModel(TorchLJ())(fresh, {"energy"}).energy)
            assert abs(float(model(sharded, {"energy"}).energy) - right) < 1e-9


def _cell_of_one_rank() -> str:
    group = mesh()
    sharded = share([CRYSTAL], group)
    model = DistributedModel(TorchLJ(), DomainConfig(skin=0.3), group)
    model(sharded)
    if group.rank == 1:
        sharded.cell = sharded.cell * 1.01
    try:
        model(sharded)
    except InputError as exc:
        return str(exc)
    return ""


def test_cell_changed_on_one_rank(rank_pool) -> None:
    for text in rank_pool(2).run(_cell_of_one_rank, timeout=30):
        assert "another cell or pbc" in text


def test_inference_mode() -> None:
    sharded = share([CRYSTAL], Mesh.single())
    with torch.inference_mode():
        energy = DistributedModel(TorchLJ())(sharded, {"energy"}).energy
    assert abs(float(energy) - oracle.lj(CRYSTAL.pos, CRYSTAL.cell, ALL)[0]) < 1e-9


class Silent(Toy2):
    """Toy2 that forgets that neighbours read ``h``."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        w = _weights(batch)
        h = torch.zeros(batch.n_local, dtype=torch.float64).index_add(0, receiver, w)
        return 0.01 * _sum_edges(batch, receiver, torch.tanh(0.1 * h[sender]) * w) ** 2


def _silent(strategy: StrategyKind) -> str | float:
    try:
        return float(evaluate(Silent, [CRYSTAL], DomainConfig(strategy=strategy)).energy[0])
    except SpecError as exc:
        return str(exc)


def test_layers_without_an_exchange_are_refused(rank_pool) -> None:
    for text in rank_pool(2).run(_silent, StrategyKind.HALO):
        assert "exchanged nothing" in str(text)
    for energy in rank_pool(2).run(_silent, StrategyKind.WIDE_HALO):
        assert abs(float(energy) - evaluate(Toy2, [CRYSTAL]).energy[0]) < 1e-9
