"""What nvdd-lj offers, as rows; the only module that is imported for a listing.

Imports nothing but ``nvdd_core.plugins``; the targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="Lennard-Jones", maturity="stable")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the spec under which the model runs on several ranks."""
    yield SpecDecl("SPEC_LJ_HALO", Ref("nvdd_lj.spec:SPEC_LJ_HALO"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``lj``."""
    yield ModelDecl(
        "lj",
        Ref("nvdd_lj.model:load"),
        spec="SPEC_LJ_HALO",
        title="Lennard-Jones, a Warp kernel for CPU and GPU",
    )
