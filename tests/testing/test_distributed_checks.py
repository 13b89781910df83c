"""The checks on several ranks pass for a good model and fail for one with exactly one thing wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nvdd_core import testing as kit
from nvdd_core.errors import DistributedError, InputError
from nvdd_core.runtime import DistributedModel
from nvdd_core.testing import (
    ConformanceError,
    ModelSource,
    NotApplicable,
    PartlyChecked,
    distributed_checks,
    evaluate,
    ranks as kit_ranks,
)
from tests.testing.toys import CUTOFF, load

pytestmark = pytest.mark.distributed

STRUCTURES = kit.default_structures(CUTOFF, ("Ar", "Kr"))
ROD = STRUCTURES["rod"]
TWO = (1, 2)


def toy(bug: str = "") -> ModelSource:
    return ModelSource("tests.testing.toys:load", {"bug": bug})


def _halo(source: Any, **_: Any) -> None:
    kit.assert_halo_is_complete(source, kit.chain(5.0 * CUTOFF, CUTOFF / 2.34))


@pytest.mark.timeout(280)
def test_a_good_model_passes() -> None:
    kit.assert_parity(toy(), STRUCTURES, TWO)
    kit.assert_parity(toy("extra"), {name: STRUCTURES[name] for name in ("atom", "rod")}, (4,), "halo")
    kit.assert_gradient_parity(toy(), ROD, (2, 4))
    kit.assert_uneven_split(toy(), ROD, TWO)
    kit.assert_empty_rank(toy(), ROD, TWO)
    kit.assert_migration(toy(), ROD, TWO)
    _halo(toy())
    budgets = kit.assert_communication_is_steady(toy(), ROD, TWO)
    assert budgets["2 ranks, halo"]["all_reduce"] == 1
    assert budgets["2 ranks, halo"]["exchange"] > budgets["2 ranks, wide_halo"]["exchange"]
    kit.assert_failure_reaches_caller(toy(), ROD)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("check", "bug", "message"),
    [
        (kit.assert_parity, "two ranks", "energy of 'the structure' on 2 ranks, strategy halo"),
        (kit.assert_parity, "extra on two ranks", "charge of 'the structure' on 2 ranks, strategy halo"),
        (kit.assert_parity, "stale halo", "energy of 'the structure' on 2 ranks"),
        (kit.assert_parity, "detached", "of 'the structure' on 2 ranks"),
        (kit.assert_gradient_parity, "detached", "gradient for positions of a loss on 2 ranks"),
        (kit.assert_uneven_split, "uneven", "on 2 ranks"),
        (kit.assert_migration, "cached", "on 2 ranks, strategy halo, evaluation"),
        (kit.assert_communication_is_steady, "chatty", "2 ranks, halo: rank 0 made"),
        (_halo, "shallow", "beyond 1 layers x 4 A"),
        (kit.assert_empty_rank, "empty", "no rows here"),
    ],
)
def test_a_bad_model_fails(check: Any, bug: str, message: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(toy(bug), ROD, ranks=TWO) if check is not _halo else check(toy(bug))
    assert message in str(caught.value)
    assert "\nSee docs/conformance.md#" in str(caught.value)
    if bug == "uneven":
        kit.assert_parity(toy(bug), ROD, TWO, "halo")


class _Silent:
    """A pool in which an error is lost."""

    def run(self, *args: Any, **kwargs: Any) -> list[None]:
        return [None, None]


class _Vague(_Silent):
    """A pool that says that something went wrong, but not what."""

    def run(self, *args: Any, **kwargs: Any) -> list[None]:
        raise DistributedError("no answer after 60 s")


def test_a_lost_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, message in (
        (_Silent(), "the caller got no error"),
        (_Vague(), "the caller got DistributedError"),
    ):
        monkeypatch.setattr(distributed_checks, "pool", lambda n, ranks=ranks: ranks)
        with pytest.raises(ConformanceError, match=message):
            kit.assert_failure_reaches_caller(toy(), ROD)


def test_a_row_on_two_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice:
        def run(self, function: Any, source: Any, jobs: Any) -> Any:
            from nvdd_core.comm import Mesh

            return [function(Mesh.single("cpu"), source, jobs) for _ in range(2)]

    monkeypatch.setattr(distributed_checks, "pool", lambda n: Twice())
    with pytest.raises(ConformanceError, match="the ranks own 256 rows, expected each of 128 once"):
        kit.assert_parity(toy(), ROD, (2,), "halo")


def test_gradients_need_node_energies_and_a_graph() -> None:
    direct = ModelSource("tests.testing.toys:load_direct")
    with pytest.raises(NotApplicable, match="computes forces itself"):
        kit.assert_gradient_parity(direct, ROD, TWO)


@pytest.mark.timeout(120)
def test_forces_that_cannot_be_differentiated_are_reported() -> None:
    with pytest.warns(PartlyChecked, match="gradients of forces were not compared: You must implement"):
        kit.assert_gradient_parity(toy("once"), ROD, TWO)
    kind = type("Mine", (kit.Conformance,), {"model": load, "options": {"bug": "once"}, "ranks": TWO})
    suite = type("Short", (kit.Conformance,), {"test_gradient_parity": _gradients, **_OF_THE_KIT})
    results = {r.check: r for r in kit.run(kind, [suite])}
    assert results["gradient_parity"].outcome == "ok", results
    assert "gradients of forces were not compared" in results["gradient_parity"].reason


def _gradients(self: Any) -> None:
    kit.assert_gradient_parity(self.subject.source, ROD, self.ranks)


_OF_THE_KIT = {"__module__": kit.DistributedSuite.__module__}


def test_a_broken_derivative_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConformanceError, match="a gradient of another shape"):
        kit.assert_gradient_parity(toy("fragile"), ROD, TWO)

    def refuse(*args: Any) -> None:
        raise InputError("something else")

    monkeypatch.setattr(DistributedModel, "differentiable", refuse)
    with pytest.raises(ConformanceError, match="InputError: something else"):
        kit.assert_gradient_parity(toy(), ROD, TWO)


def test_one_process_evaluates_each_structure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr(distributed_checks, "evaluate", counted)
    some = {name: STRUCTURES[name] for name in ("atom", "crystal")}
    kit.assert_parity(toy(), some, TWO)
    assert len(calls) == 2
    kit.assert_migration(toy(), ROD, (2,))
    assert len(calls) == 2 + 5


def test_nothing_is_kept_after_the_ranks() -> None:
    kit.assert_parity(toy(), STRUCTURES["atom"], (1,), "halo")
    assert kit_ranks._KEPT
    kit.close_pools()
    assert not kit_ranks._KEPT


def test_a_model_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "filed.py").write_text("from beside import load\n")
    (tmp_path / "beside.py").write_text("from tests.testing.toys import load\n")
    kit.assert_parity(f"{tmp_path}/filed.py:load", STRUCTURES["crystal"], TWO, "halo")


def test_models_can_be_given_in_every_way() -> None:
    model = toy().load()
    for given in (model, load, "tests.testing.toys:load"):
        kit.assert_parity(given, STRUCTURES["crystal"], (2,), "halo")
    kit.assert_parity("lj", STRUCTURES["crystal"], (2,), strategy=["halo", "wide_halo"])
