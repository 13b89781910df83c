"""The hooks that a plugin's light module may implement; `API` is the contract's version.

Key objects: `hookimpl` (the marker that plugins use) and the four specifications. Invariant: a
hook declares rows and acts on nothing; it may be called twice and must say the same. The window
``MIN_API <= api <= API`` moves only when a row type or a hook changes its meaning. Layer: plugins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pluggy

from nvdd_core.plugins.rows import AdapterDecl, ModelDecl, PluginInfo, SpecDecl

PROJECT: Final = "nvdd"
GROUP: Final = "nvdd.plugins"
API: Final = 1
MIN_API: Final = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def nvdd_plugin_info() -> PluginInfo | None:
    """Say which version of the contract the plugin speaks, and what it is."""


@hookspec
def nvdd_declare_specs() -> Iterable[SpecDecl]:
    """Declare distribution specs, each under a name."""
    return ()


@hookspec
def nvdd_declare_models() -> Iterable[ModelDecl]:
    """Declare the models that users select by name."""
    return ()


@hookspec
def nvdd_declare_adapters() -> Iterable[AdapterDecl]:
    """Declare adapters for foreign code that the models run."""
    return ()
