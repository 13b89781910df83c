"""Sphinx settings: the Markdown pages of this folder, and a reference made from the docstrings.

Before a build two folders are written, which git ignores: ``reference/`` (`public_names`) and ``project/``, copies
of the Markdown files outside this folder to which the pages link. Layer: none (part of the documentation's build).
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import public_names  # noqa: E402

import nvdd_core  # noqa: E402 - the checkout's, whatever is installed

project = "nvdd"
author = "The nvdd developers"
copyright = author
version = release = nvdd_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"nvdd {release}"
html_static_path = ["_static"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_ivar = True  # attributes of a class are described once, by the class
napoleon_use_rtype = False
default_role = "py:obj"
# Words of a shape, such as n_owned in "Tensor, shape (n_owned, 3)", are looked up as if they were types.
suppress_warnings = ["ref.python"]

_READMES = ("plugins/*/README.md", "examples/*/README.md", "benchmarks/README.md")
_LINK = re.compile(r"(\[[^\]\n]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def outside_pages() -> dict[Path, Path]:
    """Return the Markdown files outside this folder that have pages, and where their copies are."""
    tops = {path: path.name.lower() for path in sorted(ROOT.glob("*.md"))}
    inner = {path: f"{path.parent.name.lower()}.md" for kind in _READMES for path in sorted(ROOT.glob(kind))}
    return {path: DOCS / "project" / name for path, name in (tops | inner).items()}


def relinked(text: str, origin: Path, place: Path) -> str:
    """Return Markdown of the file `origin` with its relative links as they read from `place`."""
    copies = outside_pages()

    def link(found: re.Match[str]) -> str:
        head, target, tail = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = (origin.parent / target).resolve()
        if file in copies or DOCS in file.parents:
            return f"{head}{os.path.relpath(copies.get(file, file), place.parent)}{tail}"
        return f"{head}{os.path.relpath(file, place.parent)})"  # a file to download; no page, no anchor

    return _LINK.sub(link, text)


def write_pages(app: Sphinx) -> None:
    """Write the folders ``reference`` and ``project``."""
    for folder in ("reference", "project"):
        shutil.rmtree(DOCS / folder, ignore_errors=True)
        (DOCS / folder).mkdir()
    for name, text in public_names.reference_pages().items():
        (DOCS / "reference" / f"{name}.rst").write_text(text, encoding="utf-8")
    for origin, place in outside_pages().items():
        text = relinked(origin.read_text(encoding="utf-8"), origin, place)
        place.write_text(text, encoding="utf-8")


def contents(index: str) -> str:
    """Return the tables of contents, made from the links of the index so that a forge shows none of it."""
    guides = [target.removesuffix(".md") for _, target, _ in _LINK.findall(index) if "/" not in target]
    reference = sorted(path.stem for path in (DOCS / "reference").iterdir())
    others = sorted(path.stem for path in (DOCS / "project").iterdir())
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(dict.fromkeys(entries)) + "\n```\n"
        for caption, entries in (
            ("Guides", guides),
            ("Reference", [f"reference/{name}" for name in reference]),
            ("Project", [f"project/{name}" for name in others]),
        )
    )


def prepare_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Point a page's links to files outside this folder at their copies; add the contents to the index."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md" and path.parent == DOCS:
        added = contents(source[0]) if docname == "index" else ""
        source[0] = relinked(source[0], path, path) + added


def literal_name(app: Sphinx, env: object, node: pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Show a name in single backticks that has no page of its own as code."""
    if node.get("reftype") != "obj" or node.get("refdomain") != "py":
        return None
    return nodes.literal(text=content.astext())


def tidy_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make a docstring fit for Sphinx.

    The star of a shape such as (n, *F) is kept from being read as the start of an emphasis, attributes that share an
    entry get one each, and a constant without a docstring doesn't get that of its type.
    """
    lines[:] = _one_attribute_an_entry(lines)
    if what == "data" and "\n".join(lines).strip() == inspect.cleandoc(type(obj).__doc__ or "").strip():
        lines.clear()
    for i, line in enumerate(lines):
        parts = line.split("``")  # every other part is a literal, where nothing needs escaping
        parts[::2] = [re.sub(r"(?<=, )\*(?=[A-Za-z]+[),])", r"\\*", part) for part in parts[::2]]
        lines[i] = "``".join(parts)


def _one_attribute_an_entry(lines: list[str]) -> list[str]:
    """Write ``a, b : int`` of an Attributes section as two entries, which napoleon does for parameters only."""
    if "Attributes" not in lines:
        return lines
    start = lines.index("Attributes") + 2
    out, names, kind, body = lines[:start], [], "", []
    for i, line in enumerate([*lines[start:], ""], start):
        section = i + 1 < len(lines) and lines[i + 1].startswith("---")
        if (line and not line[0].isspace()) or i == len(lines):
            for name in names:
                out += [f"{name} : {kind}" if kind else name, *body]
            if section or i == len(lines):
                return out + lines[i:]
            names, _, kind = line.partition(" : ")
            names, body = names.split(", "), []
        else:
            body.append(line)
    return out


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions of this file."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", prepare_source)
    app.connect("missing-reference", literal_name)
    app.connect("autodoc-process-docstring", tidy_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
