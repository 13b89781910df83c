"""The parts of a validation, each against something that is known without it."""

from __future__ import annotations

import linecache
import math
import sys
from pathlib import Path

import ase
import pytest
import torch
from torch.nn.modules import module as torch_modules

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime import SPEC_MPNN_HALO, Batch, DomainConfig, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, OutputKind, OutputSpec, Reduce, ScatterMode
from nvdd_core.validate import View
from nvdd_core.validate.candidates import fixes_between, with_outputs
from nvdd_core.validate.compare import difference
from nvdd_core.validate.gradients import row_numbers
from nvdd_core.validate.observe import Observation, Request, observe
from nvdd_core.validate.places import is_model_code, place_in_traceback
from nvdd_core.validate.source import ModelSource
from nvdd_core.validate.views import Layout, projection, summarise
from tests.cases import oracle


def alone(name: str, atoms: ase.Atoms, *, record: bool = True) -> Observation:
    """Observe a toy model in this process."""
    source = ModelSource(f"tests.validate.models:{name}")
    request = Request(source, Batch.from_ase(atoms), DomainConfig(), torch.float64, record=record)
    return observe(Mesh.single(), request)


def projected(found: Observation, name: str) -> float:
    """The number whose gradient is taken, put together by hand."""
    if name in found.whole:
        flat = found.whole[name].reshape(len(found.whole[name]), -1).double()
        return float(projection(flat.shape[0]) @ flat @ projection(flat.shape[1]))
    flat = found.rows[name].reshape(len(found.rows[name]), -1).double()
    return float(row_numbers(found.owned_ids) @ flat @ projection(flat.shape[1]))


@pytest.mark.parametrize("name", ["energy", "forces", "stress", "node_energy"])
def test_gradients_are_finite_differences(name: str) -> None:
    pos, cell = oracle.triclinic()
    h, atom, axis = 1e-4, 5, 1

    def at(shift: float) -> Observation:
        moved = pos.copy()
        moved[atom, axis] += shift
        return alone("TwoLayers", ase.Atoms("Ar27", positions=moved, cell=cell, pbc=True), record=False)

    middle = at(0.0)
    gradient = middle.gradients[name]
    assert gradient is not None
    row = int((middle.owned_ids == atom).nonzero()[0, 0])
    slope = (projected(at(h), name) - projected(at(-h), name)) / (2 * h)
    assert float(gradient[row, axis]) == pytest.approx(slope, abs=1e-5 * max(1.0, abs(slope)))


def test_recording_changes_nothing_and_leaves_nothing(atoms: ase.Atoms) -> None:
    before = (
        sys.getprofile(),
        torch._C.ScriptFunction.__call__,
        torch._C.ScriptMethod.__call__,
        len(torch_modules._global_forward_hooks),
        len(torch_modules._global_forward_pre_hooks),
    )
    recorded, plain = alone("Scripted", atoms), alone("Scripted", atoms, record=False)
    after = (
        sys.getprofile(),
        torch._C.ScriptFunction.__call__,
        torch._C.ScriptMethod.__call__,
        len(torch_modules._global_forward_hooks),
        len(torch_modules._global_forward_pre_hooks),
    )
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))
    assert torch.equal(recorded.rows["forces"], plain.rows["forces"])
    assert plain.records is None


def test_what_is_recorded(atoms: ase.Atoms) -> None:
    records = alone("TwoLayers", atoms).records
    assert records is not None
    lines = {linecache.getline(r.place.file, r.place.line).strip() for r in records.ops}
    assert all(r.place.file.endswith("tests/validate/models.py") for r in records.ops)
    assert "h = refresh_neighbors(sum_edges(batch, receiver, w))" in lines
    assert {"LocalBatch.edge_vectors", "refresh_neighbors"} <= {r.op for r in records.ops}
    assert len({r.key for r in records.ops}) == len(records.ops)
    power = next(r for r in records.ops if "pow" in r.op and r.place.function == "TwoLayers.forward")
    (made,) = power.inputs
    assert records.ops[made].op.endswith("index_add")
    assert set(records.outputs) == {"node_energy"}
    assert {r.place.function for r in records.helpers} == {"weights", "sum_edges"}


def test_edges_become_sums_at_their_receivers() -> None:
    layout = Layout(torch.tensor([7, 3, 9]), 2, torch.tensor([0, 1, 1, 2]))
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    summary = summarise(values, layout)
    assert summary is not None
    weights = projection(2)
    expected = torch.tensor([1.0, 6.0], dtype=torch.float64) * float(weights[0] + 10.0 * weights[1])
    assert torch.allclose(summary.views[View.EDGES], expected)
    assert View.LOCAL not in summary.views
    local = summarise(values[:3], layout)
    assert local is not None
    assert local.views[View.LOCAL].shape == (3,)
    assert summarise(torch.tensor([1, 2]), layout) is None


def test_a_summary_is_a_copy() -> None:
    layout = Layout(torch.arange(3), 3, torch.zeros(0, dtype=torch.int64))
    values = torch.ones(5, dtype=torch.float64)
    summary = summarise(values, layout)
    values.zero_()
    assert summary is not None
    assert summary.views[View.WHOLE].tolist() == [1.0] * 5


def test_difference() -> None:
    right = torch.tensor([[1.0, 2.0], [3.0, math.nan], [100.0, 0.0]])
    found = right.clone()
    assert difference(found, right, 1e-9).passed
    found[1, 0] += 0.5
    off = difference(found, right, 1e-9)
    assert (off.max_abs, off.max_rel, off.worst) == (0.5, 0.005, (1,))
    assert off.tolerance == pytest.approx(1e-7)
    found[0, 0] = math.nan
    assert difference(found, right, 1e9).max_abs == math.inf
    assert not difference(found[:2], right, 1.0).passed


def test_fixes_are_what_differs() -> None:
    storage = HaloStorage(scatter=ScatterMode.LOCAL)
    other = SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(storage=storage, system_reductions=True))
    other = with_outputs(other, {"charge": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)})
    found = {str(fix) for fix in fixes_between(SPEC_MPNN_HALO, other)}
    assert found == {
        "distribution.storage.scatter: halo_correction -> local",
        "distribution.system_reductions: False -> True",
        "outputs.charge.kind: none -> per_graph",
        "outputs.charge.reduce: none -> all_reduce",
    }
    assert fixes_between(other, other) == ()


def test_whose_code_it_is() -> None:
    assert is_model_code(__file__)
    for foreign in (torch.__file__, linecache.__file__, summarise.__code__.co_filename, "<frozen runpy>"):
        assert not is_model_code(foreign)
    assert is_model_code(ase.__file__)  # installed packages may hold the model
    frames = [(torch.__file__, 3, "f"), (__file__, 7, "g"), (torch.__file__, 9, "h")]
    place = place_in_traceback("\n".join(f'File "{file}", line {n}, in {name}' for file, n, name in frames))
    assert place is not None
    assert (place.line, place.function) == (7, "g")


_MODEL_FILE = """
from tests.validate.models import Pair

def load(*, dtype, device, strength=1.0):
    return Pair(dtype, device)

constant = 3
"""


def test_models_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(_MODEL_FILE)
    source = ModelSource(f"{file}:load", {"strength": 2.0})
    assert source.load(torch.float32, torch.device("cpu")).dtype is torch.float32
    for name, options, said in [
        (f"{file}:load", {"depth": 1}, "its options: strength"),
        (f"{file}:load", {"dtype": "x"}, "dtype"),
        (f"{file}:constant", {}, "no factory"),
        (f"{file}:missing", {}, "missing"),
    ]:
        with pytest.raises(InputError, match=said):
            ModelSource(name, options).load(torch.float64, torch.device("cpu"))
