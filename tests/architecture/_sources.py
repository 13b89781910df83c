"""The project's source files, parsed once, for the tests of the house rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "nvdd_core"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Plugins that `make` keeps out of the environment that all others share
APART = [
    ROOT / "plugins" / f"nvdd_{name}"
    for line in re.findall(r"^APART :=(.*)$", _MAKEFILE, flags=re.MULTILINE)
    for name in line.split()
]


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The path from the checkout's root."""
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, filename=self.name)

    def at(self, node: ast.AST, what: str) -> str:
        """Say what was found where."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


def _read(paths: Iterator[Path]) -> list[Source]:
    return [Source(path, path.read_text(encoding="utf-8")) for path in sorted(paths)]


def core() -> list[Source]:
    """Return every file of the core."""
    return _read(CORE.rglob("*.py"))


def layer(name: str) -> list[Source]:
    """Return every file of one layer of the core."""
    single = CORE / f"{name}.py"
    return _read(iter([single])) if single.exists() else _read((CORE / name).rglob("*.py"))


def plugins() -> list[Source]:
    """Return every file of every plugin, without tests."""
    return [source for plugin in PLUGINS for source in _read((plugin / "src").rglob("*.py"))]


def scripts() -> list[Source]:
    """Return the benchmarks and examples."""
    return _read((ROOT / "benchmarks").rglob("*.py")) + _read((ROOT / "examples").rglob("*.py"))


def sample(text: str) -> Source:
    """Make a source of a few lines, to test a rule on."""
    return Source(Path("sample.py"), text)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a chain of names, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """Map every name bound by an import, anywhere in the file, to what it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                names[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def resolve(name: str, names: dict[str, str]) -> str:
    """Return what a dotted name stands for, given the file's imports; empty when it is not imported."""
    first, _, rest = name.partition(".")
    if first not in names:
        return ""
    return f"{names[first]}.{rest}" if rest else names[first]
