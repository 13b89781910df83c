"""`nvdd plugins`, `nvdd models` and what the command line does with errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import nvdd_core
from nvdd_core.cli import main as cli_main
from nvdd_core.cli.main import main
from nvdd_core.errors import InputError, NvddError
from nvdd_core.plugins import PluginManager, use_manager
from nvdd_core.plugins.discovery import find_entries
from nvdd_core.plugins.report import ascii_text, header_line, table
from tests.plugins._fake import CLI, IMPORTS, INFO, Fakes, good, processor_time

EVERYTHING = (
    IMPORTS
    + """
REF = Ref("fractions:Fraction")

@hookimpl
def nvdd_plugin_info():
    return PluginInfo(api=1, title="All of it", homepage="https://example.org", maturity="experimental")

@hookimpl
def nvdd_declare_specs():
    yield SpecDecl("SPEC_ALL_HALO", REF)

@hookimpl
def nvdd_declare_models():
    yield ModelDecl("all", REF, spec="SPEC_ALL_HALO", title="one")
    yield ModelDecl("all-needy", REF, requires=("nobody-has-this>=2",))

@hookimpl
def nvdd_declare_adapters():
    yield AdapterDecl("all/op", "op", "foreign::op", REF)
"""
)


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "site").mkdir()
    return Fakes(tmp_path)


@pytest.fixture
def installed(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], PluginManager]]:
    """Make this process see the fake plugins and nothing else."""
    monkeypatch.syspath_prepend(str(fakes.root / "site"))

    def make(**switches: object) -> PluginManager:
        mine = [e for e in find_entries() if e.distribution.startswith("fake-")]
        return PluginManager(mine, environ={}, **switches)  # type: ignore[arg-type]

    yield make
    for name in fakes.names:
        sys.modules.pop(name, None)


# -- list --


def test_table(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("all", EVERYTHING, version="2.1")
    fakes.add("bad", "raise ImportError('boom')")
    fakes.add("off", good("off"))
    with use_manager(installed(deny=["off", "nobody"])):
        assert main(["plugins"]) == 0
        out, err = capsys.readouterr()
        assert main(["plugins", "list"]) == 0
        assert capsys.readouterr().out == out
    assert out == (
        "PLUGIN  DISTRIBUTION  STATUS    MODELS         ENTRY POINT  DETAIL\n"
        "all     fake-all 2.1  ok        all,all-needy  fake_all     'all-needy' is unavailable: needs "
        "nobody-has-this>=2, which is not installed: pip install 'nobody-has-this>=2'\n"
        "bad     fake-bad 1.0  broken    -              fake_bad     ImportError: boom\n"
        "off     fake-off 1.0  disabled  -              fake_off     switched off by 'off' in NVDD_DISABLE_PLUGINS\n"
    )
    assert err == "note: 'nobody' in NVDD_PLUGINS or NVDD_DISABLE_PLUGINS matches no installed plugin\n"


def test_json_schema_one(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are never removed within a schema; adding one means adding it here."""
    folder = fakes.add("all", EVERYTHING)
    with use_manager(installed()):
        assert main(["plugins", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(["plugins", "list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == document
    assert document.pop("core").keys() == {"version", "api", "min_api", "python", "location"}
    assert len(document.pop("digest")) == 16
    common = {"status": "ok", "reason": "", "requires": [], "title": "", "maturity": "stable"}
    needs = "needs nobody-has-this>=2, which is not installed: pip install 'nobody-has-this>=2'"
    target = "fractions:Fraction"
    assert document == {
        "schema": 1,
        "notes": [],
        "plugins": [
            {
                "name": "all",
                "distribution": "fake-all",
                "version": "1.0",
                "target": "fake_all",
                "status": "ok",
                "reason": f"'all-needy' is unavailable: {needs}",
                "loaded": True,
                "api": 1,
                "title": "All of it",
                "description": "",
                "homepage": "https://example.org",
                "maturity": "experimental",
                "location": str(folder.resolve()),
                "editable": False,
                "notes": [],
                "models": [
                    common | {"name": "all", "spec": "SPEC_ALL_HALO", "target": target, "title": "one"},
                    common
                    | {
                        "name": "all-needy",
                        "spec": None,
                        "target": target,
                        "requires": ["nobody-has-this>=2"],
                    }
                    | {"status": "unavailable", "reason": needs},
                ],
                "specs": [{"name": "SPEC_ALL_HALO", "target": target, "title": ""}],
                "adapters": [
                    common | {"name": "all/op", "kind": "op", "target": "foreign::op", "ref": target}
                ],
            }
        ],
    }


def test_nothing_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with use_manager(PluginManager([])):
        assert main(["plugins"]) == 0
        assert "no plugins installed" in capsys.readouterr().out
        assert main(["models"]) == 0
        out = capsys.readouterr().out
    assert "no models" in out
    assert "lj (pip install nvdd-lj)" in out


def test_listing_is_fast_and_light() -> None:
    """Target of the project: below 0.25 s with torch never imported."""
    program = (
        "import sys; from nvdd_core.cli.main import main; main(['plugins'])\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"
    best = 9.9
    for _ in range(7):
        started = processor_time()
        subprocess.run([sys.executable, "-c", CLI, "plugins"], capture_output=True, timeout=60, check=True)
        best = min(best, processor_time() - started)
    assert best < 0.25


def test_strict_lists_first_and_fails_then(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("bad", "raise ImportError('boom')")
    with use_manager(installed(strict=True)):
        for command in ("plugins", "models"):
            assert main([command]) == 2
            out, err = capsys.readouterr()
            assert out
            assert err.splitlines()[-1].startswith("nvdd: error: plugin 'bad' (fake-bad 1.0) is broken")


# -- show --


def test_show(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("all", EVERYTHING)
    fakes.add("bad", "def f():\n    raise ImportError('boom')\nf()")
    with use_manager(installed()):
        assert main(["plugins", "show", "all"]) == 0
        out = capsys.readouterr().out
        assert "api:          1 (this core accepts 1 to 1)" in out
        assert "all/op   op    ok      stable    foreign::op  -" in out
        assert main(["plugins", "show", "bad"]) == 0
        out = capsys.readouterr().out
        assert "reason:       ImportError: boom" in out
        assert "Traceback (most recent call last)" in out
        assert "in f" in out
        for command in (["plugins", "show", "bad", "--json"], ["plugins", "--json", "show", "bad"]):
            assert main(command) == 0
            (row,) = json.loads(capsys.readouterr().out)["plugins"]
            assert row["traceback"].endswith("ImportError: boom\n")
            assert row["heavy"] == []
        assert main(["plugins", "show", "al"]) == 2
        assert capsys.readouterr().err == (
            "nvdd: error: no plugin named 'al' is installed. Did you mean 'all'? Installed: all, bad.\n"
        )


def test_show_tells_of_every_claim(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("dup", good("dup"), dist="fake-one", module="fake_one")
    fakes.add("dup", good("dup"), dist="fake-two", module="fake_two")
    with use_manager(installed()):
        assert main(["plugins", "show", "dup"]) == 0
    out = capsys.readouterr().out
    assert "fake-one 1.0" in out
    assert "fake-two 1.0" in out


def test_text_is_ascii(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("odd", "raise ImportError('\\x1b[31m\\u00e9\\nnext')")
    with use_manager(installed()):
        for command in (["plugins"], ["plugins", "show", "odd"], ["models"], ["plugins", "check"]):
            main(command)
            text = "".join(capsys.readouterr())
            assert text.isascii()
            assert "\x1b" not in text
    assert ascii_text("a\tb\n\x1b") == "a\\tb\n\\x1b"


# -- check --


@pytest.mark.parametrize("isolated", [False, True])
def test_check(fakes: Fakes, isolated: bool) -> None:
    fakes.add("all", EVERYTHING)
    fakes.add("heavy", "import ase\n" + good("heavy"))
    fakes.add("off", "raise ImportError")
    fakes.add("noref", good("noref").replace("fractions:Fraction", "fractions:Nothing"))
    extra = ["--isolated"] if isolated else []
    env = {"NVDD_DISABLE_PLUGINS": "off,lj"}
    fine = fakes.nvdd("plugins", "check", *extra, "all", "heavy", "off", "--json", **env)
    assert fine.returncode == 0, fine.stderr
    rows = {row["name"]: row for row in json.loads(fine.stdout)["plugins"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "all": "ok",
        "heavy": "ok",
        "off": "disabled",
    }
    assert rows["heavy"]["reason"] == "not a light module: it imports ase (fake_heavy.py:1)"
    done = fakes.nvdd("plugins", "check", *extra, "noref", **env)
    assert done.returncode == 1
    assert "fractions:Nothing can't be imported: AttributeError" in done.stdout
    assert done.stderr == "nvdd: error: 1 of 1 plugins need mending: noref\n"
    assert fakes.nvdd("plugins", "check", *extra, "noref", "--no-refs", **env).returncode == 0
    assert fakes.nvdd("plugins", "check", *extra, "nobody", **env).returncode == 2


def test_isolated_check_survives_a_crash(fakes: Fakes) -> None:
    fakes.add("exits", "import os\nos._exit(3)")
    fakes.add("crashes", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    fakes.add("good", good("good"))
    done = fakes.nvdd("plugins", "check", "--isolated", "--json", NVDD_DISABLE_PLUGINS="lj")
    assert done.returncode == 1
    rows = {row["name"]: (row["status"], row["reason"]) for row in json.loads(done.stdout)["plugins"]}
    assert rows.pop("lj")[0] == "disabled"
    assert {name: rows[name] for name in ("crashes", "exits", "good")} == {  # beside what is installed here
        "crashes": ("broken", "importing it ended the process: signal SIGSEGV"),
        "exits": ("broken", "importing it ended the process: exit code 3"),
        "good": ("ok", ""),
    }


# -- models --


def test_models(
    fakes: Fakes, installed: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("all", EVERYTHING)
    fakes.add("bad", "raise ImportError('boom')")
    fakes.add("heavy", "import ase\n" + good("heavy"))
    with use_manager(installed()):
        assert main(["models"]) == 0
        out, err = capsys.readouterr()
        assert main(["models", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    lines = out.splitlines()
    assert lines[0].split() == ["MODEL", "PLUGIN", "STATUS", "MATURITY", "SPEC", "DETAIL"]
    assert lines[1].split() == ["all", "all", "1.0", "ok", "stable", "SPEC_ALL_HALO", "one"]
    assert lines[2].split()[:4] == ["all-needy", "all", "1.0", "unavailable"]
    known = {
        "lj": "nvdd-lj",
        "mace": "nvdd-mace",
        "ewald": "nvdd-pme",
        "pme": "nvdd-pme",
        "dftd3": "nvdd-dftd3",
    }
    told = ", ".join(f"{model} (pip install {package})" for model, package in known.items())
    assert lines[-2] == f"Known but not installed: {told}."
    assert lines[-1] == "Planned, not released yet: uma."
    assert "plugin 'bad' (fake-bad 1.0) is broken: ImportError: boom" in err
    assert "plugin 'heavy' (fake-heavy 1.0) is left out, since it imports ase (fake_heavy.py:1)" in err
    assert document.keys() == {"schema", "core", "models", "not_installed", "notes"}
    assert document["models"][0] == {
        "name": "all",
        "status": "ok",
        "reason": "",
        "maturity": "stable",
        "spec": "SPEC_ALL_HALO",
        "target": "fractions:Fraction",
        "title": "one",
        "requires": [],
        "qualified": "all/all",
        "plugin": "all",
        "distribution": "fake-all",
        "version": "1.0",
    }
    assert {"name": "mace", "distribution": "nvdd-mace", "released": True} in document["not_installed"]
    assert {"name": "uma", "distribution": "nvdd-uma", "released": False} in document["not_installed"]


def test_header_line() -> None:
    text = header_line(PluginManager([]))
    assert text.startswith(f"nvdd {nvdd_core.__version__} (api 1) plugins: none digest ")


def test_first_party_plugin_is_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLI, "models"], capture_output=True, text=True, timeout=60, check=True
    )
    assert any(line.split()[:2] == ["lj", "lj"] for line in done.stdout.splitlines())


# -- the command line as a whole --


def command(action: Callable[[], object]) -> click.Command:
    return click.Command("fake", callback=lambda: action())


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    def install(action: Callable[[], object]) -> None:
        monkeypatch.setitem(cli_main.COMMANDS, "fake", ("tests.cli.test_plugins_cmd:COMMAND", "Fake."))
        monkeypatch.setattr(sys.modules[__name__], "COMMAND", command(action), raising=False)
        monkeypatch.setitem(sys.modules, "tests.cli.test_plugins_cmd", sys.modules[__name__])

    return install


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NvddError("it failed"), 1, "it failed"),
        (InputError("bad\n  input"), 2, "bad input"),
        (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError: by zero (--debug shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(2, "No such file", "x"), 1, None),
    ],
)
def test_errors_become_one_line(
    fake_command, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str | None
) -> None:  # type: ignore[no-untyped-def]
    fake_command(raising(error))
    assert main(["fake"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    err = err.removeprefix("\n" if code == 130 else "")  # click ends the line on which ^C was echoed
    assert err.count("\n") == 1
    assert err.startswith("nvdd: error: ")
    if line is not None:
        assert err == f"nvdd: error: {line}\n"


@pytest.mark.parametrize("args", [["--debug", "fake"], ["fake", "--debug"]])
def test_debug_shows_the_traceback(fake_command, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:  # type: ignore[no-untyped-def]
    fake_command(raising(InputError("bad input")))
    assert main(args) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("nvdd: error: bad input\n")


def test_debug_on_nested_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with use_manager(PluginManager([])):
        for args in (["plugins", "show", "x", "--debug"], ["plugins", "--debug", "show", "x"]):
            assert main(args) == 2
            assert "Traceback" in capsys.readouterr().err


def test_exit_codes_of_commands_pass(fake_command, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    fake_command(lambda: click.get_current_context().exit(7))
    assert main(["fake"]) == 7
    fake_command(raising(SystemExit(9)))
    with pytest.raises(SystemExit) as caught:
        main(["fake"])
    assert caught.value.code == 9


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin"]) == 2
    err = capsys.readouterr().err
    assert "No such command 'plugin'. Did you mean 'plugins'?" in err
    assert "Commands: run, evaluate, validate, models, plugins, adapters, new-plugin" in err
    assert main(["plugins", "--nonsense"]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nvdd {nvdd_core.__version__}\n"


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from nvdd_core.cli.main import main, COMMANDS; main(['--help'])\n"
        "print([m for m, _ in COMMANDS.values() if m.split(':')[0] in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for name, (_, text) in cli_main.COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in done.stdout.splitlines()), name


@pytest.mark.parametrize("name", list(cli_main.COMMANDS))
def test_every_command_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.count("--debug") == 1
    context = click.Context(cli_main.cli)
    found = cli_main.cli.get_command(context, name)
    assert found is not None
    assert found.get_short_help_str(limit=200) == cli_main.COMMANDS[name][1]


def test_a_reader_that_leaves_early_is_no_failure_worth_a_traceback(fakes: Fakes) -> None:
    for i in range(3):
        fakes.add(f"long{i}", IMPORTS + INFO.format(api=1) + "# " + "x" * 100)
    script = f'"{sys.executable}" -c "{CLI}" plugins --json | head -1'
    done = subprocess.run(
        ["bash", "-c", script], env=fakes.env(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_layout() -> None:
    assert table(("A", "BB"), [("xyz", ""), ("", "\u00e9")]) == "A    BB\nxyz  -\n-    \\xe9"
