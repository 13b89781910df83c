"""Evaluations of a small cluster: what a model gives, before it is used.

Key objects: `trial_cluster`, `trial_forces`, `settle`. Layer: plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ase
import numpy as np
import torch

from nvdd_core.runtime import Batch, DistributedModel, ShardedBatch

if TYPE_CHECKING:
    from nvdd_mace.model import MaceModel

# No size that a model has as well, so that code made for this cluster doesn't take the one for the other.
_N_ATOMS = 11
# The first evaluation is watched, the second compiles, the third compiles what the second's backward pass left.
_EVALUATIONS = 3


def trial_cluster(model: MaceModel) -> ase.Atoms:
    """Return a cluster of the model's elements, every atom with neighbours within the cutoff and none alike."""
    k = np.arange(_N_ATOMS)
    grid = np.stack([k % 3, k // 3 % 2, k // 6], axis=1)
    places = 0.45 * model.cutoff * (grid + 0.05 * np.stack([np.sin(k), np.sin(2 * k), np.sin(3 * k)], 1))
    symbols = [model.symbols[i % len(model.symbols)] for i in range(_N_ATOMS)]
    return ase.Atoms(symbols, positions=places)


def trial_forces(model: MaceModel, atoms: ase.Atoms) -> torch.Tensor:
    """Return forces by the model on one rank, eV/Angstrom."""
    distributed = DistributedModel(model)
    found = distributed(ShardedBatch.scatter(Batch.from_ase(atoms), distributed.mesh), {"forces"}).forces
    return torch.empty(0) if found is None else found


def settle(model: MaceModel) -> None:
    """Let TorchScript compile the model's parts now, for any number of atoms and edges.

    On a GPU it otherwise compiles them for the sizes of the first evaluations and anew for those of later ones, which
    costs a second each of the first few times that the number of atoms or edges changes.
    """
    if model.device.type != "cuda":
        return
    before = torch.jit.set_fusion_strategy([("DYNAMIC", 1)])
    try:
        cluster = trial_cluster(model)
        for _ in range(_EVALUATIONS):
            trial_forces(model, cluster)
    finally:
        torch.jit.set_fusion_strategy(before)
