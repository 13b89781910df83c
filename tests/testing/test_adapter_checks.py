"""The checks of adapters pass for good ones and fail for those that leave traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvdd_core import testing as kit
from nvdd_core.testing import ConformanceError, NotApplicable, adapter_checks
from tests.testing import foreign

CHECKS = [
    kit.assert_restores,
    kit.assert_restores_after_exception,
    kit.assert_nested_use_restores,
    kit.assert_second_owner_refused,
    kit.assert_adapter_round_trip,
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    value = foreign.VALUE
    yield
    foreign.VALUE = value
    if hasattr(foreign.Thing, "trace"):
        del foreign.Thing.trace


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("adapter", foreign.good(), ids=str)
def test_good_adapters_pass(check: Any, adapter: Any) -> None:
    check(adapter)
    assert foreign.VALUE == [1, 2]
    assert foreign.Thing().answer() == 42


@pytest.mark.parametrize("fault", ["stays", "copy", "trace"])
@pytest.mark.parametrize("check", CHECKS[:4], ids=lambda f: f.__name__)
def test_traces_are_found(check: Any, fault: str) -> None:
    with pytest.raises(ConformanceError, match=r"not the objects that they were"):
        check(foreign.leaving(fault))


def test_an_adapter_that_does_nothing_fails() -> None:
    with pytest.raises(ConformanceError, match=r"changed nothing\nSee docs/conformance.md#restores"):
        kit.assert_restores(foreign.leaving("idle"))


def test_an_adapter_that_json_changes_fails() -> None:
    with pytest.raises(ConformanceError, match="as JSON and back"):
        kit.assert_adapter_round_trip(foreign.leaving("none"))


class _Careless:
    """A registry without a table of owners and without a count of uses."""

    def __init__(self, adapters: list[Any], owner: str = "", root: Any = None) -> None:
        self._patches = [adapter.resolve(root) for adapter in adapters]
        self._applied = False

    def __enter__(self) -> None:
        if not self._applied:
            for patch in self._patches:
                patch.apply()
        self._applied = True

    def __exit__(self, *error: object) -> None:
        if self._applied:
            for patch in self._patches:
                patch.undo()
        self._applied = False


def test_careless_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_checks, "AdapterRegistry", _Careless)
    adapter = foreign.good()[1]
    with pytest.raises(ConformanceError, match="inner exit undid"):
        kit.assert_nested_use_restores(adapter)
    with pytest.raises(ConformanceError, match="AdapterConflictError"):
        kit.assert_second_owner_refused(adapter)


class _Op:
    """What the check of operators reads of an op adapter."""

    kind = "op"

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self) -> Any:
        return type("Status", (), {"target": self.name})


@torch.library.custom_op("nvdd_test_kit::good", mutates_args=())
def _good(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


_good.register_fake(torch.empty_like)


@torch.library.custom_op("nvdd_test_kit::liar", mutates_args=())
def _liar(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2.0)
    return x.clone()


_liar.register_fake(torch.empty_like)


def test_operators() -> None:
    x = torch.ones(3)
    kit.assert_op_is_well_formed(_Op("nvdd_test_kit::good"), {"nvdd_test_kit::good": [(x,)]})
    with pytest.raises(ConformanceError, match="op-is-well-formed"):
        kit.assert_op_is_well_formed(_Op("nvdd_test_kit::liar"), {"nvdd_test_kit::liar": [(x,)]})
    with pytest.raises(NotApplicable, match="give op_samples"):
        kit.assert_op_is_well_formed(_Op("nvdd_test_kit::good"), {})
    with pytest.raises(NotApplicable, match="no operator"):
        kit.assert_op_is_well_formed(_Op("nvdd_test_kit::absent"), {"nvdd_test_kit::absent": [(x,)]})
