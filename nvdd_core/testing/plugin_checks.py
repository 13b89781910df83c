"""Checks of a plugin's package and declarations.

Each is a function of the plugin's name that raises `ConformanceError`. Invariant: only `assert_refs_resolve`
imports what a plugin declares. Layer: testing.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nvdd_core.plugins import PluginEntry, PluginManager, PluginRecord, PluginStatus, default_manager
from nvdd_core.plugins.discovery import find_entries
from nvdd_core.plugins.hookspecs import GROUP
from nvdd_core.plugins.loading import load
from nvdd_core.plugins.report import plugin_row
from nvdd_core.plugins.requirements import CORE, normalized
from nvdd_core.plugins.static_view import find_chain
from nvdd_core.runtime import MLIPSpec
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check
from nvdd_core.testing.process import rows_without_torch

_TEXT, _MAYBE, _LIST = (str,), (str, type(None)), (list,)
# Keys and types of one plugin in the JSON of `nvdd plugins`, schema 1.
ROW_SCHEMA: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("name", "distribution", "version", "target", "status", "reason", "location"), _TEXT),
    **dict.fromkeys(("title", "description", "homepage", "maturity"), _MAYBE),
    **dict.fromkeys(("models", "specs", "adapters", "notes"), _LIST),
    "loaded": (bool,),
    "editable": (bool,),
    "api": (int, type(None)),
}
_ITEM_SCHEMA: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "models": {
        **dict.fromkeys(("name", "status", "reason", "maturity", "target", "title"), _TEXT),
        "spec": _MAYBE,
        "requires": _LIST,
    },
    "specs": dict.fromkeys(("name", "target", "title"), _TEXT),
    "adapters": {
        **dict.fromkeys(("name", "kind", "status", "reason", "maturity", "target", "ref", "title"), _TEXT),
        "requires": _LIST,
    },
}


def _entry(plugin: str) -> PluginEntry:
    found = [entry for entry in find_entries() if entry.name == plugin]
    if not found:
        raise ConformanceError(
            f"no installed distribution has the entry point '{plugin}' in the group '{GROUP}'; install the package "
            "(pip install -e .) and look at its pyproject.toml"
        )
    if len(found) > 1:
        owners = ", ".join(sorted(f"{entry.distribution} {entry.version} ({entry.value})" for entry in found))
        raise ConformanceError(
            f"the entry point '{plugin}' exists {len(found)} times: {owners}; uninstall all but one"
        )
    return found[0]


def _loaded(plugin: str) -> PluginRecord:
    """Load the plugin anew, whatever a manager knows of it already."""
    record = load(PluginRecord(_entry(plugin)))
    if record.status not in (PluginStatus.OK, PluginStatus.UNAVAILABLE) or not record.loaded:
        raise ConformanceError(record.describe())
    return record


@check
def assert_entry_point_is_unique(plugin: str) -> None:
    """Check that exactly one installed distribution provides the plugin."""
    _entry(plugin)


@check
def assert_listing_is_light(plugin: str) -> None:
    """Check that the plugin can be listed in a process in which torch, numpy and ase can't be imported."""
    _entry(plugin)
    (row,) = rows_without_torch(plugin)
    if row["heavy"]:
        raise ConformanceError(
            f"the entry module of plugin '{plugin}' imports {', '.join(row['heavy'])}; it may import the standard "
            "library and nvdd_core.plugins only: move the rest behind a Ref"
        )
    if row["status"] not in ("ok", "unavailable") or not row["loaded"]:
        raise ConformanceError(
            f"without torch, numpy and ase plugin '{plugin}' is {row['status']}: {row['reason']}"
        )


@check
def assert_names_are_valid(plugin: str) -> None:
    """Check that the plugin loads, declares something, and that no other plugin uses its models' names."""
    record = _loaded(plugin)
    if not record.rows:
        raise ConformanceError(f"plugin '{plugin}' declares neither a model nor a spec nor an adapter")
    for row in default_manager().models():
        if row.plugin == plugin and row.status is PluginStatus.CONFLICT:
            raise ConformanceError(f"model '{row.decl.name}' of plugin '{plugin}': {row.reason}")


@check
def assert_refs_resolve(plugin: str, manager: PluginManager | None = None) -> None:
    """Check that everything declared can be imported and is what it is declared as."""
    record = _loaded(plugin)
    manager = default_manager() if manager is None else manager
    usable = [row for row in record.rows if row.status is PluginStatus.OK]
    if not usable and record.rows:
        raise NotApplicable(f"nothing is usable here: {record.rows[0].reason}")
    models = {row.decl.name for row in record.models}
    specs = {row.decl.name for row in record.specs}
    for row in usable:
        target = manager.resolve(row.decl.ref, plugin)
        what = f"'{row.decl.name}' of plugin '{plugin}' ({row.decl.ref})"
        if row.decl.name in specs and not isinstance(target, MLIPSpec) and row in record.specs:
            raise ConformanceError(f"spec {what} is no MLIPSpec but {type(target).__name__}")
        if row.decl.name in models and row in record.models:
            _check_loader(what, target)
        if row in record.adapters:
            _check_adapter(what, target, getattr(row.decl, "kind", ""))


def _check_loader(what: str, target: Any) -> None:
    if not callable(target):
        raise ConformanceError(f"model {what} is no loader but {target!r}")
    try:
        inspect.signature(target).bind_partial(dtype=None, device=None)
    except TypeError as error:
        raise ConformanceError(
            f"the loader of model {what} can't be called as load(dtype=..., device=...): {error}"
        ) from error


def _check_adapter(what: str, target: Any, kind: str) -> None:
    for name in ("install", "restore", "to_dict"):
        if not callable(getattr(target, name, None)):
            raise ConformanceError(f"adapter {what} has no method '{name}'; found {target!r}")
    if target.kind != kind:
        raise ConformanceError(f"adapter {what} is declared with kind '{kind}' but has kind '{target.kind}'")


@check
def assert_requirement_is_bounded(plugin: str) -> None:
    """Check that the distribution requires nvdd-core with an upper bound, so that a new contract can't break it."""
    from packaging.requirements import Requirement

    entry = _entry(plugin)
    lines = [Requirement(line) for line in entry.requires]
    bounds = [line.specifier for line in lines if normalized(line.name) == CORE]
    if not bounds:
        raise ConformanceError(
            f"{entry.distribution} doesn't require {CORE}; add '{CORE}>=0.1,<0.2' to its dependencies"
        )
    if not any(clause.operator in ("<", "<=", "==", "~=") for bound in bounds for clause in bound):
        raise ConformanceError(
            f"{entry.distribution} requires '{CORE}{bounds[0]}' without an upper bound; write '{CORE}>=0.1,<0.2'"
        )


@check
def assert_package_is_typed(plugin: str) -> None:
    """Check that the package ships ``py.typed``, so that type checkers read its annotations."""
    module = _entry(plugin).value.partition(":")[0].strip()
    chain = find_chain(module) or []
    folders = list(chain[0].submodule_search_locations or ()) if chain else []
    if not any(Path(folder, "py.typed").is_file() for folder in folders):
        raise ConformanceError(
            f"package '{module.partition('.')[0]}' has no file py.typed (looked in {', '.join(folders) or 'nothing'}); "
            "add an empty one beside its __init__.py and to the wheel"
        )


@check
def assert_listing_row_fits_schema(plugin: str) -> None:
    """Check the plugin's row in the JSON of ``nvdd plugins`` against schema 1."""
    record = _loaded(plugin)
    row = json.loads(json.dumps(plugin_row(record)))
    _check_keys(f"the row of plugin '{plugin}'", row, ROW_SCHEMA)
    for kind, schema in _ITEM_SCHEMA.items():
        for item in row[kind]:
            _check_keys(f"{kind} of plugin '{plugin}', {item.get('name')!r}", item, schema)
    if not row["title"]:
        raise ConformanceError(f"plugin '{plugin}' has no title; give PluginInfo(title='...')")


def _check_keys(where: str, row: dict[str, Any], schema: dict[str, tuple[type, ...]]) -> None:
    for key, kinds in schema.items():
        if key not in row:
            raise ConformanceError(f"{where} lacks the key '{key}'")
        if not isinstance(row[key], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConformanceError(f"{where}: '{key}' is {row[key]!r}, expected {expected}")


@check
def assert_hooks_are_idempotent(plugin: str) -> None:
    """Check that the hooks declare the same rows when they are called again."""
    first, second = _loaded(plugin), _loaded(plugin)
    for name in ("info", "models", "specs", "adapters"):
        if getattr(first, name) != getattr(second, name):
            raise ConformanceError(
                f"plugin '{plugin}' declared other {name} when asked again: first {getattr(first, name)}, then "
                f"{getattr(second, name)}; a hook declares and does nothing else"
            )
    if replace(first, error=None) != replace(second, error=None):
        raise ConformanceError(f"plugin '{plugin}' has another record when it is loaded again")
