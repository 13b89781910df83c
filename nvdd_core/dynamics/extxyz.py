"""One frame of a trajectory as extended XYZ text that ``ase.io.read`` understands.

ASE gives energy, stress and forces to the calculator of what it reads, takes `momenta` (in its own unit, so
that ``atoms.get_velocities()`` works) and `masses` as per-atom arrays, and puts `step` and `time_fs` into
``atoms.info``.

Invariant: text only; every value that is written can be read back by ASE without a keyword.
Layer: dynamics.
"""

from __future__ import annotations

import torch
from ase.data import atomic_masses, chemical_symbols

from nvdd_core.dynamics.hooks import StepInfo
from nvdd_core.dynamics.units import ASE_TIME_PER_FS

_TRIPLE = "%.12g %.12g %.12g"


def has_other_masses(masses: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return whether any mass isn't the one that ASE assumes for its element, a bool scalar tensor."""
    table = torch.as_tensor(atomic_masses, dtype=torch.float64).to(masses.device)
    return ((masses - table[numbers]).abs() > 1e-9 * masses).any()


def frame_header(
    n_rows: int, cell: torch.Tensor, pbc: torch.Tensor, info: StepInfo, *, with_masses: bool
) -> str:
    """Return the two lines before a frame's rows.

    Parameters
    ----------
    n_rows : int
        Rows of the frame.
    cell : Tensor, shape (3, 3)
        Cell vectors as rows, A; left out of the text when all are zero.
    pbc : Tensor, shape (3,), bool
        Periodic directions.
    info : StepInfo
        Gives energy, step and time.
    with_masses : bool
        Whether rows carry a column of masses.
    """
    columns = "species:S:1:pos:R:3:momenta:R:3:forces:R:3" + (":masses:R:1" if with_masses else "")
    parts = []
    if bool(cell.any()):
        parts.append('Lattice="' + " ".join(f"{x!r}" for x in cell.flatten().tolist()) + '"')
    parts += [
        f"Properties={columns}",
        f"energy={info.energy!r}",
        f"step={info.step}",
        f"time_fs={info.time_fs!r}",
        f"temperature={info.temperature!r}",
        'pbc="' + " ".join("T" if p else "F" for p in pbc.tolist()) + '"',
    ]
    return f"{n_rows}\n" + " ".join(parts) + "\n"


def frame_rows(
    numbers: torch.Tensor,
    positions: torch.Tensor,
    velocities: torch.Tensor,
    forces: torch.Tensor,
    masses: torch.Tensor,
    *,
    with_masses: bool,
) -> str:
    """Return the lines of some rows; CPU tensors in A, A/fs, eV/A and amu.

    Positions have ten decimals, the rest twelve digits.
    """
    momenta = velocities * (masses[:, None] / ASE_TIME_PER_FS)
    values = torch.cat([positions, momenta, forces, masses[:, None]], dim=1)
    columns: list[list[float]] = values[:, : 10 if with_masses else 9].T.tolist()
    template = f"%-2s %.10f %.10f %.10f {_TRIPLE} {_TRIPLE}" + (" %.12g" if with_masses else "") + "\n"
    symbols = [chemical_symbols[z] for z in numbers.tolist()]
    return "".join(map(template.__mod__, zip(symbols, *columns, strict=True)))
