"""What a new machine relies on: pins, requirements, the README's first commands, CI."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.architecture._sources import APART, PLUGINS, ROOT

PROJECTS = [ROOT, *PLUGINS]


def _project(folder: Any) -> dict[str, Any]:
    values: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return values


def _pins() -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    return pins


def _requirements(values: dict[str, Any], *, extras: bool) -> list[Requirement]:
    lines = list(values["project"]["dependencies"])
    if extras:
        lines += [
            line for group in values["project"].get("optional-dependencies", {}).values() for line in group
        ]
        lines += values["build-system"]["requires"]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_every_requirement_is_pinned_for_ci(folder: Any) -> None:
    pins = _pins()
    for requirement in _requirements(_project(folder), extras=True):
        name = canonicalize_name(requirement.name)
        if not name.startswith("nvdd-"):
            assert name in pins, f"{name} is missing from constraints.txt"
            assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_packages_do_not_pin_the_users_environment(folder: Any) -> None:
    for requirement in _requirements(_project(folder), extras=False):
        upper = [s for s in requirement.specifier if s.operator in {"<", "<=", "==", "===", "~="}]
        if not requirement.name.startswith("nvdd-"):
            assert not upper, f"{requirement}: an upper bound decides about the user's {requirement.name}"
        else:
            assert upper, f"{requirement}: a plugin says which core it works with, and which it has not seen"


def test_constraints_agree_with_the_installed_torch() -> None:
    import torch

    assert SpecifierSet(f"=={_pins()['torch']}").contains(torch.__version__)


def test_readme_begins_with_run_and_test() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    commands = [re.sub(r"\s*#.*", "", line) for line in lines if line and not line.startswith("#")]
    assert commands[:2] == ["make run", "make test"]


def test_ci_runs_lint_and_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^(exec )?make .*lint test", script.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("target", ["run", "test", "lint", "bench"])
def test_make_targets_can_be_planned(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_plugins_apart_are_plugins_whose_tests_are_run_by_conform() -> None:
    assert set(APART) < set(PLUGINS)
    for plugin in PLUGINS:
        name = plugin.name.removeprefix("nvdd_")
        plan = subprocess.run(
            ["make", "-n", "conform", f"PLUGIN={name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert f"nvdd_core.testing {name}" in plan.stdout
        assert (f"plugins/{plugin.name}/tests" in plan.stdout) == (plugin in APART)
    setup = subprocess.run(
        ["make", "-B", "-n", "setup"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    installed = [
        plugin for plugin in PLUGINS if f"--editable './plugins/{plugin.name}[test]'" in setup.stdout
    ]
    assert installed == [plugin for plugin in PLUGINS if plugin not in APART]


def test_mypy_and_contracts_cover_every_plugin() -> None:
    tools = _project(ROOT)["tool"]
    names = [plugin.name for plugin in PLUGINS]
    for name in names:
        assert f"plugins/{name}/src" in tools["mypy"]["files"]
        assert name in tools["importlinter"]["root_packages"]
    contract = next(
        c for c in tools["importlinter"]["contracts"] if c["name"] == "the core imports no plugin"
    )
    assert sorted(contract["forbidden_modules"]) == names
