"""The state refuses what integrators can't use."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nvdd_core.dynamics import MDState
from nvdd_core.errors import InputError


def _state() -> MDState:
    return MDState.at_rest(
        torch.zeros(4, 3, dtype=torch.float64), torch.full((4,), 12.0, dtype=torch.float64)
    )


def test_at_rest() -> None:
    state = _state()
    state.validate()
    assert state.ids.tolist() == [0, 1, 2, 3]
    assert state.n_rows == 4
    assert state.velocities.data_ptr() != state.forces.data_ptr()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("velocities", torch.zeros(4, 3)),
        ("forces", torch.zeros(3, 3, dtype=torch.float64)),
        ("masses", torch.ones(4, 1, dtype=torch.float64)),
        ("ids", torch.arange(4, dtype=torch.int32)),
        ("positions", torch.zeros(4, 2, dtype=torch.float64)),
    ],
)
def test_wrong_shape_or_dtype_is_named(name: str, value: torch.Tensor) -> None:
    with pytest.raises(InputError, match=f"{name} of a dynamics state must have shape"):
        replace(_state(), **{name: value}).validate()


@pytest.mark.parametrize("mass", [0.0, -1.0, math.nan, math.inf])
def test_bad_mass_names_the_global_id(mass: float) -> None:
    state = replace(_state(), ids=torch.tensor([10, 11, 57, 13]))
    state.masses[2] = mass
    with pytest.raises(InputError, match="mass of row 57"):
        state.validate()
