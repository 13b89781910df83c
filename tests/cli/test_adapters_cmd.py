"""`nvdd adapters`: what is declared, and what becomes of it in a scratch process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvdd_core.cli.main import main
from nvdd_core.plugins import PluginManager, use_manager
from tests.plugins._fake import CLI, IMPORTS, INFO, Fakes, good

# Foreign code, and the adapters of it; the plugins declare choices among them.
FOREIGN = """
class Block:
    def forward(self, x):
        return x + 1

def norm(x):
    return abs(x)

LIMIT = 5
"""
ADAPTERS = """
import os, signal, sys
import torch
import foreign_x
from nvdd_core.adapters import FunctionAdapter, MethodAdapter, ModuleHookAdapter, PythonAdapter
from nvdd_core.errors import SpecError
from nvdd_core.runtime import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.spec import DistributionSpec

print("noise")
os.write(1, b"noise")

def double(original, *args):
    return 2 * original(*args)

def hook(module, args):
    return args

FORWARD = MethodAdapter("foreign_x:Block", "forward", double, install_site="here:1")
NORM = FunctionAdapter("foreign_x:norm", double)
LIMIT = PythonAdapter("foreign_x", "LIMIT", 6)
AGAIN = PythonAdapter("foreign_x", "LIMIT", 7)
GONE = MethodAdapter("foreign_x:Block", "backward", double)
LOST = FunctionAdapter("foreign_x:absent", double)
HOOK = ModuleHookAdapter("inner", before=hook)
DEEPER = ModuleHookAdapter("inner.deeper", before=hook)
SEVERAL = (NORM, LIMIT)
NUMBER = 3

SPEC = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(third_party_helpers=(FORWARD, PythonAdapter("foreign_x", "LIMIT", 9)))
)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)

class Held:
    def __init__(self, module):
        self.module = module

class Declaring(Held):
    def distribution_spec(self, strategy):
        if strategy.value != "wide_halo":
            raise SpecError("not this one")
        return SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(third_party_helpers=(HOOK,)))

def load(*, dtype, device, held=True, crash=False, declares=False):
    if declares:
        return Declaring(Net())
    if crash:
        os.kill(os.getpid(), signal.SIGSEGV)
    if dtype != torch.float64 or device.type != "cpu":
        raise RuntimeError("not what was asked for")
    return Held(Net()) if held else Held(None)
"""
DECLARE = """
@hookimpl
def nvdd_declare_models():
    yield ModelDecl("{model}", Ref("adapters_x:load"), spec={spec!r})

@hookimpl
def nvdd_declare_specs():
    yield SpecDecl("SPEC_X", Ref("adapters_x:SPEC"))

@hookimpl
def nvdd_declare_adapters():
"""
KEYS = {
    "name", "kind", "status", "reason", "maturity", "target", "ref", "title", "requires",
    "plugin", "distribution", "version", "runtime", "install_site", "error", "statuses",
}  # fmt: skip


def plugin(name: str, *adapters: tuple[str, str, str], spec: str | None = None, extra: str = "") -> str:
    """The light module of a plugin with these adapters: (name, kind, target of the Ref)."""
    text = IMPORTS + INFO.format(api=1) + DECLARE.format(model=name, spec=spec)
    for adapter, kind, ref in adapters:
        needs = f", requires=({extra!r},)" if extra and adapter == "needy" else ""
        text += (
            f"    yield AdapterDecl('{name}/{adapter}', '{kind}', 'foreign {adapter}', Ref('{ref}'){needs})\n"
        )
    return text + "    return ()\n"


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    site = tmp_path / "site"
    site.mkdir()
    (site / "foreign_x.py").write_text(FOREIGN)
    (site / "adapters_x.py").write_text(ADAPTERS)
    return Fakes(tmp_path)


def nvdd(fakes: Fakes, *args: str) -> subprocess.CompletedProcess[str]:
    """Run ``nvdd adapters``; one that tries adapters starts processes that import torch, one after the other."""
    return subprocess.run(
        [sys.executable, "-c", CLI, "adapters", *args],
        env=fakes.env(OMP_NUM_THREADS="1"),
        cwd=fakes.root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def document(fakes: Fakes, *args: str, code: int = 0) -> dict[str, Any]:
    """What ``nvdd adapters ... --json`` says."""
    done = nvdd(fakes, *args, "--json")
    assert done.returncode == code, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    assert values["schema"] == 1
    assert values.keys() == {"schema", "core", "adapters", "notes"}
    for row in values["adapters"]:
        assert row.keys() == KEYS
    return values


def states(values: dict[str, Any]) -> dict[str, str | None]:
    return {row["name"]: row["runtime"] for row in values["adapters"]}


# -- listing --


def test_table(fakes: Fakes) -> None:
    fakes.add("x", plugin("x", ("fwd", "method", "adapters_x:FORWARD"), ("n", "function", "adapters_x:NORM")))
    fakes.add("y", plugin("y", ("needy", "python", "nowhere:A"), extra="nobody-has-this>=2"))
    fakes.add("bad", "raise ImportError('boom')")
    done = fakes.nvdd("adapters", NVDD_DISABLE_PLUGINS="lj")
    assert done.returncode == 0
    head, *rows = (line.split("  ") for line in done.stdout.splitlines())
    cells = [[cell.strip() for cell in row if cell] for row in (head, *rows)]
    assert cells == [
        ["ADAPTER", "PLUGIN", "KIND", "MATURITY", "DISCOVERY", "RUNTIME", "TARGET", "DETAIL"],
        ["x/fwd", "x 1.0", "method", "stable", "ok", "-", "foreign fwd", "-"],
        ["x/n", "x 1.0", "function", "stable", "ok", "-", "foreign n", "-"],
        ["y/needy", "y 1.0", "python", "stable", "unavailable", "-", "foreign needy", cells[3][-1]],
    ]
    assert cells[3][-1].startswith("needs nobody-has-this>=2, which is not installed")
    assert "note: plugin 'bad' (fake-bad 1.0) is broken: ImportError: boom" in done.stderr


def test_json_and_choices(fakes: Fakes) -> None:
    fakes.add("x", plugin("x", ("fwd", "method", "adapters_x:FORWARD")))
    fakes.add(
        "y",
        "print('noise')\n" + plugin("other", ("n", "function", "adapters_x:NORM")).replace("other/", "y/"),
    )
    fakes.add("bad", "raise ImportError('boom')")
    values = document(fakes)
    assert states(values) == {"x/fwd": None, "y/n": None}
    row = values["adapters"][0]
    assert (row["ref"], row["plugin"], row["distribution"], row["version"]) == (
        "adapters_x:FORWARD",
        "x",
        "fake-x",
        "1.0",
    )
    assert states(document(fakes, "--plugin", "y")) == {"y/n": None}
    for model in ("other", "y/other"):
        assert states(document(fakes, "--model", model)) == {"y/n": None}
    broken = document(fakes, "--plugin", "bad")
    assert broken["adapters"] == []
    assert "boom" in broken["notes"][-1]
    assert document(fakes, "--model", "bad")["adapters"] == []


def test_listing_imports_no_torch(fakes: Fakes) -> None:
    fakes.add("x", plugin("x", ("fwd", "method", "adapters_x:FORWARD")))
    code = (
        "import sys; from nvdd_core.cli.main import main; main(['adapters', '--model', 'x'])\n"
        "print('torch' in sys.modules, 'adapters_x' in sys.modules)"
    )
    assert fakes.python(code).stdout.splitlines()[-1] == "False False"


def test_no_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    with use_manager(PluginManager([])):
        assert main(["adapters"]) == 0
        assert capsys.readouterr().out.startswith("no adapters")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--plugin", "y"], "no plugin named 'y'"),
        (["--model", "y"], "no installed plugin provides the model 'y'"),
        (["--live", "y"], "no installed plugin provides the model 'y'"),
        (["--live", "bad"], "plugin 'bad' (fake-bad 1.0) is broken"),
        (["--live", "x", "--plugin", "x"], "exclude one another"),
        (["--option", "a=1"], "--live MODEL"),
        (["--live", "x", "--option", "a"], "KEY=VALUE"),
    ],
)
def test_refusals(fakes: Fakes, args: list[str], said: str) -> None:
    fakes.add("x", good("x"))
    fakes.add("bad", "raise ImportError('boom')")
    done = fakes.nvdd("adapters", *args, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_strict_lists_first(fakes: Fakes) -> None:
    fakes.add("bad", "raise ImportError('boom')")
    done = fakes.nvdd("adapters", NVDD_STRICT_PLUGINS="1")
    assert done.returncode == 2
    assert done.stdout.startswith("no adapters")


def test_show_tells_where_adapters_are(fakes: Fakes) -> None:
    fakes.add("x", plugin("x", ("fwd", "method", "adapters_x:FORWARD")))
    out = fakes.nvdd("plugins", "show", "x").stdout
    line = next(line for line in out.splitlines() if line.startswith("x/fwd"))
    assert line.split() == [
        "x/fwd",
        "method",
        "ok",
        "stable",
        "foreign",
        "fwd",
        "-",
        "adapters_x:FORWARD",
        "-",
    ]


# -- trying --


def test_live(fakes: Fakes) -> None:
    """Good ones, one that needs the model, several under one name, those of the spec, equal ones once."""
    fakes.add(
        "x",
        plugin(
            "x",
            ("fwd", "method", "adapters_x:FORWARD"),
            ("more", "python", "adapters_x:SEVERAL"),
            ("hook", "module", "adapters_x:HOOK"),
            ("needy", "python", "nowhere:A"),
            spec="SPEC_X",
            extra="nobody-has-this",
        ),
    )
    values = document(fakes, "--live", "x")
    assert states(values) == {
        "x/fwd": "restored",
        "x/more.0": "restored",
        "x/more.1": "restored",
        "x/hook": "restored",
        "x/needy": None,
        "x/SPEC_X.third_party_helpers.1": "restored",
    }
    rows = {row["name"]: row for row in values["adapters"]}
    assert rows["x/fwd"]["install_site"] == "here:1"
    assert rows["x/fwd"]["target"] == "foreign_x:Block.forward"
    assert [status["state"] for status in rows["x/fwd"]["statuses"]] == ["installed", "restored"]
    assert rows["x/fwd"]["statuses"][0]["plugin"] == "x"
    assert rows["x/SPEC_X.third_party_helpers.1"]["ref"] == "adapters_x:SPEC"
    assert "x/more.0 is declared as python, but it is an adapter of kind function" in values["notes"]
    # LIMIT is wanted twice: each works alone, but not both at once
    assert any(note.startswith("all adapters together: ") and "LIMIT" in note for note in values["notes"])


def test_one_failure_hides_no_other(fakes: Fakes) -> None:
    fakes.add(
        "x",
        plugin(
            "x",
            ("gone", "method", "adapters_x:GONE"),
            ("lost", "function", "adapters_x:LOST"),
            ("noref", "python", "adapters_x:NOTHING"),
            ("nomodule", "python", "no_such_module:A"),
            ("number", "python", "adapters_x:NUMBER"),
            ("fwd", "method", "adapters_x:FORWARD"),
            ("same", "method", "adapters_x:FORWARD"),
        ),
    )
    values = document(fakes, "--live", "x", code=1)
    assert states(values) == {
        "x/gone": "failed",
        "x/lost": "failed",
        "x/noref": "failed",
        "x/nomodule": "failed",
        "x/number": "failed",
        "x/fwd": "restored",
        "x/same": "restored",
    }
    errors = {row["name"]: row["error"] for row in values["adapters"]}
    assert "foreign_x:Block.backward" in errors["x/gone"]
    assert "foreign_x:absent" in errors["x/lost"]
    assert "AttributeError" in errors["x/noref"]
    assert "no_such_module" in errors["x/nomodule"]
    assert "adapters_x:NUMBER is no adapter of nvdd_core.adapters but 3" in errors["x/number"]
    assert errors["x/fwd"] is None
    done = nvdd(fakes, "--live", "x")
    assert done.returncode == 1
    assert "INSTALL SITE" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "nvdd: error: 5 of 7 adapters failed: x/gone, x/lost, x/noref, x/nomodule, x/number"
    )


def test_a_crash_stays_with_its_adapter(fakes: Fakes) -> None:
    """Importing, installing and restoring: whichever ends the process, the others get their turn."""
    site = fakes.root / "site"
    (site / "segfault_x.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (site / "exit_x.py").write_text("import os\nos._exit(0)\n")
    (site / "late_x.py").write_text(
        "import os\nfrom nvdd_core.adapters import PythonAdapter\n"
        "class Meta(type):\n    def __setattr__(cls, name, value): os.abort()\n"
        "class Touchy(metaclass=Meta):\n    limit = 1\n"
        "A = PythonAdapter(Touchy, 'limit', 2)\n"
    )
    fakes.add(
        "x",
        plugin(
            "x",
            ("hook", "module", "adapters_x:HOOK"),
            ("segfault", "python", "segfault_x:A"),
            ("exit", "python", "exit_x:A"),
            ("late", "python", "late_x:A"),
            ("norm", "function", "adapters_x:NORM"),
        ),
    )
    values = document(fakes, "--live", "x", code=1)
    assert {row["name"]: (row["runtime"], row["error"]) for row in values["adapters"]} == {
        "x/hook": ("restored", None),
        "x/segfault": ("failed", "it ended the process: signal SIGSEGV"),
        "x/exit": ("failed", "it ended the process: exit code 0"),
        "x/late": ("failed", "it ended the process: signal SIGABRT"),
        "x/norm": ("restored", None),
    }
    assert values["notes"] == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("held=false", "loading the model 'x': Held is no torch.nn.Module"),
        ("crash=true", "loading the model 'x' ended the process: signal SIGSEGV"),
        ("nonsense=1", "loading the model 'x': InputError: model 'x' has no option 'nonsense'"),
    ],
)
def test_a_model_that_cannot_be_loaded_leaves_its_adapters_pending(
    fakes: Fakes, option: str, said: str
) -> None:
    adapters = (("hook", "module", "adapters_x:HOOK"), ("fwd", "method", "adapters_x:FORWARD"))
    fakes.add("x", plugin("x", *adapters))
    values = document(fakes, "--live", "x", "--option", option)
    assert states(values) == {"x/hook": "pending", "x/fwd": "restored"}
    (note,) = values["notes"]
    assert note.startswith(said)


def test_hooks_that_this_model_runs_without_are_unused(fakes: Fakes) -> None:
    """One that matches nothing is an error only where the model's own spec holds it."""
    fakes.add(
        "x", plugin("x", ("hook", "module", "adapters_x:HOOK"), ("deeper", "module", "adapters_x:DEEPER"))
    )
    values = document(fakes, "--live", "x", "--option", "declares=true")
    assert states(values) == {"x/hook": "restored", "x/deeper": "unused"}
    assert values["notes"] == []
    values = document(fakes, "--live", "x", code=1)  # it doesn't say what it uses
    assert states(values) == {"x/hook": "restored", "x/deeper": "failed"}


def test_a_spec_that_is_none(fakes: Fakes) -> None:
    text = plugin("x", ("fwd", "method", "adapters_x:FORWARD"), spec="SPEC_X")
    fakes.add("x", text.replace("adapters_x:SPEC", "adapters_x:NUMBER"))
    values = document(fakes, "--live", "x")
    assert states(values) == {"x/fwd": "restored"}
    assert values["notes"] == ["importing adapters_x:NUMBER: adapters_x:NUMBER is no MLIPSpec but 3"]


def test_it_sees_the_plugins_of_the_calling_process(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its search path is this process's, wherever that came from."""
    fakes.add("x", plugin("x", ("fwd", "method", "adapters_x:FORWARD")))
    monkeypatch.syspath_prepend(str(fakes.root / "site"))
    monkeypatch.setenv("RANK", "0")
    with use_manager(PluginManager()):
        assert main(["adapters", "--live", "x"]) == 0
    assert "restored" in capsys.readouterr().out
