"""Messages made a block of edges at a time: mace's numbers, first and second derivatives, and less memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mace_ranks import Job, compare, joined, oracle

from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch
from nvdd_mace.blockwise import AUTO, Blocks, edges_at_once, serves_blocks
from nvdd_mace.conformance import INTERACTIONS
from nvdd_mace.model import load

FEW = {"blockwise": 37}
"""Blocks of which the tests' systems have many, and a last one that isn't full."""


def loaded(path, **options):
    where = {"dtype": torch.float64, "device": "cpu"}
    return load(**where, checkpoint=path, trust=True, **options)


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_numbers_are_those_of_mace(ranks, made, structures, interaction):
    path, module = made(interaction)
    names = ("rod", "triclinic", "slab", "cluster", "atom")
    strategies = ("halo", "wide_halo", "graph_partition", "halo", "halo")
    work = [Job(structures[name], strategy) for name, strategy in zip(names, strategies, strict=True)]
    work += [Job(structures["rod"], "halo", 0.4, (np.zeros((len(structures["rod"]), 3)),) * 2, capture="on")]
    for world in (1, 2):
        shares = ranks(world, "evaluate", path, FEW, work)
        for place, job in enumerate(work):
            compare(joined([rank[place] for rank in shares]), oracle(module, job.atoms))


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[5]])
def test_gradients_of_a_force_loss(ranks, made, structures, interaction):
    path, _ = made(interaction)
    right = ranks(1, "loss_gradients", path, {}, structures["rod"], "halo")[0]
    for world in (1, 2):
        for found in ranks(world, "loss_gradients", path, FEW, structures["rod"], "halo"):
            assert found.keys() == right.keys()
            scale = max(np.abs(grad).max() for grad in right.values())
            for name, grad in right.items():
                np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-10 * scale, err_msg=name)


def resident():
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held_for_gradients(model, atoms):
    """Bytes that an evaluation holds until its gradients are taken; TorchScript's are seen by nothing in torch."""
    run = DistributedModel(model)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), run.mesh)
    run(sharded, {"energy", "forces"})  # compiles, lists neighbours
    before = resident()
    out = run.differentiable(sharded, {"energy"})
    return resident() - before, out


def test_messages_are_not_kept(made, structures):
    path, _ = made(INTERACTIONS[1], hidden="16x0e+16x1o", max_ell=3, r_max=6.0)
    atoms = structures["crystal"].repeat((2, 2, 1))
    most, less = (held_for_gradients(loaded(path, blockwise=on), atoms)[0] for on in (False, 200))
    assert most > 5e7
    assert less < 0.5 * most


@pytest.mark.parametrize(
    ("given", "edges"),
    [(True, AUTO), ("true", AUTO), (False, 0), ("no", 0), (1000, 1000), ("1000", 1000), ("1", AUTO)],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_option(given, edges, device):
    assert edges_at_once(given, torch.device(device), trains=False) == edges


@pytest.mark.parametrize(
    ("device", "trains", "edges"), [("cpu", False, AUTO), ("cpu", True, 0), ("cuda", False, 0)]
)
def test_left_alone(device, trains, edges):
    assert edges_at_once("auto", torch.device(device), trains=trains) == edges


@pytest.mark.parametrize("given", ["some", -3, "2.5", None])
def test_other_values_are_refused(given):
    with pytest.raises(InputError, match="give auto, true, false or the number of edges"):
        edges_at_once(given, torch.device("cpu"), trains=False)


def test_a_block_is_what_a_cache_holds(made):
    model, rows = loaded(made()[0]), torch.zeros(1, 1, dtype=torch.float64)
    with model.around:
        convolutions = [part.conv_tp for part in model.module.interactions]
    for convolution in convolutions:
        weights = convolution.product.weight_numel
        assert convolution._size(rows) == 2**21 // (8 * weights)
        assert convolution._size(rows.float()) == 2**21 // (4 * weights)


def test_fused_kernels_are_refused(made, monkeypatch):
    monkeypatch.setattr("nvdd_mace.model.require_backend", lambda backend: None)
    with pytest.raises(InputError, match="blockwise is for backend=e3nn"):
        loaded(made()[0], backend="cueq", blockwise=True)


def test_a_mace_without_fused_convolutions(made, monkeypatch):
    """Left alone it does without; asked for, it is refused."""
    monkeypatch.setattr("nvdd_mace.blockwise.serves_blocks", lambda module: False)
    monkeypatch.setattr("nvdd_mace.model.serves_blocks", lambda module: False)
    path, _ = made()
    assert not isinstance(loaded(path).around, Blocks)
    with pytest.raises(InputError, match="needs a release of mace-torch whose interactions"):
        loaded(path, blockwise=True)


def test_the_model_is_left_as_it_was(made, structures):
    """Also by an evaluation that fails, so that it can be saved."""
    model = loaded(made()[0], **FEW)
    before = [[dict(part._modules), set(vars(part))] for part in model.module.interactions]
    held_for_gradients(model, structures["crystal"])
    model.module.products[1] = None
    with pytest.raises(TypeError):
        held_for_gradients(model, structures["crystal"])
    assert [[dict(part._modules), set(vars(part))] for part in model.module.interactions] == before


def test_what_tells_whether_blocks_are_served(made):
    class Interaction(torch.nn.Module):
        def forward(self, node_feats):
            return node_feats

    module = torch.nn.Module()
    module.interactions = torch.nn.ModuleList([Interaction()])
    assert not serves_blocks(module)
    served = loaded(made()[0]).module
    assert serves_blocks(served)
    served.interactions[1].conv_fusion = True
    assert not serves_blocks(served)
