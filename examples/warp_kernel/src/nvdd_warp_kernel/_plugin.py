"""What nvdd-warp-kernel offers, as rows; imports nothing but ``nvdd_core.plugins``."""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import AdapterDecl, ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="A Warp kernel, an example", maturity="experimental")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the spec, which carries the adapter."""
    yield SpecDecl("SPEC_WARP_KERNEL", Ref("nvdd_warp_kernel.spec:SPEC_WARP_KERNEL"))


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``warp_kernel``."""
    yield ModelDecl(
        "warp_kernel",
        Ref("nvdd_warp_kernel.model:load"),
        spec="SPEC_WARP_KERNEL",
        title="TOY2, layer 2 in Warp",
    )


@hookimpl
def nvdd_declare_adapters() -> Iterator[AdapterDecl]:
    """Declare what is done to the kernel's operator, for ``nvdd adapters``."""
    yield AdapterDecl(
        "warp_kernel/messages",
        kind="op",
        target="nvdd_warp_kernel::messages",
        ref=Ref("nvdd_warp_kernel.spec:MESSAGES"),
        title="reads features of ghosts",
    )
