"""What nvdd-toy2 offers, as rows; imports nothing but ``nvdd_core.plugins``."""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="TOY2, an example", maturity="experimental")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the spec of the ways that leave exchanges to ShardTensor."""
    yield SpecDecl("SPEC_TOY2_HALO", Ref("nvdd_toy2.spec:SPEC_TOY2_HALO"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``toy2``."""
    yield ModelDecl("toy2", Ref("nvdd_toy2.model:load"), spec="SPEC_TOY2_HALO", title="TOY2, an example")
