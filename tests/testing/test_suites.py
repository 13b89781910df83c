"""The suites as an author and as a user meet them: overriding, capabilities, pytest, the command, the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from nvdd_core import testing as kit
from nvdd_core.testing import (
    Conformance,
    ConformanceError,
    ModelSuite,
    NotApplicable,
    Tolerance,
    no,
    only,
    overrides,
    runner,
)
from nvdd_core.testing.base import standard_tests
from nvdd_core.testing.suites import SUITES

ROOT = Path(__file__).parents[2]


class Toy(Conformance):
    """The good toy."""

    model = "tests.testing.toys:load"
    symbol = ("Ar", "Kr")


def _run(kind: type, test: str) -> str:
    """Run one test of a class and say how it ended."""
    try:
        getattr(kind(), test)()
    except NotApplicable as reason:
        return f"skipped: {reason}"
    except ConformanceError as error:
        return f"failed: {error}"
    return "ok"


# -- overriding --


def test_an_override_needs_a_reason() -> None:
    class Silent(Toy, ModelSuite):
        def test_rotation(self) -> None: ...

    class Gone(Toy, ModelSuite):
        test_rotation = None  # type: ignore[assignment]

    class Explained(Toy, ModelSuite):
        @overrides(reason="the model is for crystals along the axes")
        def test_rotation(self) -> None: ...

    class Extended(Toy, ModelSuite):
        def test_mine(self) -> None: ...

    for bad in (Silent, Gone):
        found = _run(bad, "test_standard_tests_are_kept")
        assert f"{bad.__name__}.test_rotation overrides a standard test without a reason" in found
        assert found.endswith("#standard-tests-are-kept")
    for good in (Explained, Extended):
        assert _run(good, "test_standard_tests_are_kept") == "ok"
    with pytest.raises(ConformanceError, match="needs a reason"):
        overrides(reason=" ")


def test_a_mixin_that_overrides_is_found_too() -> None:
    class Base(Toy):
        def test_deterministic(self) -> None: ...

    class Derived(Base, ModelSuite): ...

    assert "test_deterministic overrides" in _run(Derived, "test_standard_tests_are_kept")


def test_an_override_is_reported_with_its_reason() -> None:
    class Mine(Toy):
        @overrides(reason="because")
        def test_rotation(self) -> None: ...

    results = {r.check: r for r in kit.run(Mine, [_only_rotation()])}
    assert results["rotation"].reason == "because"
    assert results["rotation"].outcome == "ok"


def _only_rotation() -> Any:
    """A suite of the kit with one test, to keep the run short."""
    names = {"test_rotation": ModelSuite.test_rotation}
    return type("Short", (Conformance,), {**names, "__module__": ModelSuite.__module__})


# -- capabilities and tolerances --


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        ({"stress": False}, "'stress' is False without a reason"),
        ({"stress": no(" ")}, "without a reason"),
        ({"strategies": only("halo", reason="")}, "without a reason"),
        ({"strss": no("x")}, "there is no 'strss'.*stress"),
    ],
)
def test_a_capability_needs_a_reason(capabilities: dict[str, object], message: str) -> None:
    kind = type("Mine", (Toy, ModelSuite), {"capabilities": capabilities})
    assert re.search(message, _run(kind, "test_reductions_have_reasons"))


def test_a_missing_capability_skips_with_the_reason() -> None:
    kind = type("Mine", (Toy, ModelSuite), {"capabilities": {"rotation_invariant": no("a lattice model")}})
    assert _run(kind, "test_rotation") == "skipped: rotation_invariant: no, a lattice model"
    assert _run(kind, "test_reductions_have_reasons") == "ok"


def test_strategies_can_be_limited() -> None:
    kind = type("Mine", (Toy, ModelSuite), {"capabilities": {"strategies": only("halo", reason="untested")}})
    assert [s.value for s in kind().subject.strategies] == ["halo"]
    assert len(type("All", (Toy, ModelSuite), {})().subject.strategies) == 3


def test_a_changed_tolerance_needs_a_reason() -> None:
    for tolerances, message in (
        ({"TIGHT": Tolerance("TIGHT", 1e-6, 0.0)}, "'TIGHT' has no reason"),
        ({"TIGHTER": Tolerance("TIGHTER", 0.0, 0.0, "x")}, "there is no tolerance 'TIGHTER'"),
    ):
        kind = type("Mine", (Toy, ModelSuite), {"tolerances": tolerances})
        assert message in _run(kind, "test_reductions_have_reasons")
    wide = {"TIGHT": Tolerance("TIGHT", 1.0, 1.0, "a test")}
    kind = type("Mine", (Toy, ModelSuite), {"tolerances": wide, "options": {"bug": "order"}})
    assert _run(kind, "test_row_order_is_free") == "ok"


def test_a_missing_stress_needs_a_reason() -> None:
    kind = type("Mine", (Toy, ModelSuite), {"options": {"bug": "no stress"}})
    assert "say why: capabilities = {'stress': no('...')}" in _run(
        kind, "test_stress_matches_finite_differences"
    )


def test_structures_without_open_boundaries() -> None:
    kind = type("Mine", (Toy, ModelSuite), {"capabilities": {"open_boundaries": no("Ewald")}})
    assert set(kind().subject.structures) == {"crystal", "triclinic", "rod"}


def test_spec_for_another_strategy() -> None:
    kind = type("Mine", (Toy, kit.SpecSuite), {"options": {"bug": "wrong strategy"}})
    assert "returned a spec for 'halo'" in _run(kind, "test_spec_fits_strategy")


def test_nothing_is_set() -> None:
    kind = type("Mine", (ModelSuite,), {})
    assert "set the class attribute" in _run(kind, "test_deterministic")


def test_any_error_ends_with_a_link() -> None:
    kind = type("Mine", (Toy, ModelSuite), {"model": "tests.testing.absent:load"})
    found = _run(kind, "test_batch_equals_alone")
    assert "ModuleNotFoundError" in found
    assert found.endswith("See docs/conformance.md#batch-equals-alone")


def test_adapters_of_a_plugin(fakes: Any) -> None:
    """Declared adapters are found through the plugin, checked, and left as they were."""
    from nvdd_core.plugins import PluginManager, use_manager
    from tests.testing import foreign
    from tests.testing.conftest import install

    mine = type("Mine", (Conformance,), {"plugin": "kit"})
    with use_manager(install(fakes)):
        outcomes = {r.check: r.outcome for r in kit.run(mine, [kit.AdapterSuite])}
    assert outcomes.pop("op_is_well_formed") == "skipped"
    assert set(outcomes.values()) == {"ok"}
    assert foreign.VALUE == [1, 2]
    for module in [m for m in sys.modules if m.startswith("kit_good")]:
        del sys.modules[module]
    leaving = "from tests.testing import foreign\nADAPTER = foreign.leaving('trace')\n"
    (fakes.root / "site" / "kit_good" / "adapter.py").write_text(leaving)
    with use_manager(PluginManager()):
        results = {r.check: r for r in kit.run(mine, [kit.AdapterSuite])}
    del foreign.Thing.trace  # type: ignore[attr-defined]
    assert results["restores"].outcome == "failed"
    assert "tests.testing.foreign.Thing.trace" in results["restores"].reason


# -- as pytest sees it --

AUTHOR = """
from nvdd_core.testing import Conformance, ModelSuite, PluginSuite, no

class Mine(Conformance):
    model = "tests.testing.toys:load"
    options = {"bug": "mean"}
    symbol = ("Ar", "Kr")
    capabilities = {"rotation_invariant": no("not today")}

class TestModel(Mine, ModelSuite): ...
"""


def test_pytest_collects_and_reports(tmp_path: Path) -> None:
    (tmp_path / "test_author.py").write_text(AUTHOR)
    tests = ["replica_doubles_energy", "rotation", "row_order_is_free", "standard_tests_are_kept"]
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-k", " or ".join(tests)]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    assert "rotation_invariant: no, not today" in done.stdout
    assert "See docs/conformance.md#replica-doubles-energy" in done.stdout


# -- the page --


def test_every_check_is_documented() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    headings = {
        line.lstrip("# ").strip().lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for suite in SUITES:
        for test in standard_tests(suite):
            assert test.removeprefix("test_").replace("_", "-") in headings, (suite.__name__, test)


def test_plain_functions_have_the_tests_names() -> None:
    tests = {name for suite in SUITES for name in standard_tests(suite)}
    for name in kit.__all__:
        if name.startswith("assert_"):
            assert f"test_{name.removeprefix('assert_')}" in tests, name


# -- the command --

COMMAND = """
import sys
sys.modules["pytest"] = sys.modules["_pytest"] = None
from nvdd_core.testing import runner
runner.SUITES = ()
SUITES = (runner.PluginSuite, runner.SpecSuite)
runner.ModelSuite = runner.DistributedSuite = runner.AdapterSuite = type("None_", (runner.Conformance,), {})
runner.main()
"""


@pytest.mark.parametrize("good", [True, False])
def test_the_command(tmp_path: Path, fakes: Any, good: bool) -> None:
    """Plugin and specs only, without pytest, away from the sources; what the rest says is tested above."""
    from tests.testing.conftest import install

    install(fakes, requires=("nvdd-core>=0.1,<0.2",) if good else ("nvdd-core>=0.1",))
    environ = fakes.env(OMP_NUM_THREADS="1")
    environ["PYTHONPATH"] += f":{ROOT}"
    command = [sys.executable, "-c", COMMAND, "kit", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == (0 if good else 1), done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    outcomes = {row["check"]: row for row in document["checks"]}
    assert {"listing_is_light", "spec_round_trip", "standard_tests_are_kept"} <= outcomes.keys()
    row = outcomes["requirement_is_bounded"]
    assert row["outcome"] == ("ok" if good else "failed")
    assert row["link"] == "docs/conformance.md#requirement-is-bounded"
    assert all(r["outcome"] == "ok" for name, r in outcomes.items() if name != "requirement_is_bounded")


@pytest.mark.parametrize(
    ("arguments", "said"), [(["absent"], "'absent'"), (["lj", "--model", "typo"], "no model 'typo'")]
)
def test_the_command_for_what_is_not_there(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvdd_core.testing", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr


def test_options_of_the_command_are_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "subjects", lambda name, models, attributes: given.append(attributes) or {})
    monkeypatch.setattr(runner, "_all", lambda name, chosen: [])
    arguments = ["kit", "--option", "cutoff=8.5", "--option", "shift=force", "--option", "flag=true"]
    assert CliRunner().invoke(runner.main, arguments).exit_code == 0
    assert given[0]["options"] == {"cutoff": 8.5, "shift": "force", "flag": True}
    refused = CliRunner().invoke(runner.main, ["kit", "--option", "cutoff"])
    assert "KEY=VALUE" in refused.output


def test_the_table() -> None:
    from nvdd_core.testing.runner import emit

    class Mine(Toy):
        capabilities: ClassVar = {"rotation_invariant": no("a lattice model")}

    rows = list(kit.run(Mine, [_only_rotation()], name="toy"))
    text = _captured(lambda: emit("toy", {"toy": Mine}, rows, as_json=False))
    assert "rotation_invariant: no, a lattice model" in text
    assert "toy: capability rotation_invariant: no: a lattice model" in text
    assert "3 checks, 0 failed" in text


def _captured(action: Any) -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        action()
    return textwrap.dedent(out.getvalue())


def test_a_plugin_brings_its_own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from nvdd_core.testing import runner

    for package, module in (("kit_with", "conformance"), ("kit_without", "other")):
        (tmp_path / package).mkdir()
        for name in ("__init__", module):
            (tmp_path / package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {
        name: SimpleNamespace(entry=SimpleNamespace(value=f"{name}._plugin"))
        for name in ("kit_with", "kit_without")
    }
    monkeypatch.setattr(
        runner, "default_manager", lambda: SimpleNamespace(named=lambda name: (entries[name],))
    )
    assert runner.own_profile("kit_with") == "kit_with.conformance:Profile"
    assert runner.own_profile("kit_without") is None
