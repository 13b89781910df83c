"""Steady evaluations: positions and edges in tensors that stay give the numbers of any other evaluation.

On a CPU nothing is captured, but evaluations run on the same tensors as those that a GPU captures. What GPUs replay
is held to Rule W by ``benchmarks/plugin_check.py`` and ``benchmarks/mace_check.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.dynamics import DomainParallel, VelocityVerlet, initial_velocities
from nvdd_core.errors import InputError, PluginValidationError
from nvdd_core.runtime import SPEC_MPNN_HALO, DistributedModel, DomainConfig, LocalBatch, MLIPSpec, near_edges
from nvdd_core.runtime.padded import PaddedDomain, _kept
from nvdd_core.spec import CompilePolicy, StrategyKind
from tests.cases.models import Toy2
from tests.cases.oracle import CUTOFF, fcc
from tests.cases.ranks import System, collect, mesh, share


class Near(Toy2):
    """Two layers, by the edges within the cutoff only; an atom alone has an energy, so that rows too many show."""

    def __init__(self, *, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.edges: list[int] = []

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return SPEC_MPNN_HALO | MLIPSpec(compile_policy=CompilePolicy(capture=True, pads=self.pads))

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        from nvdd_core.runtime import refresh_neighbors

        (sender, receiver), shifts = batch.near_edges(CUTOFF)
        self.edges.append(int(receiver.shape[0]))
        moved = torch.einsum("ei,eij->ej", shifts.to(batch.positions.dtype), batch.cell[batch.system[sender]])
        r2 = (batch.positions[sender] + moved - batch.positions[receiver]).square().sum(1)
        w = torch.where(r2 < CUTOFF**2, (1.0 - r2 / CUTOFF**2) ** 2, torch.zeros_like(r2))
        zeros = batch.positions.new_zeros(batch.n_local)
        h = refresh_neighbors(zeros.index_add(0, receiver, w))
        m = zeros.index_add(0, receiver, torch.tanh(0.1 * h[sender]) * w)
        return 0.01 * m**2 - 1.5


class Lister(Near):
    """Declares pads, but reads the list."""

    def node_energy(self, batch: LocalBatch) -> torch.Tensor:
        return batch.edge_vectors().square().sum() + batch.positions.new_zeros(batch.n_local)


def systems() -> list[System]:
    pos, cell = fcc(3, 3, 3)
    shaken = pos + np.random.default_rng(0).normal(0.0, 0.05, pos.shape)
    open_one = System(shaken[:20] + 3.0, 40.0 * np.eye(3), (False,) * 3)
    return [System(shaken, cell, (True, True, True)), open_one]


def _walk(capture: str, pads: bool, strategy: StrategyKind, spare: float | None = None) -> dict[str, Any]:
    """Hot dynamics of two systems: rows migrate, edges come and go."""
    kept = near_edges.LEAST_SPARE, near_edges._WAVERS
    if spare is not None:
        near_edges.LEAST_SPARE, near_edges._WAVERS = spare, 0.0
    try:
        group = mesh()
        sharded = share(systems()[:1], group)
        sharded.rows["velocities"] = initial_velocities(
            sharded.masses, sharded.ids, 900.0, 1, group.all_reduce_sum_
        )
        model = Near(pads=pads)
        run = DistributedModel(model, DomainConfig(skin=0.4, strategy=strategy), group)
        info = DomainParallel(VelocityVerlet(4.0), run, capture=capture).run(sharded, 60)
        return {
            "energy": info.energy,
            "pressure": info.pressure_gpa,
            "positions": collect(sharded.positions, sharded.ids, sharded.n_global, group),
            "rebuilds": run.n_rebuilds,
            "edges": model.edges,
        }
    finally:
        near_edges.LEAST_SPARE, near_edges._WAVERS = kept


@pytest.mark.parametrize("strategy", list(StrategyKind))
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_same_dynamics_on_tensors_that_stay(
    rank_pool, world: int, pads: bool, strategy: StrategyKind
) -> None:
    right = rank_pool(1).run(_walk, "off", pads, strategy)[0]
    assert right["rebuilds"] > 3
    for found in rank_pool(world).run(_walk, "on", pads, strategy):
        assert abs(found["energy"] - right["energy"]) < 1e-9
        assert abs(found["pressure"] - right["pressure"]) < 1e-9
        np.testing.assert_allclose(found["positions"], right["positions"], rtol=0, atol=1e-9)
        if pads:  # one number of edges serves several domains
            assert len(set(found["edges"])) < len(found["edges"]) / 2


def test_an_edge_too_many_rebuilds(rank_pool) -> None:
    """Without room to spare an edge that comes near must not be lost."""
    right = rank_pool(1).run(_walk, "off", True, StrategyKind.HALO)[0]
    for found in rank_pool(2).run(_walk, "on", True, StrategyKind.HALO, 0.0):
        assert found["rebuilds"] > right["rebuilds"]
        assert abs(found["energy"] - right["energy"]) < 1e-9
        np.testing.assert_allclose(found["positions"], right["positions"], rtol=0, atol=1e-9)


def _batch(capture: str) -> list[np.ndarray]:
    group = mesh()
    sharded = share(systems(), group)
    run = DistributedModel(Near(pads=True), DomainConfig(skin=0.4), group)
    wanted = {"energy", "forces", "stress", "node_energy"}
    with run.steady(capture):
        for step in range(4):
            out = run(sharded, wanted)
            sharded.positions.data.add_(0.01 * torch.sin(sharded.ids[:, None] + torch.arange(3.0) + step))
    rows = [collect(t, sharded.ids, sharded.n_global, group) for t in (out.forces, out.node_energy)]
    return [out.energy.numpy(), out.stress.numpy(), *rows]


@pytest.mark.parametrize("world", [1, 3])
def test_several_systems_and_every_output(rank_pool, world: int) -> None:
    right = rank_pool(1).run(_batch, "off")[0]
    for found in rank_pool(world).run(_batch, "on"):
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


def _padded() -> tuple[bool, bool, int]:
    group = mesh()
    sharded = share(systems()[:1], group)
    run = DistributedModel(Near(pads=True), DomainConfig(skin=0.4), group)
    run(sharded)
    domain = run.domain
    padded = PaddedDomain(domain, group, torch.float64)
    padded.load(domain)
    real = domain.plan.forward(sharded.positions - domain.offset)
    local = padded.domain.plan.forward(padded._padded(sharded.positions - domain.offset))
    place = padded._place(domain.plan)
    same = bool((local[place] == real).all()) and bool((padded.domain.ids[place] == domain.ids).all())
    return same, padded.fits(domain), int(padded.domain.real.sum()) - sharded.n_owned


@pytest.mark.parametrize("world", [1, 3])
def test_a_padded_domain_holds_the_rows(rank_pool, world: int) -> None:
    for same, fits, surplus in rank_pool(world).run(_padded):
        assert same
        assert fits
        assert surplus == 0


def _sized_again() -> tuple[bool, bool]:
    """Whether a domain of a few rows less is given the same room, and one of half as many rows less."""
    group = mesh()
    sharded = share(systems()[:1], group)
    run = DistributedModel(Near(pads=True), DomainConfig(skin=0.4), group)
    run(sharded)
    before = PaddedDomain(run.domain, group, torch.float64)
    plan = before.plan
    again = PaddedDomain(run.domain, group, torch.float64, before).plan
    same = (again.n_owned, again.send_splits, again.recv_splits) == (
        plan.n_owned,
        plan.send_splits,
        plan.recv_splits,
    )
    before.plan = dataclasses.replace(plan, n_owned=3 * plan.n_owned, send_splits=(0,) * group.size)
    other = PaddedDomain(run.domain, group, torch.float64, before).plan
    return same, (other.n_owned, other.send_splits) == (plan.n_owned, plan.send_splits)


@pytest.mark.parametrize(
    ("had", "needed", "size"), [(None, 0, 16), (16, 0, 16), (20, 20, 20), (19, 20, 16), (33, 20, 16)]
)
def test_a_size_is_kept_where_it_does(had: int | None, needed: int, size: int) -> None:
    """Where nothing is sent to begin with there is room for some rows, too."""
    assert _kept(had, needed, 16) == size


@pytest.mark.parametrize("world", [1, 3])
def test_sizes_are_kept_unless_they_are_far_too_large_or_too_small(rank_pool, world: int) -> None:
    for same, sized in rank_pool(world).run(_sized_again):
        assert same
        assert sized


@pytest.mark.parametrize(
    ("had", "sized", "size"),
    [
        (10_500, 9_000, 10_500),
        (10_110, 9_000, 10_110),
        (10_109, 10_200, 10_440),  # too few to spare
        (9_000, 8_000, 11_651),  # far too few: more came than usual, and as many may come again
        (12_000, 9_990, 10_440),  # far too many
    ],
)
def test_room_for_edges_is_kept_where_it_does(had: int, sized: int, size: int) -> None:
    """Sizes are taken anew where another rank's don't do; one that has few edges just then must not shrink for that."""
    kept = torch.zeros((2, had), dtype=torch.int64), torch.zeros((had, 3), dtype=torch.int64)
    before = near_edges._Choice((kept[0][:, :0], kept[1][:0]), 0, sized, kept)
    assert near_edges._sized(10_000, 2_000, before) == (size, sized if size == had else 10_000)


def test_a_small_domain_has_room_for_the_edges_of_rows_that_come() -> None:
    """A row has 32 edges, and the third root of as many rows as there are may come thrice."""
    (small, _), (large, _) = (near_edges._sized(32 * n, n, None) for n in (512, 27_000))
    assert small - 32 * 512 > 3 * 8 * 32
    assert large - 32 * 27_000 == 1 + int(32 * 27_000 / 256 + 4 * (32 * 27_000) ** 0.5)


def test_a_model_that_reads_the_list_is_refused() -> None:
    sharded = share(systems()[:1], mesh())
    run = DistributedModel(Lister(pads=True), DomainConfig(skin=0.4))
    with run.steady("on"):
        run(sharded)
        with pytest.raises(PluginValidationError, match=r"near_edges\(cutoff\)"):
            run(sharded)


def test_unknown_mode_is_refused() -> None:
    run = DistributedModel(Near(pads=True), DomainConfig())
    with pytest.raises(InputError, match="capture is 'yes'; give auto, on or off"), run.steady("yes"):
        pass


def test_outside_a_run_nothing_stays() -> None:
    """The number of edges follows the positions again."""
    sharded = share(systems()[:1], mesh())
    model = Near(pads=True)
    run = DistributedModel(model, DomainConfig(skin=0.4))
    for _ in range(2):
        with run.steady("on"):
            for _ in range(3):
                run(sharded)
        kept = model.edges[-1]
        run(sharded)
        assert model.edges[-1] < kept
