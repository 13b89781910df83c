"""The plugin's profile for the conformance kit.

Key object: `Profile`. Layer: plugin.
"""

from __future__ import annotations

from typing import ClassVar

from nvdd_core.testing import Conformance


class Profile(Conformance):
    """Two elements near enough to be bonded; short cutoffs that no shell of the kit's crystals comes near."""

    plugin = "dftd3"
    options: ClassVar = {"functional": "pbe", "cutoff": 5.6, "cn_cutoff": 4.5}
    symbol = ("Si", "O")
    spacing = 2.4
