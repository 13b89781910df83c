"""How torch takes memory of a GPU.

Key objects: `use_growing_segments`. Layer: runtime.
"""

from __future__ import annotations

import functools
import os

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@functools.cache
def use_growing_segments(kind: str) -> None:
    """Let torch's memory of a GPU consist of segments that grow, unless the user's environment configures it.

    Numbers of edges and ghosts change from step to step. Segments of fixed sizes then fragment, until torch gives all
    of them back and takes them anew, step for step, long before the memory is full (a MACE step at 91 of 139 GiB
    took 15 % longer).

    Parameters
    ----------
    kind : str
        The device's type; nothing happens unless it is ``"cuda"``.
    """
    if kind == "cuda" and not any(name in os.environ for name in _VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
