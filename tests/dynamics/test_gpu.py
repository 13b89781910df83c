"""Noise and integrators on a GPU: the CPU's numbers, and no wait for the device within a step."""

from __future__ import annotations

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import (
    Integrator,
    Langevin,
    MDState,
    VelocityVerlet,
    iter_row_blocks,
    kinetic_energy,
    momentum,
    normal,
)
from nvdd_core.dynamics.noise import random_words
from tests.dynamics._support import context

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _on_gpu(state: MDState) -> MDState:
    names = ("positions", "velocities", "forces", "masses", "ids")
    return MDState(**{name: getattr(state, name).cuda() for name in names}, step=state.step)


def test_same_noise_as_the_cpu() -> None:
    ids = torch.arange(10_001)
    assert torch.equal(random_words(5, 6, ids.cuda(), 4).cpu(), random_words(5, 6, ids, 4))
    torch.testing.assert_close(
        normal(5, 6, ids.cuda(), 3).cpu(), normal(5, 6, ids, 3), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize(
    "integrator", [VelocityVerlet(2.0), Langevin(2.0, 95.0, 0.01, seed=3)], ids=["nve", "nvt"]
)
def test_same_steps_as_the_cpu_without_waiting(integrator: Integrator) -> None:
    cpu = context(1003).state
    gpu = _on_gpu(cpu)
    for state in (cpu, gpu):
        integrator.init(state)
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            integrator.first_half(state)
            torch.mul(state.positions, -0.7, out=state.forces)
            integrator.second_half(state)
        kinetic_energy(state)
        momentum(state)
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(gpu.positions.cpu(), cpu.positions, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gpu.velocities.cpu(), cpu.velocities, rtol=1e-12, atol=1e-14)


def test_rows_leave_the_gpu_in_blocks() -> None:
    state = context(23).state
    fields = {"x": state.positions.cuda()}
    blocks = list(iter_row_blocks(Mesh.single("cuda"), state.ids.cuda(), fields, 23, 7))
    found = torch.cat([block.fields["x"] for block in blocks])
    assert found.device.type == "cpu"
    assert torch.equal(found, state.positions[torch.argsort(state.ids)])
