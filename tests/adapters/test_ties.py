"""Exchanges whose input depends on positions on some ranks only: every rank takes part in their adjoints all the same.

Rows a short distance apart lie beside rows a long distance apart. The first layer sees short edges alone, so the
ranks without any hand a constant to the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.adapters import OpAdapter
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    refresh_neighbors,
    scatter_to_owners,
)
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind
from tests._spawn import RankPool
from tests.adapters.ops import edge_sum
from tests.cases.models import StandIn
from tests.cases.ranks import Result, System, assert_same, evaluate

T = torch.Tensor
SHORT, CUTOFF = 1.5, 2.5
_X = np.concatenate([np.arange(8) * 1.2, 8.4 + 2.0 * np.arange(1, 9)])
CHAIN = System(
    np.stack([_X, 0.1 * np.cos(_X), np.zeros(16)], 1) + 1.0, np.diag([40.0, 10.0, 10.0]), (False,) * 3
)
MODES = {
    "verb": ScatterMode.LOCAL,
    "sum verb": ScatterMode.LOCAL,
    "op": ScatterMode.LOCAL,
    "refresh": ScatterMode.REFRESH,
    "correction": ScatterMode.HALO_CORRECTION,
}


def _weights(r2: T, reach: float) -> T:
    return torch.where(r2 < reach**2, (1.0 - r2 / reach**2) ** 2, torch.zeros_like(r2))


class Tied(StandIn):
    """Two layers; the first is a constant on a rank without short edges."""

    layers = 2
    neighbor_form = "full"

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cutoff, self.constant = how, CUTOFF, False

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        ops = (OpAdapter(edge_sum, gather_inputs=[0]),) if self.how == "op" else ()
        storage = HaloStorage(scatter=MODES[self.how])
        return SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(storage=storage, custom_ops=ops))

    def node_energy(self, batch: LocalBatch) -> T:
        sender, receiver = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        near = (r2 < SHORT**2).nonzero()[:, 0]
        self.constant = len(near) == 0
        values = r2.new_zeros(0) if self.constant else _weights(r2[near], SHORT)
        h = self._first(batch, receiver[near], values)
        inside = r2 < CUTOFF**2
        if self.how == "op":
            m = edge_sum(h[:, None], sender[inside], receiver[inside], batch.n_local)[:, 0]
        else:
            m = r2.new_zeros(batch.n_local).index_add(0, receiver, torch.tanh(h[sender]) * inside)
        pair = r2.new_zeros(batch.n_local).index_add(0, receiver, _weights(r2, CUTOFF))
        return m**2 + 0.3 * pair * (1.0 + m)

    def _first(self, batch: LocalBatch, index: T, values: T) -> T:
        if MODES[self.how] is not ScatterMode.LOCAL:  # served by the handlers
            h = batch.positions.detach().new_zeros(batch.n_local)
            h.index_add_(0, index, values)
            return h
        h = values.new_zeros(batch.n_local).index_add(0, index, values)
        if self.how == "verb":
            return refresh_neighbors(h)
        if self.how == "sum verb":  # of what a rank has for its owned rows
            return scatter_to_owners(torch.cat([h[: batch.n_owned], torch.zeros_like(h[batch.n_owned :])]))
        return h


def run(how: str) -> tuple[Result, bool]:
    model = Tied(how)
    return evaluate(lambda: model, [CHAIN], DomainConfig()), model.constant


@pytest.mark.parametrize("how", MODES)
def test_a_constant_on_one_rank_alone(rank_pool: Callable[..., RankPool], how: str) -> None:
    right, _ = run("verb")
    found: list[Any] = rank_pool(2).run(run, how, timeout=40)
    assert sorted(constant for _, constant in found) == [False, True]
    assert min(min(result.ghosts) for result, _ in found) > 0
    for result, _ in found:
        assert_same(result, right, how, edges=False)
