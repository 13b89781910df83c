"""Fixture P of the cases: plugins that are nothing but files in a temporary folder."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMPORTS = "from nvdd_core.plugins import AdapterDecl, ModelDecl, PluginInfo, Ref, SpecDecl, hookimpl\n"
INFO = """
@hookimpl
def nvdd_plugin_info():
    return PluginInfo(api={api})
"""
MODEL = """
@hookimpl
def nvdd_declare_models():
    yield ModelDecl("{model}", Ref("fractions:Fraction"))
"""
CLI = "import sys; from nvdd_core.cli.main import main; sys.exit(main())"


def good(model: str, api: object = 1) -> str:
    """The text of a light module that declares one model."""
    return IMPORTS + INFO.format(api=api) + MODEL.format(model=model)


# The five ways of O-44; the last has its module deleted.
BROKEN = {
    "importerror": "raise ImportError('boom')",
    "systemexit": "raise SystemExit(3)",
    "syntaxerror": "def (:",
    "noattribute": IMPORTS + "x = 1",
    "stale": None,
}


@dataclass
class Fakes:
    """Builds fake plugins and runs Python with them installed."""

    root: Path
    names: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        text: str | None,
        *,
        dist: str | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        value: str | None = None,
        module: str | None = None,
        where: str = "site",
        kind: str = "dist-info",
    ) -> Path:
        """Write metadata and module; with `text` None the metadata alone. Returns the folder."""
        folder = self.root / where
        dist, module = dist or f"fake-{name}", module or f"fake_{name}"
        info = folder / f"{dist.replace('-', '_')}-{version}.{kind}"
        info.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text("\n".join(lines) + "\n")
        points = info / "entry_points.txt"
        if not points.exists():
            points.write_text("[nvdd.plugins]\n")
        with points.open("a") as file:
            file.write(f"{name} = {value or module}\n")
        if text is not None:
            (folder / f"{module}.py").write_text(textwrap.dedent(text))
        self.names.append(module)
        return folder

    def add_broken(self) -> None:
        """Add the five broken plugins of O-44."""
        for name, text in BROKEN.items():
            self.add(name, text, value="fake_noattribute:absent" if name == "noattribute" else None)

    def env(self, *folders: str, **extra: str) -> dict[str, str]:
        """The environment in which these plugins are installed."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("NVDD_")}
        env["PYTHONPATH"] = os.pathsep.join(str(self.root / folder) for folder in folders or ("site",))
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        return env | extra

    def python(
        self, code: str, *args: str, flags: tuple[str, ...] = (), **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with these plugins installed."""
        return subprocess.run(
            [sys.executable, *flags, "-c", code, *args],
            env=self.env(**extra),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def nvdd(self, *args: str, flags: tuple[str, ...] = (), **extra: str) -> subprocess.CompletedProcess[str]:
        """Run the command line with these plugins installed."""
        return self.python(CLI, *args, flags=flags, **extra)

    def listing(self, *args: str, **extra: str) -> dict[str, dict[str, Any]]:
        """Run a command with ``--json`` and return its plugins by name."""
        done = self.nvdd("plugins", *args, "--json", **extra)
        assert done.stdout, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["plugins"]}


def processor_time() -> float:
    """Seconds of processor time that child processes have used; unlike the clock it doesn't see other jobs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
