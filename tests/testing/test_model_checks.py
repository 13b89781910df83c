"""The checks of models pass for a good model and fail for one with exactly one thing wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase
import pytest
import torch

from nvdd_core import testing as kit
from nvdd_core.testing import ConformanceError, ModelSource, NotApplicable, Tolerance
from tests.testing.toys import CUTOFF, load

STRUCTURES = kit.default_structures(CUTOFF, ("Ar", "Kr"))
CRYSTAL, SLAB = STRUCTURES["crystal"], STRUCTURES["slab"]


def toy(bug: str = "", direct: bool = False) -> ModelSource:
    return ModelSource(f"tests.testing.toys:load{'_direct' if direct else ''}", {"bug": bug})


def _batch(source: Any, atoms: ase.Atoms) -> None:
    kit.assert_batch_equals_alone(source, {"a": atoms, "b": STRUCTURES["triclinic"]})


# check, bug that it has to find, whether the bug is of the direct model
MUTANTS: list[tuple[Callable[..., Any], str, bool]] = [
    (kit.assert_forces_match_finite_differences, "sign", True),
    (kit.assert_stress_matches_finite_differences, "half stress", True),
    (kit.assert_row_order_is_free, "order", False),
    (kit.assert_rigid_translation, "absolute", False),
    (kit.assert_rotation, "rotation", False),
    (kit.assert_replica_doubles_energy, "mean", False),
    (_batch, "mean", False),
    (kit.assert_isolated_atoms, "alone", False),
    (kit.assert_deterministic, "random", False),
    (kit.assert_inputs_untouched, "mutates positions", False),
    (kit.assert_inputs_untouched, "mutates numbers", False),
    (kit.assert_inputs_untouched, "mutates fields", False),
    (kit.assert_results_do_not_alias, "alias", True),
    (kit.assert_global_state_kept, "default dtype", False),
    (kit.assert_global_state_kept, "print options", False),
    (kit.assert_float32_close_to_float64, "dtype", False),
    (kit.assert_unknown_element_refused, "mute", False),
    (kit.assert_copies_agree, "forgetful", False),
    (kit.assert_copies_agree, "shared", False),
    (kit.assert_copies_agree, "lambda", False),
]
_NAMES = [f"{function.__name__.removeprefix('assert_')}-{bug}" for function, bug, _ in MUTANTS]


@pytest.mark.parametrize(("function", "bug", "direct"), MUTANTS, ids=_NAMES)
def test_a_bad_model_fails(function: Callable[..., Any], bug: str, direct: bool) -> None:
    with pytest.raises(ConformanceError) as caught:
        function(toy(bug, direct), CRYSTAL)
    assert str(caught.value).splitlines()[-1].startswith("See docs/conformance.md#")


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    "function", dict.fromkeys(function for function, _, _ in MUTANTS), ids=lambda f: f.__name__
)
def test_a_good_model_passes(function: Callable[..., Any], direct: bool) -> None:
    if direct and "global_state" in function.__name__:
        pytest.skip("the same as for the other one")
    function(toy(direct=direct), CRYSTAL)


def test_unfolded_positions_must_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework folds for the model, so what depends on the cell an atom is in has to be put in here."""
    from nvdd_core.testing import symmetry_checks

    def spoilt(model: Any, atoms: ase.Atoms) -> kit.Evaluated:
        good = kit.evaluate(model, atoms)
        return kit.Evaluated(good.totals, {"forces": good.forces + 1e-3 * atoms.positions})

    kit.assert_lattice_translation_of_atoms(toy(), CRYSTAL)
    monkeypatch.setattr(symmetry_checks, "evaluate", spoilt)
    with pytest.raises(ConformanceError, match="unfolded"):
        kit.assert_lattice_translation_of_atoms(toy(), CRYSTAL)


def test_finite_differences_see_a_small_error() -> None:
    """A thousandth of a force is found; so is one in one atom only."""

    class Off(torch.nn.Module):
        def __init__(self, inner: Any, row: int | None) -> None:
            super().__init__()
            self.inner, self.row = inner, row

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name in {"inner", "_modules"} else getattr(self.inner, name)

        def forward(self, batch: Any) -> Any:
            out = self.inner.forward(batch)
            if "forces" in out:
                rows = slice(None) if self.row is None else batch.ids[: batch.n_owned] == self.row
                out["forces"][rows] *= 1.001
            return out

    good = toy(direct=True).load()
    for row in (None, 3):
        with pytest.raises(ConformanceError, match="forces on the structure along direction"):
            kit.assert_forces_match_finite_differences(Off(good, row), CRYSTAL)


def test_a_missing_stress_is_told() -> None:
    with pytest.raises(ConformanceError, match=r"stress-matches-finite-differences"):
        kit.assert_stress_matches_finite_differences(toy("no stress"), CRYSTAL)


def test_a_vacuous_structure_is_refused() -> None:
    from nvdd_core.testing.model_checks import feel_forces

    with pytest.raises(ConformanceError, match="all forces on x are zero"):
        feel_forces("x", toy().load(), STRUCTURES["atom"])


def test_a_model_for_all_elements_is_skipped() -> None:
    class Any_(load(dtype=torch.float64, device="cpu").__class__):  # type: ignore[misc]
        def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
            """Take everything."""

    with pytest.raises(NotApplicable, match="accepts every element"):
        kit.assert_unknown_element_refused(Any_(torch.float64), CRYSTAL)


def test_tolerance_is_used() -> None:
    wide = Tolerance("TIGHT", 1.0, 1.0, "a test")
    kit.assert_row_order_is_free(toy("order"), CRYSTAL, wide)


def test_not_a_number_never_passes() -> None:
    from nvdd_core.testing.tolerances import TIGHT, compare

    with pytest.raises(ConformanceError, match="x: found nan"):
        compare("x", [1.0, float("nan")], [1.0, 2.0], TIGHT)
    with pytest.raises(ConformanceError, match="x: found 1"):
        compare("x", [1.0], [float("nan")], TIGHT)


@pytest.mark.parametrize("safe", [True, False])
def test_checkpoint(tmp_path: Path, safe: bool) -> None:
    path = tmp_path / "toy.pt"
    torch.save(load(dtype=torch.float64, device=torch.device("cpu")).state_dict(), path)
    arguments = ("tests.testing.toys:load_file", str(path), "path", {"safe": safe})
    if safe:
        kit.assert_checkpoint_is_safe(*arguments)
        return
    with pytest.raises(ConformanceError, match="ran code from the file"):
        kit.assert_checkpoint_is_safe(*arguments)
    torch.save(load(dtype=torch.float64, device=torch.device("cpu")), path)
    with pytest.raises(ConformanceError, match="weights_only"):
        kit.assert_checkpoint_is_safe("tests.testing.toys:load_file", str(path))


def test_works_without_pytest_and_under_optimisation(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pytest"] = sys.modules["_pytest"] = None
from nvdd_core.testing import ConformanceError, assert_forces_match_finite_differences, default_structures
from tests.testing.toys import CUTOFF
from nvdd_core.testing import ModelSource
source = ModelSource("tests.testing.toys:load_direct", {"bug": "sign"})
try:
    assert_forces_match_finite_differences(source, default_structures(CUTOFF)["crystal"])
except ConformanceError as error:
    print("refused", str(error).splitlines()[-1])
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "refused See docs/conformance.md#forces-match-finite-differences\n", done.stderr
