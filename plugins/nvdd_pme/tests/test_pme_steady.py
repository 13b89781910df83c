"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import weakref

import mesh_ranks as on_rank
import pme_kit as kit
import pytest

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import check_capturable
from nvdd_pme.model import load_ewald, load_pme

FAST = frozenset({"energy", "forces", "stress"})
ALL = FAST | {"node_energy", "charge_gradient"}
MODELS = {
    "ewald": lambda **options: load_ewald(**kit.CPU, cutoff=6.0, **options),
    "replicated": lambda **options: load_pme(**kit.CPU, cutoff=6.0, engine="replicated", **options),
    "sharded": lambda **options: load_pme(**kit.CPU, cutoff=6.0, engine="sharded", **options),
}


@pytest.mark.parametrize("outputs", [frozenset({"energy"}), FAST, ALL], ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_one_process(name: str, outputs: frozenset[str]) -> None:
    atoms = kit.disordered(4, skew=0.2, seed=3)
    check_capturable(MODELS[name](), atoms, outputs)
    check_capturable(MODELS[name](), [kit.sheared(atoms, 5), kit.rock_salt()], outputs)
    check_capturable(MODELS[name](charges="H=0.3"), atoms, outputs)


@pytest.mark.parametrize("outputs", [FAST, ALL], ids=len)
@pytest.mark.parametrize("engine", ["replicated", "sharded"])
def test_on_ranks(rank_pool, engine: str, outputs: frozenset[str]) -> None:
    assert rank_pool(3).run(on_rank.capturable, engine, outputs) == [True] * 3


@pytest.mark.parametrize("kind", [StrategyKind.HALO, StrategyKind.WIDE_HALO])
def test_what_is_kept_goes_with_the_list(kind):
    """By count of references: nothing waits for the garbage collector."""
    model, atoms = MODELS["sharded"](), kit.disordered(4, skew=0.2, seed=3)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single())
    distributed = DistributedModel(model, DomainConfig(skin=1.0, strategy=kind))
    distributed(sharded, FAST)
    first = distributed.domain.neighbors
    assert model in first.kept
    old = weakref.ref(first)
    del first
    sharded.positions[0] += 0.6
    distributed(sharded, FAST)
    assert old() is None
