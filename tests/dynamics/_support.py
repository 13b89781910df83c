"""Small systems, hook contexts and rank bodies for the tests of the dynamics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import HookContext, MDState, StepInfo
from nvdd_core.dynamics.noise import normal


@dataclass
class Rows:
    """What hooks read of a sharded batch."""

    numbers: torch.Tensor
    system: torch.Tensor
    cell: torch.Tensor
    pbc: torch.Tensor
    n_global: int
    fields: dict[str, torch.Tensor] = field(default_factory=dict)


def context(n: int = 11, mesh: Mesh | None = None, step: int = 40, *, isotopes: bool = False) -> HookContext:
    """A system that depends on `n` and `step` only, spread over the mesh by id modulo its size."""
    mesh = mesh or Mesh.single()
    ids = torch.arange(n)[mesh.rank :: mesh.size].flip(0)
    numbers = torch.tensor([18, 29, 8])[ids % 3]
    masses = torch.tensor([39.948, 63.546, 15.999], dtype=torch.float64)[ids % 3]
    state = MDState(
        positions=10.0 * normal(1, step, ids, 3),
        velocities=0.01 * normal(2, step, ids, 3),
        forces=normal(3, step, ids, 3),
        masses=masses * 1.5 if isotopes else masses,
        ids=ids,
        step=step,
    )
    rows = Rows(
        numbers=numbers,
        system=torch.zeros_like(ids),
        cell=torch.tensor([[[20.0, 0.0, 0.0], [1.0, 21.0, 0.0], [-2.0, 3.0, 22.0]]], dtype=torch.float64),
        pbc=torch.tensor([[True, True, False]]),
        n_global=n,
        fields={"charge": 0.1 * ids.to(torch.float32), "tag": ids % 2 == 0},
    )
    return HookContext(step, rows, state, info(step), mesh)


def info(step: int, **changes: object) -> StepInfo:
    """Numbers that look like a run's."""
    base = StepInfo(
        step=step, time_fs=2.0 * step, energy=-1.0 / 3.0 - step, kinetic=0.1 * step, temperature=95.5
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def rows_of_rank(state: MDState, rows: torch.Tensor) -> MDState:
    """Copies of some rows of a state."""
    return MDState(
        state.positions[rows],
        state.velocities[rows],
        state.forces[rows],
        state.masses[rows],
        state.ids[rows],
        state.step,
    )
