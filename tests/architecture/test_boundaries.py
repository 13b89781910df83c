"""Who may touch what: collectives in ``comm``, foreign objects in ``adapters``, public names in plugins."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import _sources
from tests.architecture._sources import Source, dotted, imported, resolve

# The launcher starts processes and sends no tensor; only the command line uses it.
LAUNCHER = ("torch.distributed.launcher", "torch.distributed.elastic", "torch.distributed.run")
# Attributes that are settings, meant to be assigned to.
SETTINGS = (
    "warp.config",
    "torch.backends",
    "matplotlib.rcParams",
    "click.Context.default_map",
    *("sys.stdin", "sys.stdout", "sys.stderr"),  # None where the process was started without
    "sys.path",  # put back after a plugin's import
)
FOREIGN = (
    "torch",
    "numpy",
    "ase",
    "warp",
    "vesin",
    "pluggy",
    "rich",
    "click",
    "e3nn",
    "mace",
    "nvalchemiops",
)
OWN = ("nvdd_", "tests")
HEAVY = {"torch", "numpy", "ase", "warp", "vesin", "matplotlib", "pydantic"}


# -- torch.distributed --


def distributed_uses(source: Source) -> Iterator[str]:
    """Find every use of torch.distributed: imports, attributes and names in strings handed to an importer."""
    names = imported(source.tree)
    for node in ast.walk(source.tree):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            full = resolve(dotted(node), names)
            used = (
                [full] if full.startswith("torch.distributed.") and dotted(node).startswith("torch.") else []
            )
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            used = [
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
        for name in used:
            if name == "torch.distributed" or name.startswith("torch.distributed."):
                yield source.at(node, name)


def _may_launch(source: Source, finding: str) -> bool:
    return source.name.startswith("nvdd_core/cli/") and finding.rpartition(": ")[2].startswith(LAUNCHER)


def test_only_comm_uses_torch_distributed() -> None:
    found = [
        finding
        for source in _sources.core() + _sources.plugins()
        if not source.name.startswith("nvdd_core/comm/")
        for finding in distributed_uses(source)
        if not _may_launch(source, finding)
    ]
    assert not found, "\n".join(["use nvdd_core.comm instead of torch.distributed:", *found])


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.all_reduce(x)",
        "import importlib\nimportlib.import_module('torch.distributed.nn')",
        "def f():\n    import torch.distributed.nn.functional as F",
    ],
)
def test_distributed_rule_finds(text: str) -> None:
    assert list(distributed_uses(_sources.sample(text)))


def test_distributed_rule_lets_pass() -> None:
    assert not list(distributed_uses(_sources.sample("import torch\ntorch.distributions.Normal(0, 1)\n")))


# -- foreign objects --


def injections(source: Source) -> Iterator[str]:
    """Find attributes set on, or deleted from, objects that are not the file's own.

    That is: ``setattr`` and ``delattr`` on anything but ``self`` or ``cls``; assignment to an attribute of an
    imported module or class; assignment to an attribute of a parameter annotated with a foreign class.
    """
    names = {name: full for name, full in imported(source.tree).items() if not full.startswith(OWN)}
    yield from _set_by_call(source)
    yield from _set_on(source, source.tree, names)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            foreign = {a.arg: _foreign(a.annotation, names) for a in arguments if a.annotation is not None}
            yield from _set_on(source, node, {name: kind for name, kind in foreign.items() if kind})


def _foreign(annotation: ast.expr, names: dict[str, str]) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    kind = resolve(dotted(annotation), names)
    return kind if kind.startswith(tuple(f"{name}." for name in FOREIGN)) and "Tensor" not in kind else ""


def _set_by_call(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = dotted(node.func)
        target = dotted(node.args[0])
        if name in {"setattr", "delattr"} and target not in {"self", "cls"}:
            yield source.at(node, f"{name} on {target or 'an object'}")
        if name in {"object.__setattr__", "object.__delattr__", "type.__setattr__"} and target != "self":
            yield source.at(node, f"{name} on {target or 'an object'}")


def _set_on(source: Source, scope: ast.AST, names: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(scope):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if not isinstance(part, ast.Attribute) or isinstance(part.ctx, ast.Load):
                    continue
                full = resolve(dotted(part), names)
                if full and not full.startswith(SETTINGS):
                    yield source.at(part, f"sets {dotted(part)} ({full})")


def test_only_adapters_change_foreign_objects() -> None:
    found = [
        finding
        for source in _sources.core() + _sources.plugins()
        if "/adapters/" not in source.name and not source.name.endswith("/adapters.py")
        for finding in injections(source)
    ]
    assert not found, "\n".join(["changes to foreign objects belong into adapters:", *sorted(set(found))])


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.Tensor.mine = 1",
        "import torch\nsetattr(torch.Tensor, 'mine', 1)",
        "from mace.modules import blocks\nblocks.Interaction.forward = f",
        "import torch\ndef f(model: torch.nn.Module): model.mine = 1",
        "from torch import nn\ndef f(model: 'nn.Module'):\n    del model.mine",
        "import ase\na, ase.x = 1, 2",
        "object.__setattr__(other, 'x', 1)",
        "def f(x): setattr(x, 'y', 1)",
    ],
)
def test_injection_rule_finds(text: str) -> None:
    assert list(injections(_sources.sample(text)))


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self): self.x = 1",
        "class A:\n    def f(self): object.__setattr__(self, 'x', 1)",
        "import warp\nwarp.config.quiet = True",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False",
        "from nvdd_core.runtime import Batch\nbatch = Batch()\nbatch.cell = 1",
        "import numpy\nx = numpy.zeros(3)\nx[0] = 1",
    ],
)
def test_injection_rule_lets_pass(text: str) -> None:
    assert not list(injections(_sources.sample(text)))


# -- plugins --


def private_imports(source: Source) -> Iterator[str]:
    """Find imports of the core's private modules and names."""
    for node in ast.walk(source.tree):
        full: list[str] = []
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in full:
            if name.startswith("nvdd_core") and any(part.startswith("_") for part in name.split(".")):
                yield source.at(node, name)


def test_plugins_use_public_names_of_the_core() -> None:
    found = [finding for source in _sources.plugins() for finding in private_imports(source)]
    assert not found, "\n".join(found)
    assert list(private_imports(_sources.sample("from nvdd_core.comm._x import y")))


def test_plugin_entry_modules_are_light() -> None:
    allowed = sys.stdlib_module_names | {"nvdd_core"}
    found = []
    for plugin in _sources.PLUGINS:
        for path in (plugin / "src").rglob("_plugin.py"):
            source = Source(path, path.read_text(encoding="utf-8"))
            for name in imported(source.tree).values():
                top = name.partition(".")[0]
                core_but_heavy = top == "nvdd_core" and not name.startswith(
                    ("nvdd_core.plugins", "nvdd_core.errors")
                )
                if top not in allowed or core_but_heavy:
                    found.append(f"{source.name}: {name}")
    assert not found, "\n".join(
        ["a plugin's entry module imports the standard library and nvdd_core.plugins:", *found]
    )


@pytest.mark.parametrize(
    "module", ["nvdd_core", "nvdd_core.errors", "nvdd_core.plugins", "nvdd_core.cli.main"]
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_layers_of_this_file_exist() -> None:
    assert (_sources.CORE / "comm").is_dir()
    assert Path(_sources.ROOT, "plugins", "nvdd_lj") in _sources.PLUGINS
