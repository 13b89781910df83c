"""Two parts of an evaluation beside each other on a GPU.

Key object: `beside`. While a mesh is summed over ranks or transformed, the pairs are computed. Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose kernels go first: other ranks wait for what they compute."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Give a GPU the body's work beside what it gets afterwards, up to a call of what this yields.

    autograd runs the derivative of each part on the stream that the part ran on, so these overlap, too. On a CPU the
    body simply runs first.

    Parameters
    ----------
    device : torch.device

    Yields
    ------
    callable
        Without arguments; to be called before anything reads what the body made.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    side, current = _stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield lambda: current.wait_stream(side)
