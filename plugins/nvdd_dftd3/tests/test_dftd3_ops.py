"""The operators: derivatives of any order, registration, and both forms of a list."""

from __future__ import annotations

import pytest
import torch
from dftd3_cases import structures

from nvdd_core.graph import build_neighbors
from nvdd_core.partition import Box, Frame, segment_bounds
from nvdd_core.runtime import Batch
from nvdd_dftd3 import ops
from nvdd_dftd3.ops import coordination, dispersion, system_energy
from nvdd_dftd3.parameters import parse_options
from nvdd_dftd3.references import References

CUTOFF = 6.2


def arguments(form="half", n_owned=None, receivers_are_all=False):
    """Arguments of both operators for a skewed crystal, of which some rows may be ghosts."""
    batch = Batch.from_ase(structures()["skewed"])
    box = Box.from_cells(batch.cell, batch.pbc)
    low, high = segment_bounds(box.fractional(batch.positions, batch.system), batch.system, 1)
    frame = Frame.from_bounds(box, low, high)
    frac, offset = frame.fold(batch.positions, batch.system)
    n = len(batch) if n_owned is None else n_owned
    listed = build_neighbors(
        batch.positions - offset,
        frac,
        batch.system,
        frame,
        n,
        CUTOFF,
        len(batch) if receivers_are_all else None,
        form,
    )
    points = listed.extend(batch.positions - offset, batch.cell, batch.system)
    present, species = torch.unique(batch.numbers, return_inverse=True)
    made = References.of(present.tolist(), parse_options({"functional": "pbe"}), points.device)
    edges = (listed.row_splits, listed.senders, listed.extended_rows.int(), form == "half")
    tables = (species.int(), made.cn, made.c6, made.pairs)
    return points, made.radii[species], tables, edges, n


def total(points, cn, tables, edges, n, weight):
    return (dispersion(points, cn, *tables, *edges, n, CUTOFF) * weight).sum()


@pytest.mark.parametrize("form", ["half", "full"])
@pytest.mark.parametrize("n_owned", [1, 3])
def test_derivatives(form, n_owned):
    points, radii, tables, edges, n = arguments(form, n_owned, receivers_are_all=True)
    cn = coordination(points, radii, *edges, 5.0)
    points.requires_grad_()
    few = torch.arange(points.shape[0]) < 6  # of so many images a handful will do

    def counts(some):
        return coordination(
            torch.where(few[:, None], _pad(some, points), points.detach()), radii, *edges, 5.0
        )

    def energies(some, cn):
        moved = torch.where(few[:, None], _pad(some, points), points.detach())
        return dispersion(moved, cn, *tables, *edges, n, CUTOFF)

    some = points.detach()[:6].clone().requires_grad_()
    cn = cn.detach().requires_grad_()
    assert torch.autograd.gradcheck(counts, (some,), eps=1e-5, atol=1e-7)
    assert torch.autograd.gradcheck(energies, (some, cn), eps=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(counts, (some,), eps=1e-5, atol=1e-6)
    assert torch.autograd.gradgradcheck(energies, (some, cn), eps=1e-5, atol=1e-6)


def _pad(some, points):
    return torch.cat([some, points.detach()[some.shape[0] :]])


@pytest.mark.parametrize("form", ["half", "full"])
@pytest.mark.parametrize("n_systems", [1, 2])
@pytest.mark.parametrize("n_owned", [1, 3])
def test_sums_by_system(form, n_systems, n_owned):
    """Energies and derivatives of weighted sums, derived beforehand or not, against those of the rows."""
    points, radii, tables, edges, _ = arguments(form, n_owned, receivers_are_all=True)
    if n_systems == 2:  # edges between the two systems don't count
        points, radii, tables, edges = twice(points, radii, tables, edges)
    system = torch.arange(n_systems).repeat_interleave(3)
    n_owned *= n_systems if n_owned == 3 else 1
    cn = coordination(points, radii, *edges, 5.0).requires_grad_()
    points = points.detach().requires_grad_()
    weight = torch.tensor([2.5, -0.7], dtype=torch.float64)[:n_systems].requires_grad_()
    leaves = (points, cn, weight)
    rows = dispersion(points, cn, *tables, *edges, n_owned, CUTOFF)
    want = torch.autograd.grad((rows * weight[system[:n_owned]]).sum(), leaves)
    for derive in (True, False):
        energy = system_energy(points, cn, *tables, *edges, n_owned, CUTOFF, system, n_systems, derive)[0]
        for graph in (False, True):
            found = torch.autograd.grad(
                (energy * weight).sum(), leaves, retain_graph=True, create_graph=graph
            )
            for one, other in zip(found, want, strict=True):
                assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


def twice(points, radii, tables, edges):
    """The same rows again as a second system: ``[rows, rows | images, images]``."""
    splits, senders, rows, half = edges
    n, n_extended = radii.shape[0], points.shape[0]
    order = torch.cat([torch.arange(n), torch.arange(n) + n_extended])
    place = torch.full((2 * n_extended,), -1)
    images = torch.arange(n, n_extended)
    order = torch.cat([order, images, images + n_extended])
    place[order] = torch.arange(2 * n_extended)
    both = torch.cat([senders.long(), senders.long() + n_extended])
    home = torch.cat([rows, rows + n])[order]
    splits = torch.cat([splits, splits[1:] + splits[-1]])
    species, *rest = tables
    made = (splits, place[both].int(), home.int(), half)
    return torch.cat([points, points])[order], radii.repeat(2), (species.repeat(2), *rest), made


def test_third_derivative():
    points, _, tables, edges, n = arguments()
    cn = torch.tensor([1.1, 2.3, 0.4], dtype=torch.float64)

    def second(x):
        moved = x.detach().requires_grad_() if not x.requires_grad else x
        (g,) = torch.autograd.grad(total(points, moved, tables, edges, n, 1.0), moved, create_graph=True)
        (h,) = torch.autograd.grad(g[0], moved, create_graph=True)
        return h

    third = torch.autograd.functional.jacobian(second, cn)
    h = 1e-5
    for i in range(3):
        step = h * torch.eye(3, dtype=torch.float64)[i]
        ends = [second(cn + step).detach(), second(cn - step).detach()]
        assert torch.allclose((ends[0] - ends[1]) / (2 * h), third[:, i], atol=1e-6)


@pytest.mark.parametrize("form", ["half", "full"])
def test_threads_that_share_a_receiver(monkeypatch, form):
    """As on a GPU, where the sums of several threads are added."""
    points, radii, tables, edges, n = arguments(form, 2, receivers_are_all=True)
    found = []
    for lanes in (1, 7):
        monkeypatch.setattr(ops, "_lanes", lambda points, lanes=lanes: lanes)
        cn = coordination(points, radii, *edges, 5.0)
        system = torch.zeros(3, dtype=torch.int64)
        derived = system_energy(points, cn, *tables, *edges, n, CUTOFF, system, 1, True)
        counts = ops.coordination_gradient(torch.ones_like(cn), points, radii, *edges, 5.0)
        found.append((cn, *derived, counts, dispersion(points, cn, *tables, *edges, n, CUTOFF)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_registration():
    points, radii, tables, edges, n = arguments()
    cn = coordination(points, radii, *edges, 5.0).requires_grad_()
    points.requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(coordination, (points, radii, *edges, 5.0), test_utils=checks)
    pairs = (points, cn, *tables, *edges, n, CUTOFF)
    torch.library.opcheck(dispersion, pairs, test_utils=checks)
    for derive in (True, False):
        system = torch.zeros(n, dtype=torch.int64)
        torch.library.opcheck(system_energy, (*pairs, system, 1, derive), test_utils=checks)


def test_without_pairs():
    """A rank without rows, and a row without neighbours."""
    for n in (0, 2):
        points = torch.zeros(n, 3, dtype=torch.float64, requires_grad=True)
        splits, none = torch.zeros(n + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        edges = (splits, none, torch.arange(n).int(), True)
        made = References.of([8][:n], parse_options({"functional": "pbe"}), points.device)
        cn = coordination(points, made.radii.expand(n) if n else made.radii, *edges, 5.0)
        tables = (torch.zeros(n, dtype=torch.int32), made.cn, made.c6, made.pairs)
        pairs = (points, cn, *tables, *edges, n, CUTOFF)
        system = torch.zeros(n, dtype=torch.int64)
        for energy in (dispersion(*pairs), system_energy(*pairs, system, 1, True)[0]):
            (gradient,) = torch.autograd.grad(energy.sum(), points, retain_graph=True)
            assert energy.abs().sum() == 0.0
            assert gradient.abs().sum() == 0.0
