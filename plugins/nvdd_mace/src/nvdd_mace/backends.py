"""Fused kernels: mace's own converters, and a check of what they give.

Key objects: `converted`. The hooks that distribute a model look at rows only, so they serve converted models as they
are. Layer: plugin.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import TYPE_CHECKING

import ase
import numpy as np
import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch
from nvdd_mace.foreign import built_in, imported

if TYPE_CHECKING:
    from nvdd_mace.model import MaceModel

# converter and the packages that it needs
BACKENDS = {
    "cueq": ("mace.cli.convert_e3nn_cueq", ("cuequivariance", "cuequivariance_torch")),
    "oeq": ("mace.cli.convert_e3nn_oeq", ("openequivariance",)),
}
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


def converted(model: MaceModel, backend: str) -> MaceModel:
    """Return the model with the kernels of a backend; warns with the largest difference in a force from e3nn's.

    Raises
    ------
    InputError
        For an unknown backend, one that isn't installed, or one that computes something else.
    """
    if backend not in BACKENDS:
        raise InputError(f"mace: backend is {backend!r}; give e3nn, {' or '.join(BACKENDS)}")
    converter, packages = BACKENDS[backend]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"mace: backend={backend} needs {' and '.join(missing)}, which can't be imported here"
        )
    run = imported(converter).run
    with built_in(model.dtype):
        module = run(copy.deepcopy(model.module), return_model=True, device=model.device.type)
    found = copy.copy(model)
    trainable = any(p.requires_grad for p in model.module.parameters())
    found.module = module.to(dtype=model.dtype, device=model.device).eval().requires_grad_(trainable)
    error = disagreement(model, found)
    warnings.warn(f"mace: forces by {backend} differ by at most {error:.1e} eV/A from e3nn's", stacklevel=2)
    if not error < _ALLOWED[model.dtype]:
        raise InputError(
            f"mace: with backend={backend} forces differ by {error:.1e} eV/A from e3nn's, more than the "
            f"{_ALLOWED[model.dtype]:.0e} that rounding explains; use backend=e3nn"
        )
    return found


def disagreement(one: MaceModel, other: MaceModel) -> float:
    """Return the largest difference of a force component, eV/Angstrom, on a cluster of the model's elements."""
    corners = np.array([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)], dtype=float)
    k = np.arange(8)
    places = 0.45 * one.cutoff * (corners + 0.05 * np.stack([np.sin(k), np.sin(2 * k), np.sin(3 * k)], 1))
    symbols = [one.symbols[i % len(one.symbols)] for i in range(8)]
    cluster = ase.Atoms(symbols, positions=places)

    def forces(model: MaceModel) -> torch.Tensor:
        distributed = DistributedModel(model)
        found = distributed(
            ShardedBatch.scatter(Batch.from_ase(cluster), distributed.mesh), {"forces"}
        ).forces
        return torch.empty(0) if found is None else found

    return float((forces(one) - forces(other)).abs().max())
