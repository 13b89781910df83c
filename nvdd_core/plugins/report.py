"""What `nvdd plugins`, `nvdd models` and `nvdd adapters` say, as data (JSON, schema 1) and as plain ASCII text.

Key objects: `plugins_document`, `models_document`, `adapters_document` and the tables of their rows,
`plugin_page`, `header_line`. Invariant: within schema 1 no key is ever removed or changes its meaning; text
holds ASCII only, whatever a plugin's author wrote. Layer: plugins.
"""

from __future__ import annotations

import platform
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import nvdd_core
from nvdd_core.plugins.hookspecs import API, MIN_API
from nvdd_core.plugins.known import KNOWN_MODELS, RELEASED
from nvdd_core.plugins.manager import PluginManager
from nvdd_core.plugins.record import PluginRecord, PluginStatus, Provided
from nvdd_core.plugins.rows import AdapterDecl, ModelDecl, SpecDecl

SCHEMA: Final = 1
Json = dict[str, Any]


# -- data ------------------------------------------------------------------------------------


def core_block() -> Json:
    """Describe the running core."""
    return {
        "version": nvdd_core.__version__,
        "api": API,
        "min_api": MIN_API,
        "python": platform.python_version(),
        "location": str(Path(nvdd_core.__file__).parent),
    }


def plugin_row(record: PluginRecord) -> Json:
    """Describe one plugin."""
    entry, info = record.entry, record.info
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "target": entry.value,
        "status": record.status.value,
        "reason": detail(record),
        "loaded": record.loaded,
        "api": None if info is None else info.api,
        "title": None if info is None else info.title,
        "description": None if info is None else info.description,
        "homepage": None if info is None else info.homepage,
        "maturity": None if info is None else info.maturity,
        "location": entry.location,
        "editable": entry.editable,
        "notes": [*entry.notes, *record.notes],
        "models": [_model(row) for row in record.models],
        "specs": [_spec(row) for row in record.specs],
        "adapters": [_adapter(row) for row in record.adapters],
    }


def detail(record: PluginRecord) -> str:
    """Say in one line what there is to say of a plugin's state."""
    if record.reason:
        return record.reason
    if record.heavy and not record.loaded:
        return (
            f"not imported for listing: it imports {', '.join(record.heavy)}; a plugin's own module should "
            f"import only the standard library and nvdd_core.plugins"
        )
    lost = [row for row in record.rows if row.status is PluginStatus.UNAVAILABLE]
    return f"'{lost[0].decl.name}' is unavailable: {lost[0].reason}" if lost else ""


def _model(row: Provided[ModelDecl]) -> Json:
    decl = row.decl
    return {
        "name": decl.name,
        "status": row.status.value,
        "reason": row.reason,
        "maturity": decl.maturity,
        "spec": decl.spec,
        "target": decl.ref.target,
        "title": decl.title,
        "requires": list(decl.requires),
    }


def _spec(row: Provided[SpecDecl]) -> Json:
    return {"name": row.decl.name, "target": row.decl.ref.target, "title": row.decl.title}


def _adapter(row: Provided[AdapterDecl]) -> Json:
    decl = row.decl
    return {
        "name": decl.name,
        "kind": decl.kind,
        "status": row.status.value,
        "reason": row.reason,
        "maturity": decl.maturity,
        "target": decl.target,
        "ref": decl.ref.target,
        "title": decl.title,
        "requires": list(decl.requires),
    }


def plugins_document(manager: PluginManager, records: Iterable[PluginRecord]) -> Json:
    """Make the JSON document of ``nvdd plugins``."""
    return {
        "schema": SCHEMA,
        "core": core_block(),
        "digest": manager.digest(),
        "notes": list(manager.notes),
        "plugins": [plugin_row(record) for record in records],
    }


def models_document(manager: PluginManager) -> Json:
    """Make the JSON document of ``nvdd models``."""
    records = manager.records()
    versions = {record.key: record.entry.version for record in records}
    models = manager.models()
    names = {row.decl.name for row in models}
    return {
        "schema": SCHEMA,
        "core": core_block(),
        "models": [
            {
                **_model(row),
                "qualified": f"{row.plugin}/{row.decl.name}",
                "plugin": row.plugin,
                "distribution": row.distribution,
                "version": versions[(row.plugin, row.distribution)],
            }
            for row in models
        ],
        "not_installed": [
            {"name": name, "distribution": distribution, "released": distribution in RELEASED}
            for name, distribution in KNOWN_MODELS.items()
            if name not in names
        ],
        "notes": [*manager.notes, *_unread(records)],
    }


def adapter_row(record: PluginRecord, row: Provided[AdapterDecl]) -> Json:
    """Describe one adapter; what only a process that installs it can know is None."""
    return {
        **_adapter(row),
        "plugin": record.name,
        "distribution": record.entry.distribution,
        "version": record.entry.version,
        "runtime": None,
        "install_site": None,
        "error": None,
        "statuses": [],
    }


def adapters_document(manager: PluginManager, plugins: Container[str] | None = None) -> Json:
    """Make the JSON document of ``nvdd adapters``.

    Parameters
    ----------
    manager
        Where the plugins are.
    plugins
        Names of the plugins whose adapters are wanted; default all.

    Returns
    -------
    dict
        Rows in the order of plugins and of declaration.
    """
    records = [r for r in manager.records() if plugins is None or r.name in plugins]
    return {
        "schema": SCHEMA,
        "core": core_block(),
        "adapters": [adapter_row(record, row) for record in records for row in record.adapters],
        "notes": [*manager.notes, *_unread(records)],
    }


def _unread(records: Iterable[PluginRecord]) -> list[str]:
    """Name the plugins whose models the list can't know."""
    lines: list[str] = []
    for record in records:
        if record.status.is_problem:
            lines.append(f"{record.describe()}; run 'nvdd plugins show {record.name}'")
        elif record.status is PluginStatus.OK and not record.loaded:
            lines.append(
                f"{record.entry.label} is left out, since it imports {', '.join(record.heavy)}; "
                f"run 'nvdd plugins show {record.name}'"
            )
    return lines


# -- text ------------------------------------------------------------------------------------


def ascii_text(text: str) -> str:
    """Return `text` with everything that isn't printable ASCII escaped, line breaks kept."""
    lines = text.encode("ascii", "backslashreplace").decode("ascii").split("\n")
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows in left-aligned columns two blanks apart, each on one line; the last column runs on."""
    cells = [list(header), *([ascii_text(" ".join(cell.split())) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def plugins_table(rows: Sequence[Json]) -> str:
    """Lay out the rows of `plugin_row` for a terminal."""
    if not rows:
        return "no plugins installed (group nvdd.plugins); try: pip install nvdd-lj"
    header = ("PLUGIN", "DISTRIBUTION", "STATUS", "MODELS", "ENTRY POINT", "DETAIL")
    cells = [
        (
            row["name"],
            f"{row['distribution']} {row['version']}",
            row["status"],
            ",".join(model["name"] for model in row["models"]),
            row["target"],
            row["reason"] or row["title"] or "",
        )
        for row in rows
    ]
    return table(header, cells)


def models_table(document: Json) -> str:
    """Lay out the rows of `models_document` for a terminal."""
    if not document["models"]:
        return "no models: no usable plugin declares one; see 'nvdd plugins'"
    header = ("MODEL", "PLUGIN", "STATUS", "MATURITY", "SPEC", "DETAIL")
    cells = [
        (
            row["name"],
            f"{row['plugin']} {row['version']}",
            row["status"],
            row["maturity"],
            row["spec"] or "",
            row["reason"] or row["title"],
        )
        for row in document["models"]
    ]
    return table(header, cells)


def adapters_table(rows: Sequence[Json]) -> str:
    """Lay out the rows of `adapters_document` for a terminal; what there is to say of one ends its line.

    Their ``status``, which says whether a declaration can be used, is headed DISCOVERY here, lest it be taken for
    what became of an adapter that was tried.
    """
    if not rows:
        return "no adapters: no usable plugin among those asked for declares one"
    header = ["ADAPTER", "PLUGIN", "KIND", "MATURITY", "DISCOVERY", "RUNTIME", "TARGET"]
    cells = [
        [
            row["name"],
            f"{row['plugin']} {row['version']}",
            row["kind"],
            row["maturity"] or "",
            row["status"],
            row["runtime"] or "",
            row["target"],
        ]
        for row in rows
    ]
    # Two more columns where there is something to say.
    for title, keys in (("INSTALL SITE", ("install_site",)), ("DETAIL", ("error", "reason"))):
        words = [next((row[key] for key in keys if row[key]), "") for row in rows]
        if any(words):
            header.append(title)
            for cell, word in zip(cells, words, strict=True):
                cell.append(word)
    return table(header, cells)


def plugin_page(record: PluginRecord) -> str:
    """Tell everything that is known of one plugin, its traceback included."""
    row = plugin_row(record)
    facts = {
        "plugin": row["name"],
        "distribution": f"{row['distribution']} {row['version']}"
        + (" (editable)" if row["editable"] else ""),
        "entry point": row["target"],
        "location": row["location"],
        "status": row["status"],
        "reason": row["reason"],
        "api": "" if row["api"] is None else f"{row['api']} (this core accepts {MIN_API} to {API})",
        "title": row["title"],
        "description": row["description"],
        "homepage": row["homepage"],
        "maturity": row["maturity"],
        "not light": ", ".join(record.heavy),
        "note": "; ".join(row["notes"]),
    }
    blocks = [_facts(facts)]
    for kind, keys in (
        ("models", ("name", "status", "maturity", "spec", "target", "reason")),
        ("specs", ("name", "target")),
        ("adapters", ("name", "kind", "status", "maturity", "target", "reason", "ref", "title")),
    ):
        if row[kind]:
            cells = [[str(item[key] or "") for key in keys] for item in row[kind]]
            blocks.append(table([kind[:-1].upper(), *(key.upper() for key in keys[1:])], cells))
    if record.traceback:
        blocks.append(ascii_text(record.traceback.rstrip()))
    return "\n\n".join(blocks)


def _facts(facts: Mapping[str, str | None]) -> str:
    known = {name: value for name, value in facts.items() if value}
    width = max(len(name) for name in known) + 1
    indent = "\n" + " " * (width + 1)  # else a line of a text could pass for a fact
    return "\n".join(
        f"{name + ':':<{width}} {indent.join(ascii_text(value).splitlines())}"
        for name, value in known.items()
    )


def header_line(manager: PluginManager) -> str:
    """Name core and plugins in one line, for the log of a run."""
    names = ", ".join(
        f"{record.name}-{record.entry.version}"
        for record in manager.records()
        if record.status is PluginStatus.OK
    )
    return ascii_text(
        f"nvdd {nvdd_core.__version__} (api {API}) plugins: {names or 'none'} digest {manager.digest()}"
    )
