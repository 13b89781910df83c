"""What nvdd-dftd3 offers, as rows; the only module that is imported for a listing.

Imports nothing but ``nvdd_core.plugins``; the targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="DFT-D3(BJ) dispersion", maturity="stable")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the spec under which the model runs on several ranks."""
    yield SpecDecl("SPEC_DFTD3_HALO", Ref("nvdd_dftd3.spec:SPEC_DFTD3_HALO"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``dftd3``."""
    yield ModelDecl(
        "dftd3",
        Ref("nvdd_dftd3.model:load"),
        spec="SPEC_DFTD3_HALO",
        title="DFT-D3 with Becke-Johnson damping, two-body terms",
    )
