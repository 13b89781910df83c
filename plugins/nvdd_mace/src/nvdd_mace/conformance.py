"""Small models with random weights, and the plugin's profile for the conformance kit.

Key objects: `Profile`, `load_random`, `random_module`. The numbers mean nothing; they are for comparing ways to compute
them. Layer: plugin.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, ClassVar

import numpy as np
import torch

from nvdd_core.testing import Conformance
from nvdd_mace.foreign import built_in, modules, o3
from nvdd_mace.model import MaceModel

INTERACTIONS = (
    "RealAgnosticInteractionBlock",
    "RealAgnosticResidualInteractionBlock",
    "RealAgnosticDensityInteractionBlock",
    "RealAgnosticDensityResidualInteractionBlock",
    "RealAgnosticAttResidualInteractionBlock",
    "RealAgnosticResidualNonLinearInteractionBlock",
)
"""Every interaction of mace-torch 0.3.16."""


def random_module(
    interaction: str = "RealAgnosticResidualInteractionBlock",
    *,
    first: str = "",
    kind: str = "ScaleShiftMACE",
    layers: int = 2,
    heads: tuple[str, ...] = ("Default",),
    hidden: str = "4x0e+4x1o",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **more: Any,
) -> torch.nn.Module:
    """Return a module of mace for oxygen and silicon, the same for the same arguments.

    Parameters
    ----------
    interaction, first : str
        Class of the layers after the first, and of the first (default: the same).
    kind : str
        ``MACE`` or ``ScaleShiftMACE``.
    layers : int
    heads : tuple of str
    hidden : str
        Irreps of the features.
    dtype : torch.dtype
    seed : int
    **more
        Further arguments of mace's constructor, instead of those here.
    """
    n = len(heads)
    blocks = modules.interaction_classes
    energies = np.arange(2.0 * n).reshape(n, 2) - 3.0
    arguments: dict[str, Any] = {
        "r_max": 3.0,
        "num_bessel": 4,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": blocks[interaction],
        "interaction_cls_first": blocks[first or interaction],
        "num_interactions": layers,
        "num_elements": 2,
        "hidden_irreps": o3.Irreps(hidden),
        "MLP_irreps": o3.Irreps("4x0e"),
        "atomic_energies": energies if n > 1 else energies[0],
        "avg_num_neighbors": 8.0,
        "atomic_numbers": [8, 14],
        "correlation": 2,
        "gate": torch.nn.functional.silu,
        "radial_MLP": [8],
        "heads": list(heads),
        **more,
    }
    if kind == "ScaleShiftMACE":
        arguments["atomic_inter_scale"] = [2.0 + i for i in range(n)] if n > 1 else 2.0
        arguments["atomic_inter_shift"] = [0.1 * i for i in range(n)] if n > 1 else 0.1
    with built_in(dtype):
        torch.manual_seed(seed)
        made: torch.nn.Module = getattr(modules, kind)(**arguments)
    return made


def load_random(
    *, dtype: torch.dtype, device: torch.device | str, interaction: str = INTERACTIONS[1]
) -> MaceModel:
    """Make a model of two layers with random weights; a loader for the kit, which needs no file."""
    module = pickle.loads(_pickled(interaction))
    return MaceModel(module, dtype=dtype, device=device, trainable=True)


@functools.cache
def _pickled(interaction: str) -> bytes:
    """Make the module once a process; compiling its parts takes most of the time."""
    return pickle.dumps(random_module(interaction))


class Profile(Conformance):
    """What the kit has to know: the model and the elements that it was made for."""

    plugin = "mace"
    model = "nvdd_mace.conformance:load_random"
    symbol: ClassVar[Any] = ("O", "Si")
    spacing = 1.9  # two shells within the cutoff
