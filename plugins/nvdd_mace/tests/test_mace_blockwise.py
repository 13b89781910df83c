"""Messages made a block of edges at a time: mace's numbers, first and second derivatives, and less memory."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from mace_ranks import Job, compare, joined, oracle

from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch
from nvdd_core.testing import evaluate
from nvdd_mace.blockwise import AUTO, Blocks, Blockwise, _Weights, edges_at_once, serves_blocks
from nvdd_mace.conformance import INTERACTIONS
from nvdd_mace.contraction import Contraction
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


HELD = """
import os, sys
from pathlib import Path
from ase.build import bulk
import torch
from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch
from nvdd_mace.model import load

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model = load(dtype=torch.float64, device="cpu", checkpoint=sys.argv[1], trust=True, blockwise=sys.argv[2])
run = DistributedModel(model)
atoms = bulk("SiO", "rocksalt", a=4.2, cubic=True).repeat((4, 4, 4))
sharded = ShardedBatch.scatter(Batch.from_ase(atoms), run.mesh)
run(sharded, {"energy"})  # compiles, lists neighbours, keeps nothing
before = resident()
out = run.differentiable(sharded, {"energy"})
print(resident() - before)
"""


def test_messages_are_not_kept(made):
    """In a process of its own; what TorchScript keeps for gradients nothing in torch tells."""
    path, _ = made(INTERACTIONS[1], hidden="16x0e+16x1o", max_ell=3, r_max=5.0)
    held = [
        int(subprocess.run([sys.executable, "-c", HELD, path, on], stdout=subprocess.PIPE, check=True).stdout)
        for on in ("false", "200")
    ]
    assert held[0] > 1e8
    assert held[1] < 0.3 * held[0]


def test_parameters_that_are_trained_later(made, structures):
    """The option can't know; the gradients are those without blocks."""
    path, _ = made()
    found = []
    for on in (False, 37):
        model = loaded(path, blockwise=on)
        model.module.requires_grad_(True)
        run = DistributedModel(model)
        sharded = ShardedBatch.scatter(Batch.from_ase(structures["crystal"]), run.mesh)
        run(sharded, {"energy"})
        out = run.differentiable(sharded, {"energy"})
        weights = [p for name, p in model.module.named_parameters() if "conv_tp_weights" in name]
        found.append(torch.autograd.grad(out.energy.sum(), weights))
    for with_blocks, without in zip(*found, strict=True):
        assert float(without.abs().max()) > 0.0
        torch.testing.assert_close(with_blocks, without, rtol=1e-10, atol=1e-12)


def derivative(model, structure):
    run = DistributedModel(model)
    sharded = ShardedBatch.scatter(Batch.from_ase(structure), run.mesh)
    run(sharded, {"energy"})
    sharded.positions.requires_grad_(True)
    return sharded.positions, run.differentiable(sharded, {"energy"}).energy


@pytest.mark.parametrize("name", ["symmetric_contractions", "conv_tp_weights"])
def test_parameters_that_change_before_the_derivative(made, structures, name):
    """A part is evaluated again for it: an error, as torch has it for what it keeps."""
    model = loaded(made()[0], **FEW)
    positions, energy = derivative(model, structures["crystal"])
    torch.autograd.grad(energy.sum(), positions, retain_graph=True)
    with torch.no_grad():
        for key, parameter in model.module.named_parameters():
            if name in key:
                parameter.mul_(2.0)
    with pytest.raises(RuntimeError, match="parameters changed between an evaluation and its derivative"):
        torch.autograd.grad(energy.sum(), positions)


def test_parameters_that_are_others_in_a_call_only(made, structures):
    """Without gradients of these; after the call the model has its own again."""
    model = loaded(made()[0], **FEW)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.module

        def forward(self):
            return derivative(model, structures["crystal"])

    whole = Whole()
    others = {name: p.detach() * 1.1 for name, p in whole.named_parameters()}
    positions, energy = torch.func.functional_call(whole, others, ())
    with pytest.raises(RuntimeError, match="parameters changed"):
        torch.autograd.grad(energy.sum(), positions)


def test_batched_derivatives(made, structures):
    positions, energy = derivative(loaded(made()[0], **FEW), structures["crystal"])
    right = torch.autograd.grad(energy.sum(), positions, retain_graph=True)[0]
    slopes = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    (found,) = torch.autograd.grad(energy, positions, slopes, is_grads_batched=True)
    torch.testing.assert_close(found, slopes[:, :, None] * right, rtol=1e-12, atol=1e-13)


def test_parts_that_are_replaced_after_loading(made, structures):
    atoms = structures["crystal"]
    torch.manual_seed(1)
    others = loaded(made()[0], **FEW).module
    found = []
    for on in (37, False):
        model = loaded(made()[0], blockwise=on)
        evaluate(model, atoms)
        with torch.no_grad():
            for parameter in others.parameters():
                parameter.mul_(1.1 if on else 1.0)
        model.module.products[0].symmetric_contractions = others.products[0].symmetric_contractions
        model.module.interactions[0].conv_tp_weights = others.interactions[0].conv_tp_weights
        found.append(evaluate(model, atoms).forces)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-11)
    assert np.abs(found[0] - evaluate(loaded(made()[0]), atoms).forces).max() > 1e-4


class Product(torch.nn.Module):
    """A product of edges that is not linear, so that every second derivative counts."""

    weight_numel = 3

    def forward(self, rows, attributes, weights):
        return (rows * attributes).sin() * weights.exp()


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)))
@pytest.mark.parametrize("n_edges", [0, 1, 7, 20])
def test_first_and_second_derivatives(needs, n_edges):
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(5, 3, dtype=torch.float64, generator=generator)
    parts = torch.rand(3, n_edges, 3, dtype=torch.float64, generator=generator)
    given = [t.clone().requires_grad_(need) for t, need in zip((rows, *parts), needs, strict=True)]
    edges = torch.randint(5, (2, n_edges), generator=generator)
    found = []
    for block in (6, 1000):
        module = Blockwise(Product(), torch.nn.Tanh(), block)
        out = module(given[0], given[1], _Weights((given[2], given[3])), edges)
        found.append([out])
        taken = [t for t in given if t.requires_grad]
        if taken:
            first = torch.autograd.grad(out.square().sum(), taken, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), taken, allow_unused=True)
            found[-1] += [*first, *(torch.zeros(1) if g is None else g for g in second)]
    for blocks, whole in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("given", "edges"),
    [(True, AUTO), ("True", AUTO), (False, 0), ("no", 0), (1000, 1000), ("1000", 1000), ("1", AUTO)],
)
def test_option(given, edges):
    assert edges_at_once(given, trains=False) == edges_at_once(given, trains=True) == edges


@pytest.mark.parametrize("text", ["auto", "AUTO"])
def test_left_alone(text):
    assert edges_at_once(text, trains=False) == AUTO
    assert edges_at_once(text, trains=True) == 0


@pytest.mark.parametrize("given", ["some", -3, "2.5", None])
def test_other_values_are_refused(given):
    with pytest.raises(InputError, match="give auto, true, false or the number of edges"):
        edges_at_once(given, trains=False)


def test_a_block_is_what_a_cache_holds(made):
    model, rows = loaded(made()[0]), torch.zeros(1, 1, dtype=torch.float64)
    with model.around:
        convolutions = [part.conv_tp for part in model.module.interactions]
    for convolution in convolutions:
        weights = convolution.product.weight_numel
        assert convolution._size(rows) == 2**20 // (8 * weights)
        assert convolution._size(rows.float()) == 2**20 // (4 * weights)


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
    parts = [*model.module.interactions, *model.module.products]
    before = [[dict(part._modules), set(vars(part))] for part in parts]
    evaluate(model, structures["crystal"])
    model.module.products[1] = None  # after which the first product was swapped
    with pytest.raises(TypeError):
        evaluate(model, structures["crystal"])
    assert [[dict(part._modules), set(vars(part))] for part in parts] == before
    with model.around:
        assert all(type(part.conv_tp) is Blockwise for part in model.module.interactions)
        assert type(model.module.products[0].symmetric_contractions) is Contraction


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
