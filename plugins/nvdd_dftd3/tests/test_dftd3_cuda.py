"""The model on a GPU against the CPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dftd3_cases import evaluate, structures

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_dftd3.model import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["rod", "skewed", "slab"])
def test_same_numbers_as_the_cpu(name):
    atoms, device = structures()[name], torch.device("cuda")
    truth = evaluate(atoms)[0]
    model = load(dtype=torch.float64, device=device, functional="pbe")
    mesh = Mesh.single(device)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), mesh)
    out = DistributedModel(model, DomainConfig(skin=0.3), mesh)(sharded, {"energy", "forces", "stress"})
    forces = np.empty((len(atoms), 3))
    forces[sharded.ids.cpu().numpy()] = out.forces.cpu().numpy()
    assert abs(float(out.energy[0]) - truth.energy) < 1e-11 * len(atoms)
    assert np.abs(forces - truth.forces).max() < 1e-10
    assert np.abs(out.stress[0].cpu().numpy() - truth.stress).max() < 1e-10
