"""The checks of a plugin's package pass for a good one and fail for one with exactly one thing wrong."""

from __future__ import annotations

from typing import Any

import pytest

from nvdd_core import testing as kit
from nvdd_core.plugins import use_manager
from nvdd_core.testing import ConformanceError
from tests.plugins._fake import Fakes
from tests.testing.conftest import GOOD, install

CHECKS = [
    kit.assert_entry_point_is_unique,
    kit.assert_listing_is_light,
    kit.assert_names_are_valid,
    kit.assert_refs_resolve,
    kit.assert_requirement_is_bounded,
    kit.assert_package_is_typed,
    kit.assert_listing_row_fits_schema,
    kit.assert_hooks_are_idempotent,
]


def test_a_good_plugin_passes(fakes: Fakes) -> None:
    with use_manager(install(fakes)):
        for check in CHECKS:
            check("kit")


def test_a_missing_plugin_fails_everywhere(fakes: Fakes) -> None:
    for check in CHECKS:
        with pytest.raises(ConformanceError, match=r"no installed distribution has the entry point 'absent'"):
            check("absent")


COUNTING = """
from itertools import count
COUNT = count()
"""
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "torch at the top": (
        kit.assert_listing_is_light,
        {"text": "import torch\n" + GOOD},
        r"imports torch \(_plugin.py:1\)",
    ),
    "numpy by another way": (
        kit.assert_listing_is_light,
        {"text": "__import__('numpy')\n" + GOOD},
        r"without torch, numpy and ase plugin 'kit' is broken",
    ),
    "ase in a hook": (
        kit.assert_listing_is_light,
        {"text": GOOD.replace("    yield SpecDecl", "    import ase\n    yield SpecDecl")},
        r"plugin 'kit' is broken",
    ),
    "nothing declared": (
        kit.assert_names_are_valid,
        {"text": GOOD.partition("@hookimpl\ndef nvdd_declare_specs")[0]},
        "declares neither",
    ),
    "a bad name": (
        kit.assert_names_are_valid,
        {"text": GOOD.replace('ModelDecl("kit"', 'ModelDecl("Kit!"')},
        "the name must match",
    ),
    "a target that isn't there": (
        kit.assert_refs_resolve,
        {"text": GOOD.replace("toys:load", "toys:absent")},
        r"tests.testing.toys:absent can't be imported",
    ),
    "a loader without device": (
        kit.assert_refs_resolve,
        {"text": GOOD.replace("toys:load", "toys:load_no_device")},
        r"can't be called as load\(dtype=..., device=...\)",
    ),
    "a spec that is none": (
        kit.assert_refs_resolve,
        {
            "text": GOOD.replace("runtime:SPEC_MPNN_HALO", "runtime:OUTPUTS").replace(
                ":OUTPUTS", ":DomainConfig"
            )
        },
        "is no MLIPSpec",
    ),
    "an adapter of another kind": (
        kit.assert_refs_resolve,
        {"text": GOOD.replace('"kit/answer", "python"', '"kit/answer", "method"')},
        "declared with kind 'method' but has kind 'python'",
    ),
    "an adapter that is none": (
        kit.assert_refs_resolve,
        {"text": GOOD.replace("kit_good.adapter:ADAPTER", "fractions:Fraction")},
        "has no method 'install'",
    ),
    "no bound": (
        kit.assert_requirement_is_bounded,
        {"requires": ("nvdd-core>=0.1",)},
        "without an upper bound",
    ),
    "no requirement": (kit.assert_requirement_is_bounded, {"requires": ()}, "doesn't require nvdd-core"),
    "another bounded": (
        kit.assert_requirement_is_bounded,
        {"requires": ("numpy<3", "nvdd-core!=0.2")},
        "without an upper bound",
    ),
    "not typed": (kit.assert_package_is_typed, {"typed": False}, "has no file py.typed"),
    "no title": (
        kit.assert_listing_row_fits_schema,
        {"text": GOOD.replace(', title="a toy"', "")},
        "has no title",
    ),
    "counting": (
        kit.assert_hooks_are_idempotent,
        {"text": COUNTING + GOOD.replace('title="a toy"', 'title=f"call {next(COUNT)}"')},
        "declared other info when asked again",
    ),
    "growing": (
        kit.assert_hooks_are_idempotent,
        {
            "text": COUNTING
            + GOOD.replace(
                "    yield ModelDecl(",
                '    yield ModelDecl(f"m{next(COUNT)}", Ref("a:b"))\n    yield ModelDecl(',
            )
        },
        "declared other models when asked again",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_plugin_fails(fakes: Fakes, case: str) -> None:
    check, changes, message = CASES[case]
    with use_manager(install(fakes, **changes)), pytest.raises(ConformanceError, match=message) as caught:
        check("kit")
    anchor = check.__name__.removeprefix("assert_").replace("_", "-")
    assert str(caught.value).endswith(f"\nSee docs/conformance.md#{anchor}")


def test_two_distributions_with_one_name(fakes: Fakes) -> None:
    install(fakes)
    install(fakes, dist="kit-second")
    with pytest.raises(ConformanceError, match=r"exists 2 times: kit-good 1.0 .*kit-second 1.0"):
        kit.assert_entry_point_is_unique("kit")


def test_a_missing_key_of_the_row_is_told(monkeypatch: pytest.MonkeyPatch, fakes: Fakes) -> None:
    from nvdd_core.testing import plugin_checks

    install(fakes)
    row = plugin_checks.plugin_row
    monkeypatch.setattr(
        plugin_checks,
        "plugin_row",
        lambda record: {k: v for k, v in row(record).items() if k != "digest"} | {"api": "1"},
    )
    with pytest.raises(ConformanceError, match="'api' is '1', expected int or NoneType"):
        kit.assert_listing_row_fits_schema("kit")
