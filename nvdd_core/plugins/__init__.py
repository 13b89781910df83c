"""Plugins: what they declare, how they are found, and how they are looked up.

A plugin author needs `hookimpl` and the rows (`PluginInfo`, `ModelDecl`, `SpecDecl`,
`AdapterDecl`, `Ref`); everybody else needs `default_manager`. Invariant: importing this package
imports neither torch nor numpy nor any plugin. Layer: plugins.
"""

from __future__ import annotations

from nvdd_core.plugins.agreement import check_agreement
from nvdd_core.plugins.hookspecs import API, GROUP, MIN_API, hookimpl
from nvdd_core.plugins.manager import PluginManager, default_manager, use_manager
from nvdd_core.plugins.record import PluginEntry, PluginRecord, PluginStatus, Provided
from nvdd_core.plugins.rows import AdapterDecl, AdapterKind, Maturity, ModelDecl, PluginInfo, Ref, SpecDecl

__all__ = [
    "API",
    "GROUP",
    "MIN_API",
    "AdapterDecl",
    "AdapterKind",
    "Maturity",
    "ModelDecl",
    "PluginEntry",
    "PluginInfo",
    "PluginManager",
    "PluginRecord",
    "PluginStatus",
    "Provided",
    "Ref",
    "SpecDecl",
    "check_agreement",
    "default_manager",
    "hookimpl",
    "use_manager",
]
