"""What is communicated, and gradients of a training loss."""

from __future__ import annotations

import numpy as np
import pytest
from mace_ranks import Job

from nvdd_mace.conformance import INTERACTIONS


def tally(ranks, path, atoms, strategy, world=2):
    shares = ranks(world, "evaluate", path, {}, [Job(atoms, strategy)])
    return [rank[0] for rank in shares]


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_two_layers_exchange_twice(ranks, made, structures, interaction):
    """Positions and one feature tensor, forward and backward, and the bytes of exactly these."""
    width = 4 + 12  # 4x0e+4x1o
    shares = tally(ranks, made(interaction)[0], structures["rod"], "halo")
    for share, other in (shares, shares[::-1]):
        assert share.calls["exchange"] == 2
        assert share.calls["reverse"] == 2
        assert share.sent["exchange"] == other.ghosts * 8 * (3 + width)
        assert share.sent["reverse"] == share.ghosts * 8 * (3 + width)
        assert sum(share.calls.values()) <= 6  # and at most two small all-reduces


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_one_exchange_a_layer(ranks, made, structures, layers):
    hidden = "4x0e+4x1o" if layers < 4 else "2x0e+2x1o"
    path, _ = made(layers=layers, hidden=hidden)
    for strategy, expected in (("halo", layers), ("graph_partition", layers), ("wide_halo", 1)):
        for share in tally(ranks, path, structures["rod"], strategy):
            assert (share.calls["exchange"], share.calls["reverse"]) == (expected, expected)


def test_a_narrower_tensor_is_exchanged(ranks, made, structures):
    """Where linear_up makes fewer numbers than the features have, they are what travels."""
    from e3nn import o3

    path, _ = made(edge_irreps=o3.Irreps("2x0e+2x1o"))
    for world in (2, 4):
        for share in tally(ranks, path, structures["rod"], "halo", world):
            assert share.sent["reverse"] == share.ghosts * 8 * (3 + 2 + 6)


def test_a_rank_without_rows_takes_part(ranks, made, structures):
    shares = tally(ranks, made(layers=3)[0], structures["atom"], "halo", 3)
    assert sorted(share.owned for share in shares) == [0, 0, 1]
    assert {(share.calls["exchange"], share.calls["reverse"]) for share in shares} == {(3, 3)}


@pytest.mark.parametrize(
    ("interaction", "strategy"),
    [
        (INTERACTIONS[1], "halo"),
        (INTERACTIONS[3], "graph_partition"),
        (INTERACTIONS[4], "halo"),
        (INTERACTIONS[5], "halo"),
        (INTERACTIONS[5], "wide_halo"),
    ],
)
def test_gradients_of_a_force_loss(ranks, made, structures, interaction, strategy):
    """Every parameter's gradient on two ranks is that of one."""
    (path, _), atoms = made(interaction), structures["rod"]
    one = ranks(1, "loss_gradients", path, {}, atoms, "halo")[0]
    for two in ranks(2, "loss_gradients", path, {}, atoms, strategy):
        assert two.keys() == one.keys()
        assert len(one) > 15
        for name, expected in one.items():
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(two[name], expected, rtol=0, atol=1e-10 * scale, err_msg=name)
    assert sum(bool(np.abs(g).max() > 1e-6) for g in one.values()) > 15


def test_gradients_with_a_rank_without_rows(ranks, made, structures):
    (path, _), atoms = made(), structures["triclinic"][[0, 3]]
    one = ranks(1, "loss_gradients", path, {}, atoms, "halo")[0]
    for found in ranks(4, "loss_gradients", path, {}, atoms, "halo"):
        for name, expected in one.items():
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-10 * scale, err_msg=name)
