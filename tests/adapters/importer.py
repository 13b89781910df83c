"""A second foreign module, which has taken a function by name."""

from __future__ import annotations

from typing import Any

from tests.adapters.foreign import scale

renamed = scale
__all__ = ["renamed", "scale"]


def use(x: Any) -> Any:
    return scale(x)
