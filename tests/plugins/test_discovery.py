"""What is found, in which order, and what metadata alone decides (O-45, O-50, gate 1, conflicts)."""

from __future__ import annotations

import sys

import pytest

import nvdd_core
from nvdd_core.errors import InputError, PluginUnusableError
from nvdd_core.plugins import PluginEntry, PluginManager, PluginRecord, PluginStatus
from nvdd_core.plugins.discovery import examine, find_entries
from nvdd_core.plugins.requirements import core_mismatch, unmet, wanted_by
from nvdd_core.plugins.switches import Switches
from tests.plugins._fake import Fakes, good


def by_name(records: tuple[PluginRecord, ...]) -> dict[str, PluginRecord]:
    return {record.name: record for record in records}


def entry(name: str, dist: str = "", **more: object) -> PluginEntry:
    return PluginEntry(name, f"fake_{name}", dist or f"fake-{name}", "1.0", **more)  # type: ignore[arg-type]


# -- O-45 --


def found(name: str) -> list[PluginEntry]:
    return [e for e in find_entries() if e.name == name]


def test_same_wheel_in_two_folders_counts_once(here: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    here.add("twice", good("twice"), version="1.0", where="site")
    second = here.add("twice", good("twice"), version="2.0", where="other")
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    (only,) = found("twice")
    assert only.version == "1.0"  # the first on the path, which is also the one that is imported
    assert only.notes == (f"hides another copy, fake-twice 2.0 in {second.resolve()}",)
    (note,) = [n for n in PluginManager().notes if "twice" in n]
    assert note.startswith("plugin 'twice' (fake-twice 1.0) hides")
    assert PluginManager().model("twice").name == "twice"


@pytest.mark.parametrize("source_first", [True, False])
def test_egg_info_beside_an_editable_source(
    here: Fakes, monkeypatch: pytest.MonkeyPatch, source_first: bool
) -> None:
    site = here.add("both", None, version="1.0")
    source = here.add("both", good("both"), version="1.0", where="src", kind="egg-info")
    rest = [p for p in sys.path if p != str(site)]
    front = [source, site] if source_first else [site, source]
    monkeypatch.setattr(sys, "path", [*map(str, front), *rest])
    (only,) = found("both")
    assert only.location == str((source if source_first else site).resolve())
    assert len(PluginManager().named("both")) == 1
    assert PluginManager().model("both").name == "both"


def test_one_folder_twice_on_the_path(here: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    site = here.add("again", good("again"))
    monkeypatch.setattr(sys, "path", [str(site), f"{site}/", *sys.path])
    (only,) = found("again")
    assert only.notes == ()


def test_torn_upgrade_takes_the_newest(here: Fakes) -> None:
    for version in ("1.10", "1.9", "1.2"):
        here.add("torn", good("torn"), version=version)
    (only,) = found("torn")
    assert only.version == "1.10"
    assert len(only.notes) == 2


def test_newer_copy_that_dropped_the_plugin_hides_it(here: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    second = here.add("gone", good("gone"), where="other")
    info = here.root / "site" / "fake_gone-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-gone\nVersion: 2.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    assert found("gone") == []


def test_unreadable_metadata_is_listed_and_hurts_nobody(here: Fakes) -> None:
    here.add("fine", good("fine"))
    info = here.root / "site" / "torn-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[nvdd.plugins]\nx = x\n")
    records = by_name(PluginManager().records())
    assert records["fine"].status is PluginStatus.OK
    assert records["(unreadable)"].status is PluginStatus.BROKEN
    assert "metadata can't be read" in records["(unreadable)"].reason


# -- order, names, conflicts --


def test_sorted_by_name_and_distribution() -> None:
    entries = [entry("b"), entry("a", "z"), entry("a", "y"), entry("c")]
    for order in (entries, entries[::-1]):
        records = examine(order, Switches(), "1.0")
        assert [r.key for r in records] == [("a", "y"), ("a", "z"), ("b", "fake-b"), ("c", "fake-c")]


@pytest.mark.parametrize("name", ["Upper", "has-hyphen", "1st", "", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_bad_names_are_broken_and_not_imported(name: str) -> None:
    (record,) = PluginManager([PluginEntry(name, "no_such_module", "d", "1")]).records()
    assert record.status is PluginStatus.BROKEN
    assert "must match" in record.reason


def test_two_distributions_claim_one_name(here: Fakes) -> None:
    here.add("dup", good("dup"), dist="fake-one", module="fake_one")
    here.add("dup", good("dup"), dist="fake-two", module="fake_two")
    here.add("other", good("other"))
    manager = PluginManager()
    first, second = manager.named("dup")
    assert {first.status, second.status} == {PluginStatus.CONFLICT}
    assert "fake-two" in first.reason
    assert "fake-one" in second.reason
    assert not {"fake_one", "fake_two"} & set(sys.modules)
    with pytest.raises(PluginUnusableError, match=r"NVDD_DISABLE_PLUGINS=dist:fake-two"):
        manager.model("dup")
    assert manager.model("other").name == "other"
    # The way out that the message names works.
    assert PluginManager(deny=["dist:fake-two"]).model("dup").name == "dup"
    assert PluginManager(allow=["dist:Fake_One"]).model("dup").name == "dup"


def test_one_distribution_claims_a_name_twice() -> None:
    entries = [PluginEntry("a", "x", "d", "1"), PluginEntry("a", "y", "d", "1")]
    first, second = PluginManager(entries).records()
    assert first.status is second.status is PluginStatus.CONFLICT
    assert "more than once: x, y" in first.reason


# -- switches (O-50) --


def test_allow_and_deny(here: Fakes) -> None:
    here.add("one", good("one"))
    here.add("two", good("two"))
    manager = PluginManager(environ={"NVDD_PLUGINS": "one, lj"})
    assert by_name(manager.records())["two"].status is PluginStatus.DISABLED
    assert "fake_two" not in sys.modules
    assert manager.model("one").name == "one"
    with pytest.raises(PluginUnusableError, match=r"'two'.*disabled.*NVDD_PLUGINS='one,lj'"):
        manager.model("two")
    manager = PluginManager(environ={"NVDD_PLUGINS": "one,two", "NVDD_DISABLE_PLUGINS": "fake-two"})
    assert by_name(manager.records())["two"].reason == "switched off by 'fake-two' in NVDD_DISABLE_PLUGINS"
    assert "fake_two" not in sys.modules


def test_empty_allow_list_means_none(here: Fakes) -> None:
    here.add("one", good("one"))
    records = PluginManager(environ={"NVDD_PLUGINS": ""}).records()
    assert {r.status for r in records} == {PluginStatus.DISABLED}
    assert PluginManager(environ={"NVDD_PLUGINS": ""}, allow=["one"]).model("one").name == "one"
    assert PluginManager(allow=[]).models() == ()


def test_arguments_and_environment() -> None:
    env = {"NVDD_PLUGINS": "a", "NVDD_DISABLE_PLUGINS": "b", "NVDD_STRICT_PLUGINS": "1"}
    assert Switches.read(env) == Switches(("a",), ("b",), True)
    assert Switches.read(env, allow=["c"], deny=["d"], strict=False) == Switches(("c",), ("b", "d"), False)
    assert Switches.read({}) == Switches(None, (), False)


def test_unknown_names_are_told() -> None:
    manager = PluginManager([entry("one")], allow=["one", "tow"], deny=["dist:nobody"])
    assert manager.notes == (
        "'tow' in NVDD_PLUGINS or NVDD_DISABLE_PLUGINS matches no installed plugin",
        "'dist:nobody' in NVDD_PLUGINS or NVDD_DISABLE_PLUGINS matches no installed plugin",
    )


@pytest.mark.parametrize(("text", "strict"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_strict_flag(text: str, strict: bool) -> None:
    assert Switches.read({"NVDD_STRICT_PLUGINS": text}).strict is strict


def test_strict_flag_refuses_garbage() -> None:
    with pytest.raises(InputError, match="NVDD_STRICT_PLUGINS must be 0 or 1, found 'maybe'"):
        Switches.read({"NVDD_STRICT_PLUGINS": "maybe"})


# -- gate 1 --


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ((), True),
        (("numpy>=99",), True),
        (("nvdd-core>=0.2,<0.3",), True),
        (("NVDD_Core >= 0.2",), True),
        (("nvdd-core-extras>=9",), True),
        (("nvdd-core>=0.3",), False),
        (("nvdd.core<0.2",), False),
        (("numpy", "nvdd-core==0.9"), False),
        (("nvdd-core[testing]>=0.3 ; extra == 'dev'",), True),
        (("nvdd-core>=0.3 ; python_version < '3'",), True),
        (("nvdd-core ==> 1",), False),
    ],
)
def test_gate_one(requires: tuple[str, ...], fits: bool) -> None:
    assert (core_mismatch(requires, "0.2.5") is None) is fits


def test_gate_one_counts_prereleases() -> None:
    assert core_mismatch(("nvdd-core>=0.2",), "0.3.0rc1") is None


def test_gate_one_imports_nothing(here: Fakes) -> None:
    here.add("old", good("old"), requires=("nvdd-core>=77",))
    (record,) = PluginManager().named("old")
    assert record.status is PluginStatus.INCOMPATIBLE
    assert f"requires nvdd-core>=77, found {nvdd_core.__version__}" in record.reason
    assert "fake_old" not in sys.modules


def test_core_version_can_be_given() -> None:
    manager = PluginManager([entry("a", requires=("nvdd-core<0.2",))], core_version="0.2.0")
    assert manager.records()[0].status is PluginStatus.INCOMPATIBLE


# -- what rows require --


def test_unmet() -> None:
    assert unmet(()) is None
    assert unmet(("pluggy>=1", "nobody-has-this; python_version < '3'")) is None
    assert unmet(("nobody-has-this>=2",)) == (
        "needs nobody-has-this>=2, which is not installed: pip install 'nobody-has-this>=2'"
    )


def test_unmet_names_who_pins(here: Fakes) -> None:
    here.add("lib", None, dist="fake-lib", version="0.5")
    here.add("pins", None, dist="fake-pins", requires=("fake_lib>=0.5 ; python_version > '3'", "nonsense =="))
    here.add("lax", None, dist="fake-lax", requires=("fake-lib", "fake-library>=9"))
    assert wanted_by("fake-lib", "fake-lib==0.4.4") == ("fake-pins",)
    reason = unmet(("fake-lib==0.4.4",))
    assert reason == (
        "needs fake-lib==0.4.4, found 0.5 because of fake-pins; use a separate environment for the one or the other"
    )
