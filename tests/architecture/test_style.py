"""House style that no linter checks: sizes, docstrings, layers, leftovers, exported names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator

import pytest

from tests.architecture import _sources
from tests.architecture._sources import CORE, Source

MAX_FILE = 600
MAX_FUNCTION = 80
_Def = ast.FunctionDef | ast.AsyncFunctionDef
_LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

SHIPPED = _sources.core() + _sources.plugins()
ALL = SHIPPED + _sources.scripts()


def asserts(source: Source) -> Iterator[str]:
    """Find assert statements; ``python -O`` drops them, so a check must raise an error of ours."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield source.at(node, "assert")


def too_large(source: Source) -> Iterator[str]:
    """Find files and functions (docstrings not counted) that are longer than a reader can hold."""
    lines = source.text.count("\n")
    if lines > MAX_FILE:
        yield f"{source.name}: {lines} lines, at most {MAX_FILE}"
    for node in ast.walk(source.tree):
        if isinstance(node, _Def):
            length = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) else 0)
            if length > MAX_FUNCTION:
                yield source.at(node, f"{node.name} has {length} lines, at most {MAX_FUNCTION}")


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def undocumented(source: Source) -> Iterator[str]:
    """Find the module, public classes, functions and methods without a docstring."""
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield f"{source.name}: the module"
    yield from _undocumented(source, source.tree, "")


def _undocumented(source: Source, scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in scope.body:
        if not isinstance(node, _Def | ast.ClassDef) or node.name.startswith("_"):
            continue
        overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
        if ast.get_docstring(node) is None and not overload:
            yield source.at(node, f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(source, node, f"{prefix}{node.name}.")


def leftovers(source: Source) -> Iterator[str]:
    """Find notes to oneself and stubs."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if _LEFTOVER.search(line):
            yield f"{source.name}:{number}: {line.strip()}"
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Raise)
            and node.exc is not None
            and "NotImplementedError" in ast.dump(node.exc)
        ):
            yield source.at(node, "raises NotImplementedError")


def not_ascii(source: Source) -> Iterator[str]:
    """Find lines that are not plain ASCII."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield f"{source.name}:{number}: {line.strip()}"


def layer_of(source: Source) -> str:
    """Return the layer that a file of the core belongs to by its place."""
    parts = source.path.relative_to(CORE).parts
    return parts[0].removesuffix(".py")


def _report(rule: object, found: list[str]) -> str:
    return "\n".join([(rule.__doc__ or "").splitlines()[0], *found])


@pytest.mark.parametrize(
    ("rule", "sources"),
    [(asserts, ALL), (too_large, ALL), (undocumented, SHIPPED), (leftovers, ALL), (not_ascii, ALL)],
    ids=["asserts", "too_large", "undocumented", "leftovers", "not_ascii"],
)
def test_house_rule(rule, sources) -> None:  # type: ignore[no-untyped-def]
    found = [finding for source in sources for finding in rule(source)]
    assert not found, _report(rule, found)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (asserts, '"""M."""\nassert True'),
        (too_large, '"""M."""\n' + "x = 1\n" * 601),
        (too_large, '"""M."""\ndef f():\n' + "    x = 1\n" * 80),
        (undocumented, "x = 1"),
        (undocumented, '"""M."""\nclass A:\n    """A."""\n    def f(self): ...'),
        (leftovers, "# TODO later"),
        (leftovers, "def f(): raise NotImplementedError('x')"),
        (not_ascii, "x = '\N{ANGSTROM SIGN}'"),
    ],
)
def test_rule_finds(rule, text: str) -> None:  # type: ignore[no-untyped-def]
    assert len(list(rule(_sources.sample(text)))) == 1


def test_modules_name_their_layer() -> None:
    found = []
    for source in _sources.core():
        docstring = ast.get_docstring(source.tree) or ""
        if source.path == CORE / "__init__.py":
            continue
        if not re.search(rf"Layer: {layer_of(source)}\b", docstring):
            found.append(f"{source.name}: 'Layer: {layer_of(source)}.' is missing from the module docstring")
    assert not found, "\n".join(found)


def _modules() -> list[str]:
    names = []
    for root, sources in ((_sources.ROOT, _sources.core()), (None, _sources.plugins())):
        for source in sources:
            base = root or next(p for p in source.path.parents if p.name == "src")
            parts = source.path.relative_to(base).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("name", _modules())
def test_exported_names_exist(name: str) -> None:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; `make conform` tests it")
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert [n for n in exported if not hasattr(module, n)] == []
    assert len(set(exported)) == len(exported)
