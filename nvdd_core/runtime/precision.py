"""How far float32 coordinates of a system are from each other. Layer: runtime."""

from __future__ import annotations

import torch

from nvdd_core.partition import segment_bounds
from nvdd_core.runtime.batch import Batch

_COARSE_A = 1e-4  # a vibration of a bond is some hundred times that


def precision_note(batch: Batch) -> str:
    """Return a sentence for the user where float32 coordinates of so wide a system lose digits that matter."""
    low, high = segment_bounds(batch.positions, batch.system, batch.n_systems)
    span = torch.where(batch.pbc.all(1), 0.0, (high - low).amax(1))
    sides = torch.where(batch.pbc, torch.linalg.vector_norm(batch.cell, dim=2), 0.0).amax(1)
    widest = float(torch.maximum(span, sides).max())  # coordinates are centred: up to half of it either way
    step = 0.5 * widest * torch.finfo(torch.float32).eps
    if not step > _COARSE_A:
        return ""
    return f"float32 coordinates are {step:.1g} A apart in a system {widest:.3g} A wide; float64 is exact"
