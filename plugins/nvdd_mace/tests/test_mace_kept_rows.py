"""Rows of zeros below those of a convolution: numbers stay, the convolution sees few different numbers of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mace_ranks import Found, compare, oracle

from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch
from nvdd_mace.backends import keep_rows
from nvdd_mace.model import load


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [
        ([128, 127, 120, 128], [128, 128, 128, 128]),
        ([120, 122, 128, 121], [120, 137, 137, 137]),
        ([50, 128, 127, 20], [50, 128, 128, 20]),
    ],
)
def test_numbers_stay(made, structures, sizes, seen):
    path, module = made()
    model = load(dtype=torch.float64, device="cpu", checkpoint=path, trust=True)
    found = []
    keep_rows(model.module)
    conv = model.module.interactions[1].conv_tp
    conv.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[0]))
    distributed = DistributedModel(model)
    for n in sizes:
        atoms = structures["rod"][:n]
        sharded = ShardedBatch.scatter(Batch.from_ase(atoms), distributed.mesh)
        out = distributed(sharded, {"energy", "forces", "stress", "node_energy"})
        forces = out.forces[sharded.ids.argsort()].numpy()
        share = Found(
            np.arange(n),
            out.energy.numpy(),
            forces,
            out.node_energy.numpy()[sharded.ids.argsort()],
            out.stress[0].numpy(),
        )
        compare(share, oracle(module, atoms))
    assert found == seen
