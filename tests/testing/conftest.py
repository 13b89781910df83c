"""Plugins that are nothing but files in a temporary folder, seen by this process and by those that it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvdd_core.plugins import PluginManager
from nvdd_core.testing import close_pools
from tests.plugins._fake import Fakes


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """An empty folder of plugins, first on the path; `install` below writes into it."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("NVDD_PLUGINS", "NVDD_DISABLE_PLUGINS", "NVDD_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    fakes = Fakes(tmp_path)
    yield fakes
    for module in [m for m in sys.modules if m.partition(".")[0].startswith("kit_")]:
        del sys.modules[module]


@pytest.fixture(scope="module", autouse=True)
def _no_ranks_left() -> Iterator[None]:
    yield
    close_pools()


GOOD = """
from nvdd_core.plugins import AdapterDecl, ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl

@hookimpl
def nvdd_plugin_info():
    return PluginInfo(api=1, title="a toy")

@hookimpl
def nvdd_declare_specs():
    yield SpecDecl("SPEC_KIT_HALO", Ref("nvdd_core.runtime:SPEC_MPNN_HALO"))

@hookimpl
def nvdd_declare_models():
    yield ModelDecl("kit", Ref("tests.testing.toys:load"), spec="SPEC_KIT_HALO")

@hookimpl
def nvdd_declare_adapters():
    yield AdapterDecl("kit/answer", "python", "tests.testing.foreign:VALUE", Ref("kit_good.adapter:ADAPTER"))
"""
ADAPTER = """
from nvdd_core.adapters import PythonAdapter

ADAPTER = PythonAdapter("tests.testing.foreign", "VALUE", "tests.testing.foreign:louder")
"""


def install(
    fakes: Fakes,
    text: str = GOOD,
    *,
    requires: tuple[str, ...] = ("nvdd-core>=0.1,<0.2",),
    typed: bool = True,
    dist: str = "kit-good",
) -> PluginManager:
    """Write the plugin ``kit`` as a package and return a manager that sees it."""
    site = fakes.add("kit", None, dist=dist, requires=requires, value="kit_good._plugin", module="kit_good")
    package = site / "kit_good"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "_plugin.py").write_text(text)
    (package / "adapter.py").write_text(ADAPTER)
    if typed:
        (package / "py.typed").write_text("")
    return PluginManager()
