"""The checks of specs pass for the presets and fail for specs that lose something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from nvdd_core import testing as kit
from nvdd_core.runtime import SPEC_MPNN_GP, SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.testing import ConformanceError

CHECKS = [
    kit.assert_spec_round_trip,
    kit.assert_spec_is_frozen,
    kit.assert_spec_can_be_copied,
    kit.assert_spec_merge_is_lossless,
    kit.assert_spec_refuses_unknown_keys,
]


@dataclass(frozen=True)
class Leaky(MLIPSpec):
    """Has a field that no reader reads."""

    flavour: str = "sweet"


@dataclass(frozen=True)
class Lossy(MLIPSpec):
    """Forgets a named field on its way through JSON."""

    def to_dict(self) -> dict[str, Any]:
        body = super().to_dict()
        body.pop("given", None)
        return body


class Soft(MLIPSpec):
    """Can be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class Stubborn(MLIPSpec):
    """Keeps its own outputs when something is merged onto it."""

    def __or__(self, other: object) -> Any:
        return self.replace(outputs={})


class Lenient(MLIPSpec):
    """Reads anything."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Any:
        return cls()


class Hollow(MLIPSpec):
    """A pickle of it is empty."""

    def __reduce__(self) -> Any:
        return Hollow, ()


_GIVEN = {"outputs": SPEC_MPNN_HALO.outputs, "distribution": SPEC_MPNN_HALO.distribution}


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", [SPEC_MPNN_HALO, SPEC_MPNN_GP, SPEC_MPNN_WIDE, MLIPSpec()], ids=range(4))
def test_presets_pass(check: Any, spec: MLIPSpec) -> None:
    check(spec)


@pytest.mark.parametrize(
    ("check", "spec"),
    [
        (kit.assert_spec_round_trip, Leaky(**_GIVEN)),
        (kit.assert_spec_round_trip, Lossy(**_GIVEN)),
        (kit.assert_spec_is_frozen, Soft(**_GIVEN)),
        (kit.assert_spec_can_be_copied, Hollow(**_GIVEN)),
        (kit.assert_spec_merge_is_lossless, Stubborn(**_GIVEN)),
        (kit.assert_spec_refuses_unknown_keys, Lenient(**_GIVEN)),
    ],
)
def test_bad_specs_fail(check: Any, spec: MLIPSpec) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(spec)
    anchor = check.__name__.removeprefix("assert_").replace("_", "-")
    assert str(caught.value).endswith(f"\nSee docs/conformance.md#{anchor}")


def test_merge_onto_the_preset_names_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = SPEC_MPNN_HALO.replace(outputs={})
    monkeypatch.setattr(MLIPSpec, "__or__", lambda self, other: lost)
    with pytest.raises(ConformanceError, match=r"preset \| spec.outputs: the entry 'energy' is lost"):
        kit.assert_spec_merge_is_lossless(SPEC_MPNN_HALO)


def test_workers() -> None:
    kit.assert_specs_reach_workers([SPEC_MPNN_HALO, SPEC_MPNN_WIDE])
    with pytest.raises(ConformanceError, match=r"specs-reach-workers$"):
        kit.assert_specs_reach_workers([Lenient(**_GIVEN)])
