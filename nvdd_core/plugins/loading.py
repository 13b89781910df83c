"""Loads one plugin: import, hooks, gate 2, rows; whatever goes wrong stays with that plugin.

Key object: `load`. Every plugin gets a pluggy manager of its own, so a half-done registration
rolls back by being dropped and one raising hook can't end another's call. Invariant: `load`
returns a complete record or one with a reason and no rows; only ``KeyboardInterrupt`` passes
through. Layer: plugins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pkgutil import resolve_name
from typing import Any, Final, TypeVar

import pluggy

from nvdd_core.errors import PluginValidationError
from nvdd_core.plugins import hookspecs
from nvdd_core.plugins.foreign import error_text, surroundings_kept
from nvdd_core.plugins.hookspecs import API, MIN_API
from nvdd_core.plugins.known import suggestion
from nvdd_core.plugins.record import PluginRecord, PluginStatus, Provided
from nvdd_core.plugins.requirements import unmet
from nvdd_core.plugins.rows import AdapterDecl, ModelDecl, PluginInfo, SpecDecl
from nvdd_core.plugins.static_view import UNSTATED, read_static

# Presets that every plugin may name.
CORE_SPECS: Final = ("SPEC_MPNN_HALO", "SPEC_MPNN_GP", "SPEC_MPNN_WIDE")
_INFO_HOOK: Final = "nvdd_plugin_info"
_DECLARE_HOOKS: Final = ("nvdd_declare_specs", "nvdd_declare_models", "nvdd_declare_adapters")
_HOOKS: Final = (_INFO_HOOK, *_DECLARE_HOOKS)

MAX_ROWS: Final = 1000
"""Rows that one hook may declare; more is taken for a generator that doesn't end."""

Row = TypeVar("Row", ModelDecl, SpecDecl, AdapterDecl)


def load(record: PluginRecord, *, import_heavy: bool = True) -> PluginRecord:
    """Load the plugin of a record that passed `discovery.examine`.

    Parameters
    ----------
    record
        An ``ok`` record that isn't loaded; any other is returned as it is.
    import_heavy
        Whether to import a module that isn't light. Listing says no and gets the record back
        with `heavy` filled in.

    Returns
    -------
    PluginRecord
        The record with its new state.
    """
    if record.loaded or record.status is not PluginStatus.OK:
        return record
    notes: list[str] = []
    try:
        with surroundings_kept() as notes:
            loaded = _load(record, import_heavy)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code raises what it likes, not only an Exception
        loaded = replace(
            record,
            status=PluginStatus.BROKEN,
            reason=_reason(record, error),
            error=error,
            traceback=_format(error),
        )
    return replace(loaded, notes=(*loaded.notes, *(f"while it was loaded it {note}" for note in notes)))


def _load(record: PluginRecord, import_heavy: bool) -> PluginRecord:
    plugin = record.entry.plugin
    if plugin is None:
        view = read_static(record.entry.value.partition(":")[0].strip())
        if view.api is not UNSTATED and (mismatch := api_mismatch(view.api)):
            return replace(record, status=PluginStatus.INCOMPATIBLE, reason=mismatch)
        record = replace(record, heavy=view.heavy)
        if view.heavy and not import_heavy:
            return record
        plugin = _import(record.entry.value)
    hooks = _register(plugin, record.name)
    info = _info(hooks)
    mismatch = api_mismatch(None if info is None else info.api)
    if mismatch:
        return replace(record, status=PluginStatus.INCOMPATIBLE, reason=mismatch, info=info)
    record = replace(
        record,
        loaded=True,
        info=info,
        specs=_rows(record, hooks, "nvdd_declare_specs", SpecDecl),
        models=_rows(record, hooks, "nvdd_declare_models", ModelDecl),
        adapters=_rows(record, hooks, "nvdd_declare_adapters", AdapterDecl),
    )
    _check_names(record)
    return _check_available(record)


def api_mismatch(api: object) -> str:
    """Check the contract's version that a plugin states against the window (gate 2).

    Parameters
    ----------
    api
        Whatever the plugin stated.

    Returns
    -------
    str
        The reason why it doesn't fit; empty when it fits.
    """
    window = f"{MIN_API}" if MIN_API == API else f"{MIN_API} to {API}"
    if api is None:
        return f"it states no api; this core accepts api {window}: return PluginInfo(api={API}, ...)"
    # bool is an int to Python, and True would pass for 1.
    if isinstance(api, bool) or not isinstance(api, int):
        return f"it states api={api!r}; this core accepts an integer, api {window}"
    if MIN_API <= api <= API:
        return ""
    way_out = "a newer release of the plugin" if api < MIN_API else "a newer nvdd-core"
    return f"it states api={api}; this core accepts api {window}: install {way_out}"


def _import(value: str) -> object:
    """Import an entry point's value, ``module`` or ``module:object``; extras in brackets are ignored."""
    target = value.partition("[")[0].strip()
    module, colon, attribute = (part.strip() for part in target.partition(":"))
    return resolve_name(f"{module}:{attribute}") if colon else import_module(module)


def _register(plugin: object, name: str) -> Mapping[str, pluggy.HookCaller]:
    """Register the plugin with a fresh pluggy manager and return its hooks by name."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    hooks = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
    for hook, caller in hooks.items():
        optional = any(impl.optionalhook for impl in caller.get_hookimpls())
        if not caller.has_spec() and not optional:
            raise PluginValidationError(f"unknown hook '{hook}'{suggestion(hook, _HOOKS)}")
    for hook in _HOOKS:
        if hook not in hooks and hook in dir(plugin):
            raise PluginValidationError(f"'{hook}' is there but not marked: put @hookimpl above it")
    return hooks


def _info(hooks: Mapping[str, pluggy.HookCaller]) -> PluginInfo | None:
    caller = hooks.get(_INFO_HOOK)
    info: object = None if caller is None else caller()
    if info is not None and not isinstance(info, PluginInfo):
        raise PluginValidationError(f"{_INFO_HOOK} must return a PluginInfo, found {info!r}")
    return info


def _rows(
    record: PluginRecord, hooks: Mapping[str, pluggy.HookCaller], hook: str, kind: type[Row]
) -> tuple[Provided[Row], ...]:
    """Call one hook and check what it declared; generators run to their end here, inside the guard."""
    caller = hooks.get(hook)
    if caller is None:
        return ()
    rows: list[Provided[Row]] = []
    for result in caller():
        declared: object = (result,) if isinstance(result, kind) else result
        if not isinstance(declared, Iterable):
            raise PluginValidationError(f"{hook} must yield {kind.__name__} rows, found {result!r}")
        for row in islice(declared, MAX_ROWS + 1 - len(rows)):
            if not isinstance(row, kind):
                raise PluginValidationError(
                    f"{hook}: row {len(rows)} must be a {kind.__name__}, found {row!r}"
                )
            rows.append(_provided(row, record))
    if len(rows) > MAX_ROWS:
        raise PluginValidationError(f"{hook} declares more than {MAX_ROWS} rows; does its generator end?")
    counts = Counter(row.decl.name for row in rows)
    if twice := sorted(name for name, n in counts.items() if n > 1):
        raise PluginValidationError(f"{hook} declares {', '.join(twice)} more than once")
    return tuple(rows)


def _provided(row: Row, record: PluginRecord) -> Provided[Row]:
    """Attribute a row to its plugin and judge whether what it needs is installed."""
    missing = None if isinstance(row, SpecDecl) else unmet(row.requires)
    status = PluginStatus.UNAVAILABLE if missing else PluginStatus.OK
    return Provided(row, record.name, record.entry.distribution, status, missing or "")


def _check_names(record: PluginRecord) -> None:
    """Check names that refer to other rows, or to the plugin itself."""
    own = {row.decl.name: None for row in record.specs}
    for model in record.models:
        spec = model.decl.spec
        if spec is not None and spec not in own and spec not in CORE_SPECS:
            raise PluginValidationError(
                f"model '{model.decl.name}' names the spec '{spec}', which neither the plugin nor the "
                f"core declares{suggestion(spec, [*own, *CORE_SPECS])}"
            )
    for adapter in record.adapters:
        prefix = adapter.decl.name.partition("/")[0]
        if prefix != record.name:
            raise PluginValidationError(
                f"adapter '{adapter.decl.name}' must be qualified by the plugin's own name: "
                f"'{record.name}/{adapter.decl.name.partition('/')[2]}'"
            )


def _check_available(record: PluginRecord) -> PluginRecord:
    """Mark a plugin unavailable when it needs something missing, or when each of its models does."""
    missing = unmet(record.info.requires) if record.info is not None else None
    lost = [model for model in record.models if model.status is PluginStatus.UNAVAILABLE]
    if missing is None and lost and len(lost) == len(record.models):
        missing = lost[0].reason
    if missing is None:
        return record
    state: dict[str, Any] = {"status": PluginStatus.UNAVAILABLE, "reason": missing}
    models = tuple(row if row.reason else replace(row, **state) for row in record.models)
    adapters = tuple(row if row.reason else replace(row, **state) for row in record.adapters)
    return replace(record, models=models, adapters=adapters, **state)


def _reason(record: PluginRecord, error: BaseException) -> str:
    """Say in one line why loading failed."""
    entry = record.entry
    module = entry.value.partition(":")[0].strip()
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"stale entry point: module '{error.name}' can't be found, although {entry.distribution} "
            f"{entry.version} is listed as installed; reinstall it or pip uninstall {entry.distribution}"
        )
    if isinstance(error, PluginValidationError | pluggy.PluginValidationError):
        return error_text(error)
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format(error: BaseException) -> str:
    """Format the traceback, here and now, without the frames of this module."""
    import traceback  # only for the rare failure

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
