"""What a live module of mace is: whether it is served, its heads, and what its layers exchange.

Key objects: `served`, `plain_parameters`, `chosen_head`, `after_linear_up`, `exchanged_widths`, `settle_harmonics`,
`are_of_float32`, `flag`, `one`. Layer: plugin.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch

from nvdd_core.errors import InputError
from nvdd_mace.foreign import modules, o3

LARGEST_NUMBER = 118
SERVED = ("MACE", "ScaleShiftMACE")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SETTLED: set[tuple[torch.dtype, str, str]] = set()
# Blocks in which neighbours read nothing but what `linear_up` makes of the features.
_BY_LINEAR_UP = (
    "RealAgnosticInteractionBlock",
    "RealAgnosticResidualInteractionBlock",
    "RealAgnosticDensityInteractionBlock",
    "RealAgnosticDensityResidualInteractionBlock",
    "RealAgnosticResidualNonLinearInteractionBlock",
)


def flag(name: str, value: object) -> bool:
    """Return an option that is true or false, given as such or as a word.

    Raises
    ------
    InputError
        For anything else.
    """
    found = _FLAGS.get(str(value).lower())
    if found is None:
        raise InputError(f"mace: {name} is {value!r}; give true or false")
    return found


def one(name: str, value: object, wanted: str) -> str:
    """Return an option that is a name or a path, as text; one that reads as a number comes as one.

    Raises
    ------
    InputError
        For a list or anything else, saying what is `wanted`.
    """
    if not isinstance(value, (str, os.PathLike, int, float)):
        raise InputError(f"mace: {name} is {value!r}; give {wanted}")
    return str(value)


def are_of_float32(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether float32 holds the numbers of all tensors, as those of files that were made or stored in it."""
    return all(torch.equal(t, t.float().to(t.dtype)) for t in tensors if t.is_floating_point())


def served(module: torch.nn.Module) -> None:
    """Refuse modules whose distribution is not known to be exact.

    Raises
    ------
    InputError
        Naming the kind and what is served.
    """
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "mace: a model compiled to TorchScript can't be distributed; give the file from before compilation"
        )
    if kind not in [getattr(modules, name) for name in SERVED]:
        raise InputError(f"mace: a {kind.__name__} is not served; {' and '.join(SERVED)} are")
    if hasattr(module, "joint_embedding"):
        names = ", ".join(getattr(module, "embedding_specs", {}))
        raise InputError(
            f"mace: the model embeds further inputs ({names}) beside elements; such models are not served"
        )
    _sensible(module)


def _sensible(module: Any) -> None:
    """Refuse elements and a cutoff that no model has, and parameters that aren't finite: a damaged file."""
    numbers, cutoff = [int(z) for z in module.atomic_numbers], float(module.r_max)
    if len(set(numbers)) < len(numbers) or not all(1 <= z <= LARGEST_NUMBER for z in numbers):
        raise InputError(
            f"mace: the model's atomic numbers are {numbers}: no elements, or one twice; is it damaged?"
        )
    if not 0.0 < cutoff < math.inf:
        raise InputError(f"mace: the model's cutoff is {cutoff}; is it damaged?")
    for name, value in module.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"mace: the model's parameter {name} is not finite; is it damaged?")


def plain_parameters(module: torch.nn.Module) -> None:
    """Put ordinary parameters in the place of mace's empty ones, which can't be copied; they multiply zeros."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and type(value).__name__ == "EmptyParam":
                part._parameters[name] = torch.nn.Parameter(value.data, requires_grad=False)


def chosen_head(module: torch.nn.Module, head: str | None) -> str:
    """Return the head to use: the one named, the only one, or the one called default.

    Raises
    ------
    InputError
        When there is no such head, or several and none is the default.
    """
    heads = list(getattr(module, "heads", None) or ["Default"])
    if head is not None:
        head = one("head", head, "the name of one head")
        if head not in heads:
            raise InputError(f"mace: the model has no head {head!r}; its heads: {', '.join(heads)}")
        return head
    if len(heads) == 1:
        return str(heads[0])
    defaults = [name for name in heads if name.lower() == "default"]
    if not defaults:
        raise InputError(f"mace: the model has several heads: {', '.join(heads)}; give --option head=NAME")
    return str(defaults[0])


def settle_harmonics(module: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Call what torch compiles anew after its first call, so that every evaluation gives the same bits.

    e3nn's spherical harmonics are a TorchScript function that all models of a process share.
    """
    key = (dtype, str(device), str(module.spherical_harmonics.irreps_out))
    if key not in _SETTLED:
        with torch.enable_grad():
            for _ in range(2):
                axes = torch.eye(3, dtype=dtype, device=device).requires_grad_(True)
                total = module.spherical_harmonics(axes).sum()
                if total.requires_grad:  # those of l = 0 alone are constants
                    torch.autograd.grad(total, axes)
        _SETTLED.add(key)


def after_linear_up(module: Any) -> bool:
    """Return whether layers after the first exchange what ``linear_up`` makes: all that neighbours read, no wider."""
    return all(
        type(block).__name__ in _BY_LINEAR_UP and _dim(block.edge_irreps) <= _dim(block.node_feats_irreps)
        for block in module.interactions[1:]
    )


def exchanged_widths(module: Any) -> tuple[int, ...]:
    """Return how many numbers an atom are exchanged before each layer after the first."""
    made = after_linear_up(module)
    return tuple(
        _dim(block.edge_irreps if made else block.node_feats_irreps) for block in module.interactions[1:]
    )


def _dim(irreps: Any) -> int:
    return int(o3.Irreps(irreps).dim)
