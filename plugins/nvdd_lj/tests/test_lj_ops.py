"""The torch operators: derivatives, refusals, torch's own checks, and the two kernels against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import warp as wp

from nvdd_core.errors import InputError, NvddError
from nvdd_lj.kernels import extend_kernel, full_kernel, gradient_kernel
from nvdd_lj.model import load
from nvdd_lj.ops import pair, pair_gradient
from nvdd_lj.pairs import PairWork
from nvdd_lj.start import start_warp
from nvdd_lj.variants import Variant, Virial, Want

CPU = torch.device("cpu")
MIX = {
    "epsilon.Ar": 1,
    "sigma.Ar": 1,
    "epsilon.Kr": 1.4,
    "sigma.Kr": 1.1,
    "epsilon.Ar-Kr": 0.7,
    "cutoff": 2.5,
}
ONE = {"epsilon": 1, "sigma": 1, "cutoff": 2.5}


def example(
    kit, form="half", options=MIX, dtype=torch.float64, owned=None, shift="force", requested=("energy",)
):
    pos, cell = kit.fcc(2, 2, 2)
    numbers = np.where(np.arange(len(pos)) % 3, 18, 36)
    model = load(dtype=dtype, device=CPU, **options, shift=shift)
    system = kit.system(pos, cell, [True, True, False], numbers)
    batch = kit.batch(system, 2.8, form=form, dtype=dtype, owned=owned, requested=requested)
    return model, system, batch


def with_leaves(batch):
    """Return the batch with leaves for positions and a strain."""
    positions = batch.positions.clone().requires_grad_(True)
    strain = torch.zeros(1, 3, 3, dtype=positions.dtype, requires_grad=True)
    moved = positions + positions @ strain[0]
    cell = batch.cell + batch.cell @ strain
    return type(batch)(**{**batch.__dict__, "positions": moved, "cell": cell}), positions, strain


@pytest.mark.parametrize("options", [ONE, MIX], ids=["one", "mix"])
@pytest.mark.parametrize("form", ["half", "full"])
def test_autograd_gives_forces_and_virial(kit, form, options):
    model, system, batch = example(kit, form, options)
    true = kit.truth(system, model.parameters)
    live, positions, strain = with_leaves(batch)
    out = model.forward(live)
    assert set(out) == {"node_energy"}
    gradient, virial = torch.autograd.grad(out["node_energy"].sum(), (positions, strain))
    np.testing.assert_allclose(-gradient, true.forces, rtol=0, atol=1e-10)
    np.testing.assert_allclose(virial, true.virial, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["half", "full"])
@pytest.mark.parametrize("wide", [False, True])
def test_autograd_of_partial_energies_adds_up(kit, form, wide):
    model, system, _ = example(kit)
    true = kit.truth(system, model.parameters)
    forces, virial = np.zeros_like(true.forces), 0.0
    for owned in (np.arange(0, 32, 2), np.arange(1, 32, 2)):
        part = kit.batch(system, 2.8, owned=owned, form=form, wide=wide, requested=("energy",))
        live, positions, strain = with_leaves(part)
        energy = model.forward(live)["node_energy"]
        np.testing.assert_allclose(energy.detach(), true.node_energy[owned], rtol=0, atol=1e-11)
        gradient, share = torch.autograd.grad(energy.sum(), (positions, strain))
        forces[part.ids.numpy()] -= gradient.numpy()
        virial += share.numpy()
    np.testing.assert_allclose(forces, true.forces, rtol=0, atol=1e-10)
    np.testing.assert_allclose(virial, true.virial, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["half", "full"])
def test_weighted_gradient_is_exact(kit, form):
    model, _, batch = example(kit, form, owned=np.arange(20))
    weight = torch.cos(torch.arange(20.0, dtype=torch.float64))

    def weighted(positions):
        local = type(batch)(**{**batch.__dict__, "positions": positions})
        return (weight * model.forward(local)["node_energy"]).sum()

    assert torch.autograd.gradcheck(weighted, (batch.positions.clone().requires_grad_(True),), atol=1e-6)


def test_both_routes_agree(kit):
    asked = ("energy", "forces", "stress", "node_virial")
    for form in ("half", "full"):
        model, _, batch = example(kit, form, owned=np.arange(20), requested=asked)
        live, _, _ = with_leaves(batch)
        direct, traced = model.forward(batch), model.forward(live)
        assert set(direct) == set(traced) == {"node_energy", "forces", "virial", "node_virial"}
        for name, value in direct.items():
            torch.testing.assert_close(traced[name].detach(), value, rtol=0, atol=1e-11)


def test_more_derivatives_are_refused(kit):
    model, _, batch = example(kit, requested=("energy", "forces"))
    live, positions, _ = with_leaves(batch)
    out = model.forward(live)
    with pytest.raises(NvddError, match="can't be differentiated"):
        out["forces"].sum().backward()
    live, positions, _ = with_leaves(batch)
    energy = model.forward(live)["node_energy"].sum()
    (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(NvddError, match="finite differences"):
        gradient.square().sum().backward()


def arguments(model, batch, want):
    rows = model._prepare(batch)
    points = batch.neighbors.extend(batch.positions, batch.cell, batch.system)
    tensors = (rows.row_splits, rows.senders, rows.image_rows, rows.system, rows.species, rows.coefficients)
    return points, tensors, (rows.n_systems, rows.half, rows.cutoff, rows.linear_term, want.to_int())


@pytest.mark.parametrize("form", ["half", "full"])
def test_opcheck(kit, form):
    model, _, batch = example(kit, form)
    points, tensors, rest = arguments(model, batch, Want(True, False))
    torch.library.opcheck(pair, (points.requires_grad_(True), *tensors, *rest))
    points, tensors, rest = arguments(model, batch, Want(True, True, Virial.ROWS))
    torch.library.opcheck(pair, (points, *tensors, *rest))
    weight = torch.ones(batch.n_owned, dtype=points.dtype)
    torch.library.opcheck(pair_gradient, (weight, points, *tensors, *rest[1:4]))


def test_compiles_without_a_break(kit):
    model, _, batch = example(kit, "full")
    points, tensors, rest = arguments(model, batch, Want(True, False))

    def energy(x):
        return pair(x, *tensors, *rest)[0].sum()

    compiled = torch.compile(energy, fullgraph=True, backend="aot_eager")
    results = []
    for function in (energy, compiled):
        x = points.detach().clone().requires_grad_(True)
        value = function(x)
        results.append((value.detach(), *torch.autograd.grad(value, x)))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", ["none", "force"])
@pytest.mark.parametrize("options", [ONE, MIX], ids=["one", "mix"])
def test_kernels_agree(kit, options, shift, dtype):
    """The kernel for GPUs, run on the CPU, against the vector kernel in both list forms."""
    owned = np.arange(20)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    for virial in Virial:
        want = Want(True, True, virial)
        results = []
        for form, simd in (("half", True), ("full", True), ("full", False)):
            model, _, batch = example(kit, form, options, dtype, owned, shift)
            work = PairWork(model._prepare(batch), simd=simd)
            results.append(work.evaluate(batch.positions, batch.cell, want))
        for other in results[1:]:
            for name in ("energy", "forces", "virial", "row_virial"):
                mine, theirs = getattr(results[0], name), getattr(other, name)
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_half_list_needs_the_cpu_kernel(kit):
    model, _, batch = example(kit)
    with pytest.raises(InputError, match="full"):
        PairWork(model._prepare(batch), simd=False)


def test_want_survives_as_integer():
    for virial in Virial:
        for energy in (False, True):
            for forces in (False, True):
                want = Want(energy, forces, virial)
                assert Want.from_int(want.to_int()) == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gpu_kernels_compile(tmp_path, dtype):
    """Warp brings NVRTC, so that CUDA code is compiled (not run) on machines without a GPU too."""
    start_warp()
    want = Want(True, True, Virial.ROWS)
    kernels = [
        extend_kernel(dtype),
        full_kernel(Variant(dtype, False, True, True, want)),
        gradient_kernel(dtype, False, True, True),
    ]
    for kernel in kernels:
        made = wp.compile_aot_module(kernel.module, arch=90, module_dir=tmp_path, use_ptx=True)
        assert all(path.stat().st_size > 0 for path in made)
