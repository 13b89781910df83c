"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import weakref

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import check_capturable, default_structures
from nvdd_lj.model import load

FAST = frozenset({"energy", "forces", "stress"})


@pytest.mark.parametrize("outputs", [FAST, FAST | {"node_energy", "node_virial"}], ids=len)
@pytest.mark.parametrize("symbols", ["Ar", ("Ar", "Kr")])
def test_one_process(symbols, outputs):
    model = load(dtype=torch.float64, device=torch.device("cpu"))
    structures = default_structures(model.cutoff, symbols)
    check_capturable(model, structures["crystal"], outputs)
    check_capturable(model, [structures["crystal"], structures["triclinic"]], outputs)


@pytest.mark.parametrize("kind", [StrategyKind.HALO, StrategyKind.WIDE_HALO])
def test_what_is_kept_goes_with_the_list(kind):
    """By count of references: nothing waits for the garbage collector."""
    model = load(dtype=torch.float64, device=torch.device("cpu"))
    atoms = default_structures(model.cutoff, "Ar")["crystal"]
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
