"""What tells whether a tensor was changed in place. Layer: tensor."""

from __future__ import annotations

import torch


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes when torch changes the tensor in place; no host synchronisation.

    What numpy or ``tensor.data`` changes isn't counted, nor is any change of a tensor that was made in inference mode.
    """
    return 0 if tensor.is_inference() else tensor._version
