"""The model on a GPU against the CPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd_core.errors import InputError
from nvdd_lj.model import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIX = {
    "epsilon.Ar": 1,
    "sigma.Ar": 1,
    "epsilon.Kr": 1.4,
    "sigma.Kr": 1.1,
    "epsilon.Ar-Kr": 0.7,
    "cutoff": 2.5,
}
ONE = {"epsilon": 1, "sigma": 1, "cutoff": 2.5}
ALL = ("energy", "forces", "stress", "node_virial")


def example(kit, device, options=MIX, dtype=torch.float64, requested=ALL, form="full", shift="force"):
    pos, cell = kit.fcc(3, 3, 3)
    numbers = np.where(np.arange(len(pos)) % 3, 18, 36)
    system = kit.system(pos, cell, [True, True, False], numbers)
    model = load(dtype=dtype, device=torch.device(device), **options, shift=shift)
    batch = kit.batch(
        system, 2.8, owned=np.arange(70), form=form, dtype=dtype, requested=requested, device=device
    )
    return model, batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", ["none", "force"])
@pytest.mark.parametrize("options", [ONE, MIX], ids=["one", "mix"])
def test_same_numbers_as_the_cpu(kit, options, shift, dtype):
    for requested in (ALL, ALL[:3], ("forces",), ("energy",)):
        results = []
        for device in ("cpu", "cuda"):
            model, batch = example(kit, device, options, dtype, requested, shift=shift)
            results.append(model.forward(batch))
        assert set(results[0]) == set(results[1])
        tolerance = 1e-11 if dtype == torch.float64 else 2e-4
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name].cpu(), value, rtol=tolerance, atol=tolerance)


def test_autograd(kit):
    gradients = []
    for device in ("cpu", "cuda"):
        model, batch = example(kit, device, requested=("energy",))
        positions = batch.positions.clone().requires_grad_(True)
        live = type(batch)(**{**batch.__dict__, "positions": positions})
        gradients.append(torch.autograd.grad(model.forward(live)["node_energy"].sum(), positions)[0].cpu())
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_steady_step_does_not_wait_and_uses_the_current_stream(kit):
    model, batch = example(kit, "cuda", requested=("energy", "forces", "stress"))
    expected = model.forward(batch)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            batch.positions.add_(0.0)
            out = model.forward(batch)
            pending = not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert pending
    for name, value in expected.items():
        assert torch.equal(out[name], value)


def test_half_lists_are_refused(kit):
    model, batch = example(kit, "cuda", form="half")
    assert model.neighbor_form == "full"
    with pytest.raises(InputError, match="full"):
        model.forward(batch)
