"""Which rows each part of a model works on while two ranks evaluate it."""

from __future__ import annotations

import pytest
from mace_ranks import Job

from nvdd_mace.conformance import INTERACTIONS

# What neighbours read of a layer, or what it is made of; everything else in a layer works on a row alone.
READ_BY_NEIGHBOURS = {"linear_up", "linear_down", "source_embedding", "target_embedding"}


def shares_of(ranks, made, structures, strategy, interaction, **options):
    path, _ = made(interaction, **options)
    shares = ranks(2, "rows_seen", path, Job(structures["rod"], strategy))
    assert all(share.ghosts for share, _ in shares)
    return shares


def by_part(seen, layer):
    """Rows that each part of an interaction, and its product, was given."""
    prefix = f"interactions.{layer}."
    found = {name.removeprefix(prefix): rows for name, rows in seen.items() if name.startswith(prefix)}
    return {**found, "product": seen[f"products.{layer}"]}


@pytest.mark.parametrize("strategy", ["halo", "graph_partition"])
@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_node_wise_work_is_on_owned_rows(ranks, made, structures, interaction, strategy):
    for share, seen in shares_of(ranks, made, structures, strategy, interaction):
        local = share.owned + share.ghosts
        for layer in (0, 1):
            parts = by_part(seen, layer)
            expected = {name: {share.owned} for name in parts}
            for name in READ_BY_NEIGHBOURS & parts.keys():
                expected[name] = {local}
            if layer and "linear_down" not in parts:  # its output is exchanged
                expected["linear_up"] = {share.owned}
            assert parts == expected
            assert any(name.startswith("skip_") for name in parts)
            assert {"reshape", "linear_up"} < parts.keys()
        assert {n for name, rows in seen.items() if "readouts" in name for n in rows} == {share.owned}


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[5]])
def test_a_wide_halo_spares_ghosts_of_the_last_layer_alone(ranks, made, structures, interaction):
    for share, seen in shares_of(ranks, made, structures, "wide_halo", interaction, layers=3):
        local = share.owned + share.ghosts
        for layer in (0, 1):
            assert set().union(*by_part(seen, layer).values()) == {local}
        for name, rows in by_part(seen, 2).items():
            assert rows == {local if name in READ_BY_NEIGHBOURS else share.owned}, name
