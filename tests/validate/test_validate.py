"""What `trace_and_validate` says of models that are right and of models with one deliberate fault."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path

import ase
import pytest

from nvdd_core.errors import InputError
from nvdd_core.runtime import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.runtime.source import ModelSource
from nvdd_core.validate import Cause, Place, Relation, ValidationReport, View, trace_and_validate
from tests.cases import oracle
from tests.validate import models
from tests.validate.conftest import Check


def line(place: Place | None) -> str:
    """The text of the line that a report names."""
    assert place is not None
    assert place.file.endswith("tests/validate/models.py")
    return linecache.getline(place.file, place.line).strip()


def fixes(report: ValidationReport) -> dict[str, tuple[str, str]]:
    return {fix.field: (fix.before, fix.after) for fix in report.fixes}


def test_an_output_that_is_a_single_number(check: Check) -> None:
    report = check("Scalar")
    assert report.passed, report.text()
    (lowest,) = [o for o in report.outputs if o.name == "lowest"]
    assert lowest.gradient is not None


@pytest.mark.parametrize(("name", "cause"), [("LeavesAtOnce", Cause.REFERENCE), ("Leaves", Cause.RAISED)])
def test_a_model_that_wants_to_end_the_process(check: Check, name: str, cause: Cause) -> None:
    report = check(name)
    assert (report.passed, report.cause) == (False, cause)
    assert report.error is not None
    assert "SystemExit" in report.error.message


@pytest.mark.parametrize("name", ["Pair", "TwoLayers", "RightGate", "EnergyOnce"])
def test_a_right_model_passes_at_once(check: Check, name: str) -> None:
    report = check(name)
    assert report.passed, report.text()
    assert (report.cause, report.fixes, report.divergence, report.evaluations) == (None, (), None, 1)
    assert (report.missing, report.helpers, report.warning) == ((), (), "")
    assert report.spec is not None
    wanted = {"energy", "forces", "stress"} | ({"node_energy"} if name != "EnergyOnce" else set())
    assert {o.name for o in report.outputs} == wanted
    assert all(o.gradient is not None and o.gradient.passed for o in report.outputs)
    assert report.n_rows == 144
    assert {t.kind for t in report.traffic} >= {"exchange", "reverse", "all_reduce"}


def test_tolerances_are_those_of_rule_w(check: Check) -> None:
    found = {o.name: o.value.tolerance for o in check("Pair").outputs}
    assert 1e-11 <= found["energy"] < 1e-9  # a relative 1e-11 above one eV an atom
    assert found["forces"] == pytest.approx(1e-9)


# name, cause, text of the line to look at, fix
FAULTS: list[tuple[str, Cause, str, dict[str, tuple[str, str]]]] = [
    ("Forgot", Cause.STALE_GHOSTS, "# stale", {}),
    (
        "StaleByMode",
        Cause.STALE_GHOSTS,
        "h.index_add_(0, receiver, w)",
        {"distribution.storage.scatter": ("local", "refresh")},
    ),
    (
        "Gate",
        Cause.WRONG_SCATTER,
        "eta = eta.index_add(0, sender",
        {"distribution.storage.scatter": ("refresh", "halo_correction")},
    ),
    (
        "SelfTerm",
        Cause.WRONG_SCATTER,
        "h = h.index_add(0, everyone",
        {"distribution.storage.scatter": ("halo_correction", "refresh")},
    ),
    ("EnergyTwice", Cause.COUNTED_TWICE, "", {"outputs.energy.reduce": ("all_reduce", "owned_only")}),
    ("EnergyShare", Cause.OUTPUT_PARTIAL, "", {"outputs.energy.reduce": ("owned_only", "all_reduce")}),
    ("GraphShare", Cause.OUTPUT_PARTIAL, "", {"outputs.charge.reduce": ("owned_only", "all_reduce")}),
    ("NodeShares", Cause.OUTPUT_PARTIAL, "", {"outputs.density.reduce": ("none", "all_reduce")}),
    ("SummedTwice", Cause.COUNTED_TWICE, "all_reduce_sum_symmetric(total, mesh)", {}),
    ("LocalHelper", Cause.PARTIAL_SUM, "return values.sum()", {}),
    ("GhostHelper", Cause.GHOSTS_COUNTED, "return values.sum()", {}),
    ("LocalMean", Cause.PARTIAL_SUM, "mean = node.mean()", {}),
    (
        "SegmentMean",
        Cause.PARTIAL_SUM,
        ".index_add(0, batch.system, node)",
        {"distribution.system_reductions": ("False", "True")},
    ),
    (
        "GraphOutput",
        Cause.GHOSTS_COUNTED,
        "charge = node.new_zeros(batch.n_systems)",
        {
            "distribution.system_reductions": ("False", "True"),
            "outputs.charge.reduce": ("all_reduce", "owned_only"),
        },
    ),
    ("Scripted", Cause.SCRIPTED, "h = scripted_sum(", {}),
    ("LongSighted", Cause.MISSING_GHOSTS, "w.sum(1)", {}),
    ("Detached", Cause.GRADIENT, "", {}),
    ("Raises", Cause.RAISED, "this toy can't share", {}),
]


@pytest.mark.parametrize(("name", "cause", "text", "fix"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_told(
    check: Check, name: str, cause: Cause, text: str, fix: dict[str, tuple[str, str]]
) -> None:
    report = check(name)
    assert not report.passed
    assert report.cause is cause, report.text()
    if text:
        assert text in line(report.place)
    else:
        assert report.place is None or cause is not Cause.COUNTED_TWICE
    assert fixes(report) == fix
    assert report.fixed == bool(fix)
    assert (report.spec is not None) == bool(fix)
    assert report.next_action
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["cause"] == cause.value


@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS if fault[3]])
def test_the_spec_found_is_right(check: Check, name: str) -> None:
    found = check(name).spec
    assert found is not None
    again = check(name, spec=MLIPSpec.from_dict(found.to_dict()))
    assert again.passed, again.text()
    assert (again.evaluations, again.fixes) == (1, ())


def test_no_fix_is_looked_for_unless_asked(check: Check) -> None:
    report = check("StaleByMode", fix=False)
    assert (report.evaluations, report.spec, report.fixes, report.cause) == (1, None, (), Cause.STALE_GHOSTS)


def test_two_faults_are_mended_together(check: Check) -> None:
    report = check("TwoFaults")
    assert report.spec is not None, report.text()
    assert fixes(report) == {
        "distribution.storage.scatter": ("local", "refresh"),
        "outputs.charge.reduce": ("owned_only", "all_reduce"),
    }


def test_the_first_difference_is_named(check: Check) -> None:
    report = check("Forgot")
    first = report.divergence
    assert first is not None
    assert "h[sender]" in line(first.place)
    assert (first.view, first.relation, first.occurrence) == (View.EDGES, Relation.DIFFERENT, 0)
    assert first.op.endswith("__getitem__")
    assert "# stale" in line(first.stale)
    forces = next(o for o in report.outputs if o.name == "forces")
    assert not forces.value.passed
    assert len(forces.value.worst) == 5
    assert forces.gradient is not None
    assert not forces.gradient.passed


def test_worst_rows_are_global_ids(check: Check, atoms: ase.Atoms) -> None:
    """Rows that lack a neighbour's neighbour lie within a cutoff of a face between the two ranks."""
    worst = next(o for o in check("Forgot").outputs if o.name == "node_energy").value.worst
    x, length = atoms.positions[:, 0], atoms.cell[0, 0]
    for row in worst:
        to_face = min(abs(x[row] - face) for face in (0.0, length / 2, length))
        assert to_face < oracle.CUTOFF + 0.2


def test_modules_are_named_and_their_blocks_refreshed(check: Check) -> None:
    report = check("Stacked")
    assert report.cause is Cause.STALE_GHOSTS
    assert report.place is not None
    assert report.place.module == "blocks.0"
    assert report.divergence is not None
    assert report.divergence.place.module == "blocks.1"
    assert set(fixes(report)) == {"distribution.third_party_helpers"}
    again = check("Stacked", spec=report.spec)
    assert again.passed
    assert [(a.kind, str(a.state)) for a in again.adapters] == [("method", "restored")]


def test_helpers_whose_results_add_up_are_listed(check: Check) -> None:
    (helper,) = check("LocalHelper").helpers
    assert (helper.place.function, helper.relation, helper.calls) == ("local_total", Relation.ADDS_UP, 1)


def test_scripted_code_is_listed_with_its_scatters(check: Check) -> None:
    (script,) = check("Scripted").scripted
    assert (script.name, script.calls, script.scatters) == ("scripted_sum", 1, ("index_add",))


def test_handlers_that_ran_are_counted(check: Check) -> None:
    report = check("Gate", spec=SPEC_MPNN_HALO)
    assert report.passed, report.text()
    ran = {h.handler: h for h in report.handlers}
    assert ran["row_scatter"].calls == 2  # one on each rank
    assert ran["row_scatter"].bytes > 0


def test_a_reach_beyond_the_cutoff_is_measured(check: Check) -> None:
    report = check("LongSighted")
    assert report.reach is not None
    assert report.reach > oracle.CUTOFF
    assert check("Forgot").reach is None


def test_an_error_on_ranks_is_a_finding(check: Check) -> None:
    report = check("Raises")
    assert report.error is not None
    assert (report.error.type, report.outputs) == ("ValueError", ())
    assert "this toy can't share" in report.error.message


def test_an_error_in_one_process_is_a_finding(check: Check) -> None:
    report = check("RaisesAlone")
    assert (report.cause, report.evaluations) == (Cause.REFERENCE, 0)
    assert "this toy is broken" in line(report.place)


def test_a_small_structure_is_warned_of(check: Check) -> None:
    pos, cell = oracle.fcc(3, 3, 3)
    small = ase.Atoms(f"Ar{len(pos)}", positions=pos, cell=cell, pbc=True)
    report = check("GhostHelper", small)
    assert report.passed  # every rank has all rows, so its sum over them is right by chance
    assert report.warning


@pytest.mark.parametrize("strategy", ["graph_partition", "wide_halo"])
def test_other_strategies(check: Check, strategy: str) -> None:
    report = check("Pair", strategy=strategy)
    assert report.passed, report.text()
    assert (report.strategy, report.warning) == (strategy, "")


def test_float32(check: Check) -> None:
    report = check("TwoLayers", dtype="float32")
    assert report.passed, report.text()
    wrong = check("Gate", dtype="float32")
    assert (wrong.cause, set(fixes(wrong))) == (Cause.WRONG_SCATTER, {"distribution.storage.scatter"})


def test_several_systems_at_once(check: Check, atoms: ase.Atoms) -> None:
    pos, cell = oracle.triclinic()
    other = ase.Atoms("Ar27", positions=pos, cell=cell, pbc=True)
    assert check("TwoLayers", [atoms, other]).passed
    assert check("SegmentMean", [atoms, other]).cause is Cause.PARTIAL_SUM


def test_a_cluster_without_a_cell(check: Check) -> None:
    pos, _ = oracle.fcc(5, 2, 2)
    report = check("TwoLayers", ase.Atoms(f"Ar{len(pos)}", positions=pos))
    assert report.passed, report.text()
    assert "stress" not in {o.name for o in report.outputs}


@pytest.mark.parametrize("n", [1, 2])
def test_a_rank_without_rows(check: Check, n: int) -> None:
    far = ase.Atoms(f"Ar{n}", positions=[[1.2 * k, 0.0, 0.0] for k in range(n)], cell=[30, 30, 30], pbc=True)
    report = check("TwoLayers", far)
    assert report.passed, report.text()
    assert report.warning


def test_forces_without_a_derivative_are_compared_all_the_same(check: Check) -> None:
    report = check("NoSecondDerivative")
    assert report.passed, report.text()
    derived = {o.name for o in report.outputs if o.gradient is not None}
    assert derived == {"energy", "node_energy"}
    assert "forces" in {o.name for o in report.outputs}


def test_a_broken_derivative_is_no_missing_one(check: Check) -> None:
    report = check("BrokenSecondDerivative")
    assert report.cause is Cause.REFERENCE, report.text()
    assert report.error is not None
    assert "of another shape" in report.error.message


def test_an_adapter_without_a_name_stays_where_it_is(check: Check) -> None:
    report = check("NamelessAdapter")
    assert report.passed, report.text()
    assert [a.kind for a in report.adapters] == ["method"]
    wrong = check("NamelessStale")
    assert (wrong.cause, wrong.spec, wrong.evaluations) == (Cause.STALE_GHOSTS, None, 1)
    assert "no other spec was tried" in wrong.warning
    assert "move it to module level" in wrong.warning
    with pytest.raises(InputError, match=r"spec can't be sent to ranks: .* move it to module level"):
        check("Pair", spec=models.NamelessAdapter.spec)


FILE = """
import dataclasses
import own_part
from nvdd_core.adapters import MethodAdapter
from nvdd_core.runtime import MLIPSpec
from nvdd_core.spec import DistributionSpec
from tests.validate.models import Pair

class Foreign:
    def value(self):
        return 1.0

def as_before(original, instance):
    return original(instance)

class Mine(Pair):
    spec = Pair.spec | MLIPSpec(distribution=DistributionSpec(third_party_helpers=(
        MethodAdapter(Foreign, "value", as_before),)))

def load(*, dtype):
    return Mine(dtype, own_part.DEVICE)
"""


def test_a_file_with_another_beside_it(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are running already find both, and a spec that names code of the file."""
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "own_part.py").write_text("import torch\nDEVICE = torch.device('cpu')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    source = ModelSource("mine.py:load")
    for spec in (None, source.load().distribution_spec("halo")):
        report = check("mine.py:load", spec=spec)
        assert report.passed, report.text()
        assert report.model == "mine.py:load"


def test_three_ranks_of_its_own(atoms: ase.Atoms, no_orphans: object) -> None:
    report = trace_and_validate("tests.validate.models:Gate", atoms, ranks=3)
    assert (report.cause, report.ranks) == (Cause.WRONG_SCATTER, 3)
    assert fixes(report) == {"distribution.storage.scatter": ("refresh", "halo_correction")}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ranks": 1}, "at least 2"),
        ({"dtype": "float16"}, "float64 or float32"),
        ({"model": "tests.validate.models:Nothing"}, "Nothing"),
        ({"model": "no_such_model_at_all"}, "no installed plugin"),
        ({"options": {"depth": 3}}, "its options: none"),
        ({"model": "nowhere.py:load"}, "no such file"),
        ({"model": lambda dtype, device: None}, "by name"),
        ({"structure": "nowhere.xyz"}, "nowhere.xyz"),
    ],
)
def test_bad_input_is_refused(atoms: ase.Atoms, flags: dict[str, object], said: str) -> None:
    given = {"model": "tests.validate.models:Pair", "structure": atoms, **flags}
    with pytest.raises(InputError, match=said):
        trace_and_validate(given.pop("model"), given.pop("structure"), **given)


# -- compositions --


def test_a_composition_is_compared_with_its_derivatives(check: Check) -> None:
    report = check("tests.validate.models:TwoLayers+0.5*tests.validate.models:Pair")
    assert report.passed
    assert {output.name for output in report.outputs if output.gradient is not None} >= {"energy", "forces"}


def test_the_members_of_a_wrong_composition_are_to_be_validated_alone(check: Check) -> None:
    report = check("tests.validate.models:StaleByMode+tests.validate.models:Pair")
    assert not report.passed
    assert report.spec is None
    assert "validate StaleByMode, Pair alone" in report.text()
