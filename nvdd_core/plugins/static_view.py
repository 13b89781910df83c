"""Reads a plugin's light module as text, before it is imported.

Key object: `read_static`. Two things are learned: imports that a light module may not have
(listing stops there rather than importing torch for the sake of a table), and the ``api`` number
when it is written as a literal (a plugin of another contract is refused before its code runs).
Invariant: nothing is imported and nothing is executed. Layer: plugins.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from typing import Final

# What the core itself needs for listing is no burden when a plugin imports it too.
_LIGHT: Final = frozenset(
    {*sys.stdlib_module_names, "pluggy", "packaging", "importlib_metadata", "click", "typing_extensions"}
)
_LIGHT_CORE: Final = ("nvdd_core.plugins", "nvdd_core.errors")
_MAX_FILES: Final = 32  # own modules followed from a light module; more than a handful is unheard of
UNSTATED: Final = object()


@dataclass(frozen=True)
class StaticView:
    """What the text of a light module tells.

    Parameters
    ----------
    found
        Whether the module has a file or another loader.
    heavy
        Imports outside the standard library and ``nvdd_core.plugins``, as ``"torch (file.py:3)"``.
    api
        The literal given as ``PluginInfo(api=...)``, or `UNSTATED`.
    """

    found: bool
    heavy: tuple[str, ...] = ()
    api: object = UNSTATED


def read_static(module: str) -> StaticView:
    """Look at the module `module`, its parent packages and its own siblings that it imports.

    Parameters
    ----------
    module
        Dotted path of the light module.

    Returns
    -------
    StaticView
        What could be learned; text that can't be parsed is left to the import to complain about.
    """
    if module in sys.modules:
        return StaticView(found=True)
    specs = find_chain(module)
    if specs is None:
        return StaticView(found=False)
    heavy: list[str] = []
    seen: set[str] = set()
    for spec in specs:
        _scan(spec, heavy, seen)
    tree = _parse(specs[-1])
    return StaticView(found=True, heavy=tuple(heavy), api=UNSTATED if tree is None else _stated_api(tree))


def find_chain(module: str) -> list[ModuleSpec] | None:
    """Find the specs of a module and its parent packages; unlike ``find_spec`` it imports no parent."""
    chain: list[ModuleSpec] = []
    path: Sequence[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, path)
        if spec is None:
            return None
        chain.append(spec)
        # An empty list finds nothing, which is right for a plain module that has no submodules.
        path = list(spec.submodule_search_locations or ())
    return chain


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:
            continue  # a foreign finder in trouble is no reason to stop; the import will tell
        if spec is not None:
            return spec
    return None


def _parse(spec: ModuleSpec) -> ast.Module | None:
    loader = spec.loader
    if not isinstance(loader, InspectLoader):
        return None
    try:
        source = loader.get_source(spec.name)
        return None if source is None else ast.parse(source)
    except (SyntaxError, ValueError, ImportError, OSError, RecursionError):
        return None


def _scan(spec: ModuleSpec, heavy: list[str], seen: set[str]) -> None:
    """Collect heavy imports of one module, following imports of its own package."""
    if spec.name in seen or len(seen) >= _MAX_FILES:
        return
    seen.add(spec.name)
    tree = _parse(spec)
    if tree is None:
        return
    package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
    own = spec.name.partition(".")[0]
    file = os.path.basename(spec.origin or spec.name)
    for line, name in _imports(tree.body, package):
        top = name.partition(".")[0]
        if top == own:
            for part in find_chain(name) or ():
                _scan(part, heavy, seen)
        elif not _is_light(name) and _find(top, None) is not None:
            heavy.append(f"{top} ({file}:{line})")


def _is_light(name: str) -> bool:
    top = name.partition(".")[0]
    if top != "nvdd_core":
        return top in _LIGHT
    return name == top or any(name == core or name.startswith(f"{core}.") for core in _LIGHT_CORE)


def _imports(body: Sequence[ast.stmt], package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import that runs when the module is imported."""
    for node in body:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name
            case ast.ImportFrom():
                yield from ((node.lineno, name) for name in _from_names(node, package))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If() if _is_type_checking(node.test):
                yield from _imports(node.orelse, package)
            case _:
                yield from _imports(_nested(node), package)


def _nested(node: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside a compound statement (if, try, with, class, loops, match)."""
    inner: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            inner.append(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            inner.extend(child.body)
    return inner


def _from_names(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield what ``from x import a, b`` may import: x itself where it is foreign, x.a within packages."""
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        kept = parents[: len(parents) - node.level + 1]
        base = ".".join([*kept, base] if base else kept)
    own = base.partition(".")[0] == package.partition(".")[0]
    if own:
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif base == "nvdd_core":
        yield from (_core_name(alias.name) for alias in node.names)
    else:
        yield base


def _core_name(public: str) -> str:
    """Map a public name of ``nvdd_core`` to the module that defines it."""
    from nvdd_core import LAZY_NAMES

    return "nvdd_core" if public.startswith("__") else LAZY_NAMES.get(public, f"nvdd_core.{public}")


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


def _stated_api(tree: ast.Module) -> object:
    """Return the literal ``api`` of the only ``PluginInfo(...)`` call of the module."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "PluginInfo")
            or (isinstance(node.func, ast.Attribute) and node.func.attr == "PluginInfo")
        )
    ]
    if len(calls) != 1:
        return UNSTATED
    call = calls[0]
    given = [keyword.value for keyword in call.keywords if keyword.arg == "api"] or call.args[:1]
    if any(keyword.arg is None for keyword in call.keywords):  # **options may hold it
        return UNSTATED
    if not given:
        return None
    try:
        return ast.literal_eval(given[0])
    except (ValueError, TypeError, MemoryError, RecursionError):
        return UNSTATED
