"""The parts of a validation, each against something that is known without it."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable
from pathlib import Path

import ase
import pytest
import torch
from torch.nn.modules import module as torch_modules

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime import SPEC_MPNN_HALO, Batch, DomainConfig, MLIPSpec
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import DistributionSpec, HaloStorage, OutputKind, OutputSpec, Reduce, ScatterMode
from nvdd_core.validate import View
from nvdd_core.validate.candidates import fixes_between, with_outputs
from nvdd_core.validate.compare import check_outputs, difference
from nvdd_core.validate.gradients import everywhere, lacks_derivative, row_numbers
from nvdd_core.validate.observe import Observation, Request, observe
from nvdd_core.validate.places import is_model_code, place_in_traceback
from nvdd_core.validate.views import Layout, projection, summarise
from tests.cases import oracle
from tests.cases.ranks import mesh
from tests.validate import models


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


def _energies(values: list[float], n_rows: list[int]) -> Observation:
    counts, ids = torch.tensor(n_rows), torch.arange(sum(n_rows))
    edges = torch.zeros(2, 0, dtype=torch.int64)
    found = Observation(ids, len(ids), len(ids), 2.5, counts, SPEC_MPNN_HALO, edges)
    found.whole["energy"] = torch.tensor(values, dtype=torch.float64)
    return found


@pytest.mark.parametrize(("off", "passed"), [([0.0, 0.0], True), ([1e-9, 0.0], False), ([0.0, 1e-9], True)])
def test_an_energy_may_be_off_by_the_atoms_of_its_own_system(off: list[float], passed: bool) -> None:
    values, sizes = [1.0, 998.0], [2, 998]
    right = _energies(values, sizes)
    found = _energies([v + d for v, d in zip(values, off, strict=True)], sizes)
    (check,) = check_outputs(right, [found], torch.float64, {})
    assert check.passed is passed


def _second(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([[0.1, 0.4], [0.8, 0.2]], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    torch.autograd.grad(first.square().sum(), x)


@torch.library.custom_op("nvdd_test_validate::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        (lambda x: models.OnceOnly.apply(x.square()).square(), True),
        (_twice, True),
        (models.OneWay.apply, True),
        (lambda x: torch.cdist(x, x.flip(0).detach(), p=3.0), True),
        (lambda x: models.Fragile.apply(x).square(), False),
        (lambda x: torch.ones(1, requires_grad=True) * 2.0, False),  # not used in the graph
        (lambda x: x.detach(), False),  # does not require grad
    ],
)
def test_a_missing_derivative_is_told_from_a_fault(
    function: Callable[[torch.Tensor], torch.Tensor], lacking: bool
) -> None:
    with pytest.raises(RuntimeError) as caught:
        _second(function)
    assert lacks_derivative(caught.value) is lacking


@pytest.mark.parametrize(
    "message",
    [
        "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented",
        "the derivative for '_cdist_backward' is not implemented.",
        "Double backwards is not supported for CuDNN RNNs due to limitations in the CuDNN API.",
        "grid_sampler_3d double backward not implemented for interpolation_mode=2",
        "trying to differentiate twice a function that was marked with @once_differentiable",
        "torch.compile with aot_autograd does not currently support double backward",
    ],
)
def test_words_of_torch_for_a_missing_derivative(message: str) -> None:
    assert lacks_derivative(RuntimeError(message))
    assert not lacks_derivative(ValueError(message))


def test_ranks_agree_about_a_derivative(rank_pool) -> None:
    for found in rank_pool(2).run(_one_sided):
        assert found == [True, False, False]


def _one_sided() -> list[bool]:
    group = mesh()
    return [everywhere(group, here) for here in (True, group.rank == 0, False)]


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
        (f"{file}:load", {"depth": 1}, "has no option 'depth'; its options: strength"),
        (f"{file}:load", {"strenght": 1}, r"has no option 'strenght' \(did you mean strength\?\)"),
        (f"{file}:load", {"dtype": "x"}, "dtype"),
        (f"{file}:constant", {}, "no factory"),
        (f"{file}:missing", {}, "missing"),
    ]:
        with pytest.raises(InputError, match=said):
            ModelSource(name, options).load(torch.float64, torch.device("cpu"))
