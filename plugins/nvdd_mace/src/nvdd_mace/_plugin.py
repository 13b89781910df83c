"""What nvdd-mace offers, as rows; the only module that is imported for a listing.

Imports nothing but ``nvdd_core.plugins``; the targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvdd_core.plugins import AdapterDecl, ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl

_MACE = ("mace-torch>=0.3.16",)
_ADAPTERS = (
    ("refresh", "interactions.[1-9]*.linear_up", "REFRESH", "what neighbours read, but in the first layer"),
    ("features", "interactions.[1-9]*", "FEATURES", "the same where neighbours read more than that"),
    ("messages", "interactions.*", "MESSAGES", "interactions on owned atoms after their sum over edges"),
    ("skips", "interactions.*.[ls]*_[lrt]*", "SKIPS", "skip connections on owned atoms"),
    ("products", "products.*", "PRODUCTS", "products on owned atoms"),
    ("readouts", "readouts.*", "READOUTS", "readouts on owned atoms"),
)


@hookimpl
def nvdd_plugin_info() -> PluginInfo:
    """Say which contract this plugin speaks, and what it is."""
    return PluginInfo(api=1, title="MACE", homepage="https://github.com/ACEsuit/mace", maturity="stable")


@hookimpl
def nvdd_declare_specs() -> Iterator[SpecDecl]:
    """Declare the specs under which models run on several ranks, one a strategy."""
    yield SpecDecl("SPEC_MACE_HALO", Ref("nvdd_mace.spec:SPEC_MACE_HALO"), title="one exchange a layer")
    yield SpecDecl("SPEC_MACE_GP", Ref("nvdd_mace.spec:SPEC_MACE_GP"), title="atoms by index")
    yield SpecDecl("SPEC_MACE_WIDE", Ref("nvdd_mace.spec:SPEC_MACE_WIDE"), title="no exchange of features")


@hookimpl
def nvdd_declare_models() -> Iterator[ModelDecl]:
    """Declare the model ``mace``."""
    yield ModelDecl(
        "mace",
        Ref("nvdd_mace.model:load"),
        spec="SPEC_MACE_HALO",
        title="MACE, from a file written by mace-torch",
        requires=_MACE,
        paths=("checkpoint",),
    )


@hookimpl
def nvdd_declare_adapters() -> Iterator[AdapterDecl]:
    """Declare what is hooked into a model while several ranks evaluate it."""
    for name, target, attribute, title in _ADAPTERS:
        yield AdapterDecl(
            f"mace/{name}",
            kind="module",
            target=target,
            ref=Ref(f"nvdd_mace.adapters:{attribute}"),
            title=title,
            requires=_MACE,
        )
