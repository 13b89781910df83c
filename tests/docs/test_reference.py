"""The built documentation: without warnings, and with every public name in its reference."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nvdd_core

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")


def public_objects() -> Iterator[tuple[str, str]]:
    """Every public name as (module that offers it, name); found without the documentation's own code."""
    for name, module in nvdd_core.LAZY_NAMES.items():
        yield module, name
    for info in pkgutil.iter_modules(nvdd_core.__path__):
        module = importlib.import_module(f"nvdd_core.{info.name}")
        for name in getattr(module, "__all__", ()):
            yield module.__name__, name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` builds it, with warnings as errors."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.load((site / "objects.inv").open("rb"), "", os.path.join)
    described = {name for kind, names in found.items() if kind.startswith("py:") for name in names}
    identities = {id(_resolve(name)) for name in described if _resolve(name) is not None}
    missing = []
    for module, name in public_objects():
        # A name that two packages offer is described under one of them.
        if f"{module}.{name}" not in described and id(_resolve(f"{module}.{name}")) not in identities:
            missing.append(f"{module}.{name}")
    assert not missing


def _resolve(dotted: str) -> object:
    try:
        return pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError, ValueError):
        return None


def test_pages_link_to_pages(site: Path) -> None:
    """No link of a built page ends in .md: a file outside docs that is linked has a page of its own."""
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert '.md"' not in text.replace("_sources/", ""), page.name
