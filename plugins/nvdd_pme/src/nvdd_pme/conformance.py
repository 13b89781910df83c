"""The plugin's profiles for the conformance kit.

Key objects: `Profile` (``pme``), `EwaldProfile` (``ewald``). Layer: plugin.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nvdd_core.testing import Conformance, no

_OPEN = "the sum is over three periodic directions"
_LOCAL = "every charge feels every other one"


class Profile(Conformance):
    """Particle-mesh Ewald of two ions that don't balance in every structure."""

    plugin = "pme"
    model = "pme/pme"
    options: ClassVar[Any] = {"charges": "Na=1,Cl=-1", "cutoff": 6.0}
    symbol: ClassVar[Any] = ("Na", "Cl")
    spacing = 2.3
    capabilities: ClassVar[Any] = {
        "open_boundaries": no(_OPEN),
        "local": no(_LOCAL),
        "translation_invariant": no("to the asked accuracy only, as the mesh stands still"),
        "extensive": no("to the asked accuracy only, as a replica has another mesh"),
    }


class EwaldProfile(Conformance):
    """The Ewald sum, converged to rounding, so that a replica has twice the energy to 1e-10."""

    plugin = "pme"
    model = "pme/ewald"
    options: ClassVar[Any] = {"charges": "Na=1,Cl=-1", "cutoff": 7.0, "accuracy": 1e-12}
    symbol: ClassVar[Any] = ("Na", "Cl")
    spacing = 2.1
    capabilities: ClassVar[Any] = {"open_boundaries": no(_OPEN), "local": no(_LOCAL)}
