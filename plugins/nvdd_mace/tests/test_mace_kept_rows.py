"""Rows of zeros below those of a fused convolution: numbers stay, and it sees few different numbers of rows."""

from __future__ import annotations

import pytest
import torch

from nvdd_mace.backends import keep_rows


class Conv(torch.nn.Module):
    """Sums what senders hold into receivers, as mace's wrapper of cuEquivariance's fused convolution does."""

    def __init__(self):
        super().__init__()
        self.original_forward = None  # the mark of mace's wrappers
        self.seen = []

    def forward(self, rows, edges):
        self.seen.append(rows.shape[0])
        return torch.zeros_like(rows).index_add(0, edges[1], rows[edges[0]].sin())


class Model(torch.nn.Module):
    """A convolution where mace has it."""

    def __init__(self):
        super().__init__()
        self.interaction = torch.nn.Module()
        self.interaction.conv_tp = Conv()


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [
        ([128, 127, 120, 128], [128, 128, 128, 128]),
        ([120, 122, 128, 121], [120, 137, 137, 137]),
        ([11, 128, 127, 20, 0, 5], [11, 128, 128, 20, 0, 5]),
    ],
)
def test_numbers_stay(sizes, seen):
    model, alone = Model(), Conv()
    keep_rows(model)
    for n in sizes:
        rows = torch.rand(n, 3, dtype=torch.float64, requires_grad=True)
        edges = torch.randint(max(n, 1), (2, 4 * n))
        found, expected = model.interaction.conv_tp(rows, edges), alone(rows, edges)
        assert torch.equal(found, expected)
        weights = torch.rand_like(expected)
        slopes = [torch.autograd.grad((weights * out).sum(), rows)[0] for out in (found, expected)]
        assert torch.equal(*slopes)
    assert model.interaction.conv_tp.seen == seen
