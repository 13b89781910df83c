"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import weakref

import pytest
import torch
from dftd3_cases import structures

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_core.testing import check_capturable
from nvdd_dftd3.model import load

FAST = frozenset({"energy", "forces", "stress"})


@pytest.mark.parametrize("outputs", [FAST, FAST | {"node_energy"}], ids=len)
@pytest.mark.parametrize("names", [["skewed"], ["rod"], ["skewed", "rod"]], ids=str)
def test_one_process(names, outputs):
    model = load(dtype=torch.float64, device=torch.device("cpu"), functional="pbe", cutoff=12.0)
    check_capturable(model, [structures()[name] for name in names], outputs)


@pytest.mark.parametrize("kind", [StrategyKind.HALO, StrategyKind.WIDE_HALO])
def test_what_is_kept_goes_with_the_list(kind):
    """By count of references: nothing waits for the garbage collector."""
    model = load(dtype=torch.float64, device=torch.device("cpu"), functional="pbe", cutoff=12.0)
    atoms = structures()["skewed"]
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
