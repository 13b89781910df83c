"""The state of a run on one rank: what an integrator reads and writes.

`MDState` holds the owned rows' positions, velocities and forces with what moves them; integrators change
the tensors in place. When rows migrate the runner makes a new state (or assigns new tensors).

Invariant: all tensors have the same rows in the same order, float64 (ids: int64), on one device; positions
are never folded.
Layer: dynamics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvdd_core.errors import InputError


@dataclass
class MDState:
    """Owned rows of one rank during a run.

    Attributes
    ----------
    positions : Tensor, shape (n, 3), float64
        Unfolded positions in A.
    velocities : Tensor, shape (n, 3), float64
        A/fs.
    forces : Tensor, shape (n, 3), float64
        eV/A, at `positions`.
    masses : Tensor, shape (n,), float64
        amu. Integrators keep what they derive from it until it is another tensor or is changed in place.
    ids : Tensor, shape (n,), int64
        Global row ids; they key the noise.
    step : int
        Completed steps.
    """

    positions: torch.Tensor
    velocities: torch.Tensor
    forces: torch.Tensor
    masses: torch.Tensor
    ids: torch.Tensor
    step: int = 0

    @classmethod
    def at_rest(
        cls, positions: torch.Tensor, masses: torch.Tensor, ids: torch.Tensor | None = None
    ) -> MDState:
        """Return a state with zero velocities and forces; `ids` default to 0, 1, 2, ..."""
        if ids is None:
            ids = torch.arange(positions.shape[0], dtype=torch.int64, device=positions.device)
        return cls(positions, torch.zeros_like(positions), torch.zeros_like(positions), masses, ids)

    @property
    def n_rows(self) -> int:
        """Number of owned rows."""
        return self.positions.shape[0]

    def validate(self) -> None:
        """Check shapes, dtypes, devices and masses; synchronises a GPU, so not for every step.

        Raises
        ------
        InputError
            Names the tensor and, for a bad mass, the global row id.
        """
        n = self.n_rows
        expected = {
            "positions": (self.positions, (n, 3), torch.float64),
            "velocities": (self.velocities, (n, 3), torch.float64),
            "forces": (self.forces, (n, 3), torch.float64),
            "masses": (self.masses, (n,), torch.float64),
            "ids": (self.ids, (n,), torch.int64),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise InputError(
                    f"{name} of a dynamics state must have shape {shape} and {dtype}; "
                    f"found {tuple(tensor.shape)} and {tensor.dtype}"
                )
            if tensor.device != self.positions.device:
                raise InputError(
                    f"{name} of a dynamics state is on {tensor.device}, positions are on "
                    f"{self.positions.device}; move all tensors to one device"
                )
        bad = torch.nonzero(~(self.masses > 0.0) | ~torch.isfinite(self.masses))
        if bad.numel():
            row = int(bad[0])
            raise InputError(
                f"mass of row {int(self.ids[row])} is {float(self.masses[row])} amu; masses must be "
                "finite and positive for dynamics. Give it a mass, or remove the row"
            )
