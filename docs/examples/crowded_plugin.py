"""The light module of a plugin: it declares rows, and imports nothing but ``nvdd_core.plugins``."""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which version of the contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="Crowded atoms", maturity="experimental")


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``crowded``; its module is imported when somebody asks for it."""
    yield ModelDecl("crowded", Ref("crowded:load"), spec="SPEC_MPNN_HALO", title="A soft repulsion")
