"""What nvdd-mpnn offers, as rows; imports nothing but ``nvdd_core.plugins``."""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="Message passing, an example", maturity="experimental")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the spec under which the model runs on several ranks."""
    yield SpecDecl("SPEC_MPNN_EXAMPLE", Ref("nvdd_mpnn.spec:SPEC_MPNN_EXAMPLE"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``mpnn``."""
    yield ModelDecl(
        "mpnn", Ref("nvdd_mpnn.model:load"), spec="SPEC_MPNN_EXAMPLE", title="Message passing, an example"
    )
