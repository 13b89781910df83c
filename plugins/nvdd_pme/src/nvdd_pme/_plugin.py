"""What nvdd-pme offers, as rows; the only module that is imported for a listing.

Imports nothing but ``nvdd_core.plugins``; the targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="Ewald and particle-mesh Ewald", maturity="stable")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the specs under which the models run on several ranks."""
    yield SpecDecl("SPEC_EWALD_HALO", Ref("nvdd_pme.spec:SPEC_EWALD_HALO"))
    yield SpecDecl("SPEC_PME_HALO", Ref("nvdd_pme.spec:SPEC_PME_HALO"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the models ``ewald`` and ``pme``."""
    yield ModelDecl(
        "ewald",
        Ref("nvdd_pme.model:load_ewald"),
        spec="SPEC_EWALD_HALO",
        title="Coulomb energy of point charges, Ewald sum",
    )
    yield ModelDecl(
        "pme",
        Ref("nvdd_pme.model:load_pme"),
        spec="SPEC_PME_HALO",
        title="Coulomb energy of point charges, particle-mesh Ewald",
    )
