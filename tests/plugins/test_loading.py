"""Whatever is wrong with one plugin stays with it (O-44, O-48, light modules)."""

from __future__ import annotations

import itertools
import os
import sys
import types

import pytest

from nvdd_core.errors import PluginUnusableError
from nvdd_core.plugins import (
    API,
    AdapterDecl,
    ModelDecl,
    PluginInfo,
    PluginManager,
    PluginRecord,
    PluginStatus,
    Ref,
    SpecDecl,
    hookimpl,
)
from nvdd_core.plugins.loading import api_mismatch
from nvdd_core.plugins.report import plugin_page, plugin_row, plugins_table
from nvdd_core.plugins.static_view import UNSTATED, read_static
from tests.plugins._fake import BROKEN, IMPORTS, INFO, MODEL, Fakes, good

REF = Ref("fractions:Fraction")


def plugin(**hooks: object) -> types.SimpleNamespace:
    """A plugin in memory; every hook is given by what it returns, or by a function to call."""
    made = types.SimpleNamespace()
    for name, value in {"nvdd_plugin_info": PluginInfo(api=1), **hooks}.items():
        if value is not None:
            function = value if callable(value) else (lambda value=value: value)
            setattr(made, name, hookimpl(_without_arguments(function)))
    return made


def _without_arguments(function):  # type: ignore[no-untyped-def]
    def hook():  # type: ignore[no-untyped-def]
        return function()

    return hook


def load(**hooks: object) -> PluginRecord:
    return PluginManager([]).register(plugin(**hooks), name="p")


# -- O-44 --


def test_five_broken_ways(here: Fakes) -> None:
    here.add_broken()
    here.add("good", good("good"))
    manager = PluginManager()
    records = {record.name: record for record in manager.records()}
    assert records["good"].status is PluginStatus.OK
    reasons = {name: records[name].reason for name in BROKEN}
    assert reasons["importerror"] == "ImportError: boom"
    assert reasons["systemexit"] == "SystemExit: 3"
    assert reasons["syntaxerror"].startswith("SyntaxError: invalid syntax")
    assert reasons["noattribute"].startswith("AttributeError:")
    assert reasons["stale"].startswith(
        "stale entry point: module 'fake_stale' can't be found, although fake-stale 1.0"
    )
    for name in BROKEN:
        assert records[name].status is PluginStatus.BROKEN
        assert records[name].models == ()
        assert "Traceback" in records[name].traceback
        assert "nvdd_core/plugins/loading.py" not in records[name].traceback
        with pytest.raises(PluginUnusableError, match=f"plugin '{name}'.*nvdd plugins show {name}") as caught:
            manager.model(name)
        assert caught.value.__cause__ is records[name].error
    assert manager.model("good").ref == REF


def test_a_missing_dependency_is_not_called_stale(here: Fakes) -> None:
    here.add("dep", "import no_such_module_abc")
    (record,) = PluginManager().named("dep")
    assert record.reason == "ModuleNotFoundError: No module named 'no_such_module_abc'"


def test_one_raising_hook_leaves_nothing_behind(here: Fakes) -> None:
    def fails_half_way():  # type: ignore[no-untyped-def]
        yield ModelDecl("half", REF)
        raise RuntimeError("half way")

    manager = PluginManager([])
    bad = manager.register(
        plugin(nvdd_declare_models=fails_half_way, nvdd_declare_specs=(SpecDecl("S", REF),)), name="bad"
    )
    manager.register(plugin(nvdd_declare_models=(ModelDecl("fine", REF),)), name="good")
    assert bad.status is PluginStatus.BROKEN
    assert bad.reason == "RuntimeError: half way"
    assert (bad.models, bad.specs) == ((), ())
    assert [row.decl.name for row in manager.models()] == ["fine"]
    assert manager.specs() == ()


@pytest.mark.parametrize("error", [SystemExit, RecursionError, MemoryError, ZeroDivisionError])
def test_hooks_that_raise(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error

    assert load(nvdd_declare_models=fails).reason == error.__name__


def test_keyboard_interrupt_passes() -> None:
    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(nvdd_declare_models=fails)


# -- hooks and rows --


def test_unknown_hook_gets_a_near_name() -> None:
    record = load(nvdd_declare_adapter=())
    assert record.status is PluginStatus.BROKEN
    assert record.reason == "unknown hook 'nvdd_declare_adapter' (did you mean nvdd_declare_adapters?)"


def test_forgotten_marker(here: Fakes) -> None:
    here.add("bare", IMPORTS + INFO.format(api=1) + MODEL.format(model="bare").replace("@hookimpl", ""))
    (record,) = PluginManager().named("bare")
    assert record.reason == "'nvdd_declare_models' is there but not marked: put @hookimpl above it"


def test_hook_with_an_unknown_argument() -> None:
    made = plugin()
    made.nvdd_declare_models = hookimpl(lambda registry: ())
    record = PluginManager([]).register(made, name="p")
    assert record.status is PluginStatus.BROKEN
    assert "registry" in record.reason
    assert "\n" not in record.reason


@pytest.mark.parametrize(
    ("hooks", "reason"),
    [
        ({"nvdd_declare_models": ("lj",)}, "nvdd_declare_models: row 0 must be a ModelDecl, found 'lj'"),
        ({"nvdd_declare_models": (SpecDecl("S", REF),)}, "row 0 must be a ModelDecl"),
        ({"nvdd_declare_models": 7}, "must yield ModelDecl rows, found 7"),
        (
            {"nvdd_declare_models": (ModelDecl("a", REF),) * 2},
            "nvdd_declare_models declares a more than once",
        ),
        ({"nvdd_plugin_info": {"api": 1}}, "must return a PluginInfo"),
        (
            {
                "nvdd_declare_models": (ModelDecl("a", REF, spec="SPEC_A_HAL"),),
                "nvdd_declare_specs": (SpecDecl("SPEC_A_HALO", REF),),
            },
            "names the spec 'SPEC_A_HAL', which neither the plugin nor the core declares (did you mean SPEC_A_HALO?)",
        ),
        (
            {"nvdd_declare_adapters": (AdapterDecl("q/x", "op", "t", REF),)},
            "adapter 'q/x' must be qualified by the plugin's own name: 'p/x'",
        ),
        ({"nvdd_declare_models": (ModelDecl("a", REF, requires=("==1",)),)}, "'==1' is no requirement"),
    ],
)
def test_malformed_declarations(hooks: dict[str, object], reason: str) -> None:
    record = load(**hooks)
    assert record.status is PluginStatus.BROKEN
    assert reason in record.reason


def test_one_row_need_not_be_a_sequence() -> None:
    assert load(nvdd_declare_models=ModelDecl("a", REF)).models[0].decl.name == "a"


def test_core_specs_may_be_named() -> None:
    assert load(nvdd_declare_models=ModelDecl("a", REF, spec="SPEC_MPNN_HALO")).status is PluginStatus.OK


def test_requirements_of_rows() -> None:
    needy = {"requires": ("nobody-has-this",)}
    rows = (ModelDecl("a", REF, **needy), ModelDecl("b", REF))  # type: ignore[arg-type]
    record = load(nvdd_declare_models=rows)
    assert record.status is PluginStatus.OK
    assert [row.status for row in record.models] == [PluginStatus.UNAVAILABLE, PluginStatus.OK]
    assert load(nvdd_declare_models=rows[:1]).status is PluginStatus.UNAVAILABLE
    record = load(nvdd_plugin_info=PluginInfo(api=1, **needy), nvdd_declare_models=rows[1:])  # type: ignore[arg-type]
    assert record.status is PluginStatus.UNAVAILABLE
    assert "pip install 'nobody-has-this'" in record.reason


# -- O-48: gate 2 --

REFUSED = ["0", "999", "-1", "None", "True", "'1'", "1.0", "(1,)", "b'1'"]


@pytest.mark.parametrize("api", REFUSED)
def test_other_contracts_are_refused_before_their_code_runs(here: Fakes, api: str) -> None:
    here.add("other", good("other", api=api))
    here.add("current", good("current", api=API))
    manager = PluginManager()
    (record,) = manager.named("other")
    assert record.status is PluginStatus.INCOMPATIBLE
    assert "this core accepts" in record.reason
    assert str(API) in record.reason
    assert "fake_other" not in sys.modules
    with pytest.raises(PluginUnusableError, match=r"plugin 'other' \(fake-other 1\.0\) is incompatible"):
        manager.model("other")
    assert manager.model("current").name == "current"


@pytest.mark.parametrize("api", [0, 999, None, True, False, "1", 1.0])
def test_computed_contract_is_checked_as_well(api: object) -> None:
    record = load(nvdd_plugin_info=PluginInfo(api=api), nvdd_declare_models=ModelDecl("a", REF))  # type: ignore[arg-type]
    assert record.status is PluginStatus.INCOMPATIBLE
    assert record.models == ()


def test_no_info_hook() -> None:
    record = load(nvdd_plugin_info=None, nvdd_declare_models=ModelDecl("a", REF))
    assert record.status is PluginStatus.INCOMPATIBLE
    assert record.reason.startswith("it states no api; this core accepts")


def test_current_contract_fits() -> None:
    assert api_mismatch(API) == ""


# -- reading a module before importing it --


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        (
            "import json, os.path\nfrom nvdd_core.plugins import Ref\nfrom nvdd_core import hookimpl, __version__",
            0,
        ),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
        ("def f():\n    import torch", 0),
        ("import no_such_module_abc", 0),
        ("import torch", 1),
        ("import torch.nn as nn, numpy", 2),
        ("from torch import nn", 1),
        ("try:\n    import torch\nexcept ImportError:\n    import numpy", 2),
        ("class A:\n    import torch", 1),
        ("if 1:\n    pass\nelse:\n    with open('x'):\n        import torch", 1),
        ("from nvdd_core import Batch", 1),
        ("from nvdd_core.runtime import Batch", 1),
        ("import fake_static_helper", 1),
        ("from fake_static_helper import thing", 1),
        ("def (:", 0),
    ],
)
def test_heavy_imports(here: Fakes, text: str, heavy: int) -> None:
    here.add("static", text, module="fake_static")
    here.add("helper", "import torch", module="fake_static_helper")
    view = read_static("fake_static")
    assert view.found
    assert len(view.heavy) == heavy
    assert "fake_static" not in sys.modules


def test_heavy_imports_of_parents_and_siblings(here: Fakes) -> None:
    folder = here.root / "site" / "fake_package"
    folder.mkdir()
    here.names.append("fake_package")
    (folder / "__init__.py").write_text("import torch\n")
    (folder / "_plugin.py").write_text("from . import _one\nfrom ._two import thing\n")
    (folder / "_one.py").write_text("import numpy\nfrom fake_package import _plugin\n")
    (folder / "_two.py").write_text("from .. import nothing\n\n\nfrom ase import Atoms\n")
    view = read_static("fake_package._plugin")
    assert view.heavy == ("torch (__init__.py:1)", "numpy (_one.py:1)", "ase (_two.py:4)")
    assert "fake_package" not in sys.modules


def test_absent_module_is_not_found(here: Fakes) -> None:
    here.add("plain", "x = 1")
    assert not read_static("fake_absent._plugin").found
    assert not read_static("fake_plain._plugin").found


@pytest.mark.parametrize(
    ("call", "api"),
    [
        ("PluginInfo(api=7)", 7),
        ("plugins.PluginInfo(7)", 7),
        ("PluginInfo(title='x')", None),
        ("PluginInfo(api=API)", UNSTATED),
        ("PluginInfo(**options)", UNSTATED),
        ("PluginInfo(api=1) or PluginInfo(api=2)", UNSTATED),
        ("1", UNSTATED),
    ],
)
def test_stated_api(here: Fakes, call: str, api: object) -> None:
    here.add("stated", f"def f():\n    return {call}")
    assert read_static("fake_stated").api == api


def test_heavy_plugins_wait_until_they_are_asked_for(here: Fakes) -> None:
    here.add("heavy", "import ase\n" + good("heavy"))
    here.add("light", good("light"))
    manager = PluginManager()
    records = {record.name: record for record in manager.records()}
    assert records["light"].loaded
    assert (records["heavy"].status, records["heavy"].loaded) == (PluginStatus.OK, False)
    assert records["heavy"].heavy == ("ase (fake_heavy.py:1)",)
    assert "fake_heavy" not in sys.modules
    assert manager.model("light").name == "light"
    assert "fake_heavy" not in sys.modules
    assert manager.model("heavy").name == "heavy"


def test_heavy_plugins_are_asked_last_for_a_name_they_do_not_carry(here: Fakes) -> None:
    here.add("heavy", "import ase\n" + good("hidden_model"))
    assert PluginManager().model("hidden_model").name == "hidden_model"


def test_static_reading_changes_no_answer_for_light_modules(here: Fakes) -> None:
    here.add("plain", good("plain"))
    (record,) = PluginManager().named("plain")
    assert record.heavy == ()
    assert record.info == PluginInfo(api=1)


def test_value_with_an_object_and_with_extras(here: Fakes) -> None:
    text = IMPORTS + (
        "class P:\n    @hookimpl\n    def nvdd_plugin_info(self):\n        return PluginInfo(api=1)\nplugin = P()\n"
    )
    here.add("object", text, value="fake_object : plugin [extra]")
    (record,) = PluginManager().named("object")
    assert (record.status, record.reason) == (PluginStatus.OK, "")


# -- plugins that do what no plugin should --


class Custom(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise Custom


class Worse(BaseException):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize("error", [Custom, GeneratorExit, Mute, Worse])
def test_hooks_that_raise_what_few_expect(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error

    def fails_later():  # type: ignore[no-untyped-def]
        yield ModelDecl("a", REF)
        raise error

    for hook in (fails, fails_later):
        record = load(nvdd_declare_models=hook)
        assert record.status is PluginStatus.BROKEN
        assert record.reason.startswith(error.__name__)
        assert "Traceback" in record.traceback


@pytest.mark.parametrize("raised", ["Odd('x')", "GeneratorExit", "Mute"])
def test_modules_that_raise_what_few_expect(here: Fakes, raised: str) -> None:
    classes = "class Odd(BaseException): pass\nclass Mute(Exception):\n    def __str__(self): raise Odd\n"
    here.add("odd", f"{classes}raise {raised}")
    here.add("odd_ref", good("odd_ref").replace("fractions:Fraction", "odd_ref_target:x"))
    here.add("target", f"{classes}raise {raised}", module="odd_ref_target")
    here.add("good", good("good"))
    manager = PluginManager()
    records = {record.name: record for record in manager.records()}
    assert (records["odd"].status, records["good"].status) == (PluginStatus.BROKEN, PluginStatus.OK)
    assert "fake_odd.py" in records["odd"].traceback
    with pytest.raises(PluginUnusableError, match="odd_ref_target:x can't be imported"):
        manager.loader("odd_ref")


def test_an_interrupt_in_a_module_passes(here: Fakes) -> None:
    here.add("stop", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginManager().records()


@pytest.mark.parametrize("hook", ["nvdd_declare_models", "nvdd_declare_specs", "nvdd_declare_adapters"])
def test_a_hook_that_does_not_end(hook: str) -> None:
    row = {
        "nvdd_declare_models": lambda i: ModelDecl(f"m{i}", REF),
        "nvdd_declare_specs": lambda i: SpecDecl(f"S{i}", REF),
        "nvdd_declare_adapters": lambda i: AdapterDecl(f"p/a{i}", "op", "t", REF),
    }[hook]
    record = load(**{hook: lambda: map(row, itertools.count())})
    assert record.status is PluginStatus.BROKEN
    assert record.reason == f"{hook} declares more than 1000 rows; does its generator end?"
    record = load(**{hook: lambda: map(row, range(1000))})
    assert (record.status, len(record.rows)) == (PluginStatus.OK, 1000)


def test_requirements_that_do_not_end() -> None:
    record = load(nvdd_declare_models=lambda: [ModelDecl("a", REF, requires=itertools.repeat("numpy"))])  # type: ignore[arg-type]
    assert record.status is PluginStatus.BROKEN
    assert "requires holds more than 100 requirements" in record.reason


PATH_NOTE = "while it was loaded it changed sys.path, which was put back"


@pytest.mark.parametrize(
    ("act", "notes"),
    [
        ("sys.path[:] = []", (PATH_NOTE,)),
        ("sys.path = None", (PATH_NOTE,)),
        ("sys.path = list(sys.path)", (PATH_NOTE,)),
        ("sys.path.insert(0, '/somewhere')", (PATH_NOTE,)),
        ("sys.path.append(7)", (PATH_NOTE,)),
        ("sys.path.append('/x'); raise ValueError", (PATH_NOTE,)),
        ("os.chdir('/')", ("while it was loaded it changed the working directory, which was put back",)),
        ("sys.path.append('/appended')", ()),
    ],
)
@pytest.mark.parametrize("where", ["module", "hook"])
def test_what_a_plugin_changes_is_put_back(
    here: Fakes, monkeypatch: pytest.MonkeyPatch, act: str, notes: tuple[str, ...], where: str
) -> None:
    monkeypatch.chdir(here.root)
    path, entries = sys.path, list(sys.path)
    text = good("moves") if where == "module" else good("moves").replace("    yield", f"    {act}\n    yield")
    here.add("moves", f"import os, sys\n{text}{act if where == 'module' else ''}\n")
    manager = PluginManager()
    (record,) = manager.named("moves")
    assert os.getcwd() == str(here.root)
    assert sys.path is path
    assert sys.path == (entries if notes else [*entries, "/appended"])
    del sys.path[len(entries) :]
    assert record.notes == notes
    assert [note for note in manager.notes if "moves" in note] == [f"{record.entry.label} {n}" for n in notes]


def test_what_importing_a_loader_changes_is_put_back(here: Fakes) -> None:
    here.add("moves", good("moves").replace("fractions:Fraction", "moves_target:load"))
    here.add("target", "import sys\nsys.path[:] = []\ndef load(): pass", module="moves_target")
    entries = list(sys.path)
    manager = PluginManager()
    for _ in range(2):
        manager.loader("moves")
    assert sys.path == entries
    (record,) = manager.named("moves")
    told = "while moves_target:load was imported it changed sys.path, which was put back"
    assert record.notes == (told,)
    assert plugin_row(record)["notes"] == [told]


def test_texts_of_several_lines_stay_in_their_place() -> None:
    title = "one\ntwo\tthree\nstatus: \u2028 ok"
    record = load(nvdd_plugin_info=PluginInfo(api=1, title=title), nvdd_declare_models=ModelDecl("a", REF))
    lines = plugins_table([plugin_row(record)]).splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("one two three status: ok")
    page = plugin_page(record)
    assert [line.split()[1] for line in page.splitlines() if line.startswith("status:")] == ["ok"]
    assert sum(line.startswith("title:") for line in page.splitlines()) == 1
