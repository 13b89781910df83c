"""Look-ups, messages, strict mode and agreement between ranks."""

from __future__ import annotations

import ast
import logging
import sys
import threading
import types
from pathlib import Path

import pytest

import nvdd_core
from nvdd_core.errors import PluginMismatchError, PluginNotFoundError, PluginUnusableError
from nvdd_core.plugins import (
    AdapterDecl,
    ModelDecl,
    PluginEntry,
    PluginInfo,
    PluginManager,
    PluginStatus,
    Ref,
    SpecDecl,
    check_agreement,
    default_manager,
    hookimpl,
    use_manager,
)
from tests.plugins._fake import Fakes, good

REF = Ref("fractions:Fraction")


def plugin(*models: str, spec: str | None = None, **info: object) -> types.SimpleNamespace:
    def nvdd_plugin_info() -> PluginInfo:
        return PluginInfo(api=1, **info)  # type: ignore[arg-type]

    def nvdd_declare_models() -> list[ModelDecl]:
        return [ModelDecl(name, REF) for name in models]

    def nvdd_declare_specs() -> list[SpecDecl]:
        return [] if spec is None else [SpecDecl(spec, REF)]

    hooks = (nvdd_plugin_info, nvdd_declare_models, nvdd_declare_specs)
    return types.SimpleNamespace(**{hook.__name__: hookimpl(hook) for hook in hooks})


def manager(**plugins: object) -> PluginManager:
    made = PluginManager([])
    for name, given in plugins.items():
        made.register(given, name=name, distribution=f"dist-{name}", version="1.0")
    return made


# -- look-up --


def test_only_the_plugin_that_carries_the_name_is_imported(here: Fakes) -> None:
    here.add("one", good("one"))
    here.add("two", good("two"))
    assert PluginManager().model("one") == ModelDecl("one", REF)
    assert "fake_one" in sys.modules
    assert "fake_two" not in sys.modules


def test_model_under_another_name_than_its_plugin() -> None:
    made = manager(a=plugin("first", "second"), b=plugin("third"))
    assert made.model("second").name == "second"
    assert made.model("b/third").name == "third"
    row = made.provided_model("third")
    assert (row.plugin, row.distribution) == ("b", "dist-b")
    assert [row.decl.name for row in made.models()] == ["first", "second", "third"]


def test_qualified_name_that_is_not_there() -> None:
    with pytest.raises(PluginNotFoundError, match=r"plugin 'a' \(dist-a 1.0\) has no model 'x'; it has: m"):
        manager(a=plugin("m")).model("a/x")
    with pytest.raises(PluginNotFoundError, match="no plugin named 'b'"):
        manager(a=plugin("m")).model("b/x")


def test_missing_model_message() -> None:
    made = manager(mace=plugin("mace"), pme=plugin("pme", api=9))  # api given twice: a broken plugin
    made.register(types.SimpleNamespace(), name="old")
    with pytest.raises(PluginNotFoundError) as caught:
        made.model("mcae")
    assert str(caught.value) == (
        "no installed plugin provides the model 'mcae'. Did you mean 'mace'? Installed: mace. "
        "Known but not installed: lj (pip install nvdd-lj), ewald (pip install nvdd-pme), "
        "pme (pip install nvdd-pme), dftd3 (pip install nvdd-dftd3). "
        "Planned, not released yet: uma. "
        "Can't be used: old (incompatible), pme (broken); run 'nvdd plugins' to see why."
    )
    assert caught.value.exit_code == 2
    with pytest.raises(
        PluginNotFoundError, match=r"'uma'\. It is planned as nvdd-uma, which is not released yet\. Installed"
    ):
        made.model("uma")
    with pytest.raises(PluginNotFoundError, match=r"put together by nvdd_core\.runtime\.PipelineModel"):
        made.model("mace+pme")
    with pytest.raises(PluginNotFoundError, match="Did you mean 'dftd3'"):
        made.model("DFT-D3")
    with pytest.raises(PluginNotFoundError, match=r"Install it: pip install nvdd-lj\. Installed: none"):
        PluginManager([]).model("lj")


def test_missing_plugin_message() -> None:
    made = manager(mace=plugin("mace"))
    with pytest.raises(PluginNotFoundError, match="Did you mean 'mace'\\? Installed: mace"):
        made.plugin("mce")
    with pytest.raises(PluginNotFoundError, match="It is planned as nvdd-uma, which is not"):
        made.named("uma")


def test_a_name_used_by_two_plugins() -> None:
    made = manager(a=plugin("m"), b=plugin("m"))
    with pytest.raises(
        PluginUnusableError, match="'m' is provided by several plugins; ask for 'a/m' or 'b/m'"
    ):
        made.model("m")
    assert made.model("b/m").name == "m"
    assert {row.status for row in made.models()} == {PluginStatus.CONFLICT}
    assert "ask for 'a/m'" in made.models()[0].reason


def test_a_plugins_own_name_is_its_own() -> None:
    for names in (("m", "z"), ("z", "m")):
        made = manager(**{name: plugin("m") for name in names})
        assert made.provided_model("m").plugin == "m"
        states = {row.plugin: row.status for row in made.models()}
        assert states == {"m": PluginStatus.OK, "z": PluginStatus.CONFLICT}


def test_unavailable_is_refused_with_the_reason() -> None:
    made = manager(a=plugin("m", requires=("nobody-has-this>=1",)))
    with pytest.raises(PluginUnusableError, match="needs nobody-has-this>=1, which is not installed"):
        made.model("m")
    assert made.models()[0].status is PluginStatus.UNAVAILABLE


def test_loader_and_errors_of_its_import(here: Fakes) -> None:
    import fractions

    made = manager(a=plugin("m"))
    assert made.loader("m") is fractions.Fraction
    assert made.load_model("m", numerator=1, denominator=2) == fractions.Fraction(1, 2)
    here.add("lost", good("lost").replace("fractions:Fraction", "no_such_module_abc:load"))
    here.add("odd", good("odd").replace("fractions:Fraction", "math:pi"))
    with pytest.raises(
        PluginUnusableError, match=r"plugin 'lost' \(fake-lost 1.0\): no_such.*ModuleNotFound"
    ) as caught:
        PluginManager().loader("lost")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(PluginUnusableError, match=r"math:pi is no loader but 3\.14"):
        PluginManager().loader("odd")


def test_specs() -> None:
    made = manager(a=plugin(spec="SPEC_A"), b=plugin(spec="SPEC_TWO"), c=plugin(spec="SPEC_TWO"))
    assert made.spec("SPEC_A") == SpecDecl("SPEC_A", REF)
    assert made.spec("c/SPEC_TWO").name == "SPEC_TWO"
    assert made.spec("SPEC_MPNN_HALO").name == "SPEC_MPNN_HALO"
    assert [row.plugin for row in made.specs()] == ["a", "b", "c"]
    with pytest.raises(PluginUnusableError, match="ask for 'b/SPEC_TWO' or 'c/SPEC_TWO'"):
        made.spec("SPEC_TWO")
    with pytest.raises(PluginNotFoundError, match="Did you mean 'SPEC_A'"):
        made.spec("SPEC_B")


def test_adapters() -> None:
    def nvdd_declare_adapters() -> list[AdapterDecl]:
        return [AdapterDecl(f"a/{name}", "op", "foreign::op", REF) for name in ("z", "y")]

    given = plugin("m")
    given.nvdd_declare_adapters = hookimpl(nvdd_declare_adapters)
    made = manager(a=given, b=plugin("n"))
    assert [row.decl.name for row in made.adapters()] == ["a/z", "a/y"]
    assert made.adapters("b") == ()


# -- the set --


def test_register_and_unregister() -> None:
    made = manager(a=plugin("m"))
    assert made.register(plugin("x"), name="a", distribution="rival").status is PluginStatus.CONFLICT
    assert {record.status for record in made.named("a")} == {PluginStatus.CONFLICT}
    made.unregister("a")
    with pytest.raises(PluginNotFoundError):
        made.named("a")
    assert made.register(plugin("m"), name="a").status is PluginStatus.OK
    assert made.model("m").name == "m"


def test_registered_plugins_obey_the_switches() -> None:
    made = PluginManager([], deny=["a"])
    assert made.register(plugin("m"), name="a").status is PluginStatus.DISABLED


def test_fresh_managers_do_not_share(here: Fakes) -> None:
    here.add("one", good("one"))
    first = PluginManager()
    first.unregister("one")
    assert PluginManager().model("one").name == "one"


def test_loaded_once_by_many_threads(here: Fakes) -> None:
    text = (
        good("one")
        + "\nimport builtins\nbuiltins.nvdd_test_count = getattr(builtins, 'nvdd_test_count', 0) + 1\n"
    )
    here.add("one", text)
    made = PluginManager()
    threads = [threading.Thread(target=made.model, args=("one",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    import builtins

    assert vars(builtins).pop("nvdd_test_count") == 1


def test_plugin_that_asks_for_plugins_while_it_loads() -> None:
    made = PluginManager([])

    def nvdd_declare_models() -> list[ModelDecl]:
        made.records()
        made.register(plugin("n"), name="a_first")
        return [ModelDecl("m", REF)]

    given = plugin()
    given.nvdd_declare_models = hookimpl(nvdd_declare_models)
    made.register(given, name="b")
    assert made.model("m").name == "m"
    assert made.model("n").name == "n"
    assert [record.name for record in made.records()] == ["a_first", "b"]


def test_default_manager_is_one_and_can_be_swapped() -> None:
    assert default_manager() is default_manager()
    before = default_manager()
    fresh = PluginManager([])
    with use_manager(fresh) as given:
        assert given is default_manager() is fresh
    assert default_manager() is before


# -- strict --


def test_strict_raises_with_the_cause(here: Fakes) -> None:
    here.add("good", good("good"))
    here.add("bad", "raise ImportError('boom')")
    made = PluginManager(strict=True)
    with pytest.raises(PluginUnusableError, match=r"'bad'.*boom") as caught:
        made.model("good")
    assert isinstance(caught.value.__cause__, ImportError)
    assert PluginManager(strict=True, deny=["bad"]).model("good").name == "good"
    assert PluginManager(strict=False).model("good").name == "good"


def test_problems_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, logger="nvdd.plugins"):
        made = manager(a=plugin("m"), old=types.SimpleNamespace())
        made.model("m")
        made.model("m")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("plugin 'old' (dist-old 1.0) is incompatible")


# -- agreement --


def entry(name: str, version: str = "1.0") -> PluginEntry:
    return PluginEntry(name, "no_module", f"dist-{name}", version)


def test_digest_says_what_is_installed() -> None:
    one = PluginManager([entry("a"), entry("b")])
    assert one.digest() == PluginManager([entry("b"), entry("a")]).digest()
    assert len(one.digest()) == 16
    moved = PluginEntry("a", "no_module", "dist-a", "1.0", location="/elsewhere", editable=True)
    assert one.digest() == PluginManager([moved, entry("b")]).digest()
    others = [
        PluginManager([entry("a")]),
        PluginManager([entry("a"), entry("b", "1.1")]),
        PluginManager([entry("a"), entry("b")], deny=["a"]),
        PluginManager([entry("a"), entry("b")], core_version="9.9"),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 5


def test_digest_does_not_depend_on_what_is_loaded() -> None:
    made = PluginManager([entry("a")])
    before = made.digest()
    made.records()
    assert made.digest() == before


def test_digest_of_used_plugins_holds_their_rows() -> None:
    one, two = manager(a=plugin("m")), manager(a=plugin("m", "n"))
    assert one.digest() == two.digest()
    assert one.digest(["a"]) != two.digest(["a"])
    assert one.digest(["a"]) == manager(a=plugin("m")).digest(["a"])


def test_ranks_that_differ_are_told_in_what() -> None:
    one = PluginManager([entry("a"), entry("b")]).fingerprint()
    check_agreement([one, one, one])
    check_agreement([])
    two = PluginManager([entry("a"), entry("b", "1.1")]).fingerprint()
    with pytest.raises(PluginMismatchError) as caught:
        check_agreement([one, one, two])
    text = str(caught.value)
    assert "rank 0 has [b dist-b 1.0 no_module ok], rank 2 has [b dist-b 1.1 no_module ok]" in text
    with pytest.raises(PluginMismatchError, match="rank 1 has \\[nothing more\\]"):
        check_agreement([one, one[:2]])


# -- public names --


def test_plugin_names_of_the_core_package_are_lazy() -> None:
    assert nvdd_core.hookimpl is hookimpl
    assert nvdd_core.PluginManager is PluginManager
    assert "ModelDecl" in dir(nvdd_core)
    with pytest.raises(AttributeError, match="module 'nvdd_core' has no attribute 'nothing'"):
        nvdd_core.nothing  # noqa: B018


def test_presets_of_the_core_are_where_the_manager_says() -> None:
    for name in ("SPEC_MPNN_HALO", "SPEC_MPNN_GP", "SPEC_MPNN_WIDE"):
        assert PluginManager([]).spec(name).ref.resolve() is getattr(nvdd_core, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(nvdd_core.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == nvdd_core.LAZY_NAMES


@pytest.mark.parametrize("name", nvdd_core.__all__)
def test_every_public_name_of_the_core_package_is_there(name: str) -> None:
    assert getattr(nvdd_core, name) is not None
