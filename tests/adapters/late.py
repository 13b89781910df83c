"""A module that the tests load while an adapter is installed."""

from __future__ import annotations

from tests.adapters.foreign import scale

__all__ = ["scale"]
