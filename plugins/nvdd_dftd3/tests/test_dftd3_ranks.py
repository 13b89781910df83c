"""Rule W: results don't depend on the number of ranks, under any strategy; the truth is s-dftd3 or one rank."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from dftd3_cases import assert_equal, evaluate, s_dftd3, structures

STRATEGIES = ("halo", "graph_partition", "wide_halo")
SHORT = {"cutoff": 9.0, "cn_cutoff": 7.0}


@functools.cache
def truth(name, full):
    cutoffs = {} if full else SHORT
    return evaluate(structures()[name], **cutoffs)[0]


def test_one_rank_is_s_dftd3():
    pytest.importorskip("dftd3")
    for name in ("rod", "slab", "skewed"):
        assert_equal(truth(name, False), s_dftd3(structures()[name], **SHORT), 1e-9, 1e-8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_rule_w(rank_pool, world, strategy):
    for name in ("rod", "skewed", "slab", "ethanol", "atom"):
        for found in rank_pool(world).run(evaluate, structures()[name], "pbe", strategy, **SHORT):
            assert_equal(found[0], truth(name, False), 1e-11, 1e-9)
            assert np.abs(found[0].node_energy - truth(name, False).node_energy).max() < 1e-11


def test_full_cutoffs(rank_pool):
    for found in rank_pool(4).run(evaluate, structures()["rod"], timeout=120):
        assert_equal(found[0], truth("rod", True), 1e-11, 1e-9)


def test_moves(rank_pool):
    """Small moves keep the list, large ones rebuild it; the tables of elements follow the rows."""
    atoms = structures()["rod"]
    k = np.arange(len(atoms))
    small = 0.02 * np.sin([k, 2 * k, 3 * k]).T
    moves = (small, 40.0 * small, small)
    expected = atoms.copy()
    trace = []
    for move in moves:
        expected.positions += move
        trace.append(evaluate(expected, **SHORT)[0])
    for found in rank_pool(3).run(evaluate, atoms, "pbe", "halo", moves=moves, **SHORT):
        for one, other in zip(found[1:], trace, strict=True):
            assert_equal(one, other, 1e-11, 1e-8)
