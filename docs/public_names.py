"""The public names of the core, and the reference pages that are made from them.

A package below ``nvdd_core`` is public when it has an ``__all__``; `errors` and other modules that the package
itself takes names from are public as well. A name that several packages offer is described once, where it is
defined, and the others point there. Nothing here lists a name, so new ones appear by themselves.

Invariant: every name of every public package, and every name of ``nvdd_core`` itself, is on exactly one page.
Layer: none (part of the documentation's build).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import nvdd_core

PRIVATE = frozenset({"cli"})  # its commands are described by their help texts


def packages() -> dict[str, ModuleType]:
    """Return the public packages by name, in alphabetical order."""
    found = {info.name for info in pkgutil.iter_modules(nvdd_core.__path__)} - PRIVATE
    lazy = set(nvdd_core.LAZY_NAMES.values())
    modules = {f"nvdd_core.{name}": importlib.import_module(f"nvdd_core.{name}") for name in sorted(found)}
    return {name: module for name, module in modules.items() if hasattr(module, "__all__") or name in lazy}


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: its ``__all__``, or what it defines without an underscore."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = vars(module).items()
    return sorted(n for n, v in own if not n.startswith("_") and _defined_in(v) == module.__name__)


def homes() -> dict[str, dict[str, str]]:
    """Return for each package its names, and for each name the package whose page describes it."""
    modules = packages()
    offered = {package: names_of(module) for package, module in modules.items()}
    table: dict[str, dict[str, str]] = {}
    for package, names in offered.items():
        table[package] = {}
        for name in names:
            value = getattr(modules[package], name)
            rivals = [p for p in offered if name in offered[p] and getattr(modules[p], name) is value]
            defined = [p for p in rivals if f"{_defined_in(value)}.".startswith(f"{p}.")]
            table[package][name] = (defined or rivals)[0]
    return table


def page(package: str, names: dict[str, str]) -> str:
    """Return the reference page of a package as reStructuredText."""
    module = packages()[package]
    parts = [f"{package}\n{'=' * len(package)}", f".. automodule:: {package}\n   :no-members:"]
    for name, home in names.items():
        if home == package:
            parts.append(_directive(package, name, getattr(module, name)))
    elsewhere = [f"- :py:obj:`{name} <{home}.{name}>`" for name, home in names.items() if home != package]
    if elsewhere:
        parts.append("Offered here too, described where they are defined:\n\n" + "\n".join(elsewhere))
    return "\n\n".join(parts) + "\n"


def front_page(table: dict[str, dict[str, str]]) -> str:
    """Return the page of the names that ``nvdd_core`` itself offers."""
    parts = ["nvdd_core\n=========", ".. automodule:: nvdd_core\n   :no-members:"]
    rows = [
        f"   * - :py:obj:`~{table[package].get(name, package)}.{name}`\n     - ``{package}``"
        for name, package in sorted(nvdd_core.LAZY_NAMES.items())
    ]
    head = ".. list-table::\n   :header-rows: 1\n\n   * - name\n     - package"
    parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts) + "\n"


def reference_pages() -> dict[str, str]:
    """Return the text of every reference page by its name."""
    table = homes()
    return {"nvdd_core": front_page(table)} | {p: page(p, names) for p, names in table.items()}


def _defined_in(value: Any) -> str:
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else ""


def _directive(package: str, name: str, value: Any) -> str:
    full = f"{package}.{name}"
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f".. {kind}:: {full}\n   :members:\n   :show-inheritance:"
    if inspect.isroutine(value):
        return f".. autofunction:: {full}"
    return f".. autodata:: {full}\n   :no-value:"
