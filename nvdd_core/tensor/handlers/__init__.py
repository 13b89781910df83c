"""Handlers by family of operations, and their registration.

The handlers of a scatter exclude each other, so their order matters to nothing but speed.
Layer: tensor.
"""

from __future__ import annotations

from nvdd_core.tensor.handlers import allocate, lookup, refused, scatter, system
from nvdd_core.tensor.registry import HandlerRegistry, Registration

__all__ = ["install"]


def install(registry: HandlerRegistry) -> list[Registration]:
    """Register every handler of the core in `registry`."""
    families = (scatter, system, lookup, refused, allocate)
    return [registration for family in families for registration in family.install(registry)]
