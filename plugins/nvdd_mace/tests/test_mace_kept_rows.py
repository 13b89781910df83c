"""A fused convolution sees few different numbers of rows, and makes none for ghosts: numbers stay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nvdd_core.runtime.context import DomainContext, enter_context
from nvdd_core.spec import StrategyKind
from nvdd_mace.backends import keep_rows
from nvdd_mace.foreign import imported

WIDTH = 3


class Fused(torch.nn.Module):
    """Takes what cuEquivariance's fused convolution takes, as mace calls it."""

    def __init__(self):
        super().__init__()
        self.m = SimpleNamespace(buffer_num_segments=[1], operand_extent=WIDTH)
        self.seen = []

    def forward(self, inputs, senders, shapes, receivers):
        weights, rows, attributes = inputs
        self.seen.append((rows.shape[0], shapes[0].shape[0]))
        messages = rows[senders[1]].sin() * weights * attributes
        return [rows.new_zeros(shapes[0].shape[0], WIDTH).index_add(0, receivers[0], messages)]


@pytest.fixture
def convolutions():
    """Mace's own wrapper around a convolution, with rows kept and without."""
    wrapped = imported("mace.modules.wrapper_ops").with_cueq_conv_fusion
    kept, alone = torch.nn.Module(), wrapped(Fused())
    kept.interaction = torch.nn.Module()
    kept.interaction.conv_tp = wrapped(Fused())
    keep_rows(kept)
    return kept.interaction.conv_tp, alone


def check(kept, alone, n, owned):
    """Compare what both make of `n` rows whose edges enter the first `owned`, and its derivative."""
    rows = torch.rand(n, WIDTH, dtype=torch.float64, requires_grad=True)
    edges = torch.stack([torch.randint(max(n, 1), (4 * n,)), torch.randint(max(owned, 1), (4 * n,))])
    attributes, weights = torch.rand(2, 4 * n, WIDTH, dtype=torch.float64)
    found = kept(rows, attributes, weights, edges)
    expected = alone(rows, attributes, weights, edges)[:owned]
    assert torch.equal(found, expected)
    slopes = [torch.autograd.grad((out * expected.detach()).sum(), rows)[0] for out in (found, expected)]
    assert torch.equal(*slopes)


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [
        ([128, 127, 120, 128], [128, 128, 128, 128]),
        ([120, 122, 128, 121], [120, 137, 137, 137]),
        ([11, 128, 127, 20, 0, 5], [11, 128, 128, 20, 0, 5]),
    ],
)
def test_numbers_stay(convolutions, sizes, seen):
    for n in sizes:
        check(*convolutions, n, n)
    assert convolutions[0].seen == [(n, n) for n in seen]


@pytest.mark.parametrize(
    ("strategy", "seen"),
    [
        (StrategyKind.HALO, [(120, 80), (136, 91), (136, 91)]),
        (StrategyKind.WIDE_HALO, [(120, 120), (136, 136), (136, 136)]),
    ],
)
def test_no_sum_of_a_ghost_where_no_edge_enters_one(convolutions, strategy, seen):
    for owned, local in [(80, 120), (81, 121), (79, 119)]:
        plan = SimpleNamespace(n_owned=owned, n_local=local)
        with enter_context(DomainContext(True, plan=plan, strategy=strategy)):
            check(*convolutions, local, local if strategy is StrategyKind.WIDE_HALO else owned)
    assert convolutions[0].seen == seen


def test_padded_domains_are_left_alone(convolutions):
    for owned, local in [(80, 120), (82, 121)]:
        plan = SimpleNamespace(n_owned=owned, n_local=local)
        with enter_context(DomainContext(True, plan=plan, padded=True)):
            check(*convolutions, local, owned)
    assert convolutions[0].seen == [(120, 80), (121, 82)]
