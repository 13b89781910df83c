"""Specs and hooks: what is declared, and what it does to rows."""

from __future__ import annotations

import json
import pkgutil
from types import SimpleNamespace

import pytest
import torch

from nvdd_core.runtime import MLIPSpec
from nvdd_core.spec import StrategyKind
from nvdd_mace import _plugin, adapters
from nvdd_mace.spec import SPEC_MACE_GP, SPEC_MACE_HALO, mace_spec


def patterns(spec):
    return [adapter.pattern for adapter in spec.distribution.third_party_helpers]


@pytest.mark.parametrize("strategy", list(StrategyKind))
@pytest.mark.parametrize(("layers", "made"), [(1, True), (2, False), (3, True)])
def test_every_strategy(strategy, layers, made):
    spec = mace_spec(strategy, layers, after_linear_up=made)
    assert spec.strategy is strategy
    assert set(spec.outputs) == {"energy", "forces", "stress", "node_energy"}
    assert MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_patterns():
    owned = ["interactions.*", "interactions.*.[ls]*_[lrt]*", "products.*", "readouts.*"]
    assert patterns(SPEC_MACE_HALO) == ["interactions.[1-9]*.linear_up", *owned]
    assert mace_spec(StrategyKind.HALO) == SPEC_MACE_HALO
    assert mace_spec(StrategyKind.GRAPH_PARTITION) == SPEC_MACE_GP
    assert patterns(mace_spec(StrategyKind.HALO, 1)) == owned
    assert patterns(mace_spec(StrategyKind.HALO, after_linear_up=False)) == ["interactions.[1-9]*", *owned]
    wide = ["interactions.2", "interactions.2.[ls]*_[lrt]*", "products.2", "readouts.*"]
    assert patterns(mace_spec(StrategyKind.WIDE_HALO, 3)) == wide


def test_declared_adapters_are_those_of_the_specs():
    """What `nvdd adapters` lists is what is installed, pattern by pattern."""
    used = [*patterns(SPEC_MACE_HALO), *patterns(mace_spec(StrategyKind.HALO, after_linear_up=False))]
    declared = {row.name: row for row in _plugin.nvdd_declare_adapters()}
    assert sorted(row.target for row in declared.values()) == sorted(set(used))
    for row in declared.values():
        assert pkgutil.resolve_name(str(row.ref)).pattern == row.target


def test_hooks_do_nothing_outside_an_evaluation():
    x = torch.ones(5, 2)
    assert adapters.owned_rows(torch.nn.Identity(), (x,), {"y": x}) is None
    assert adapters.owned_messages(torch.nn.Identity(), (x,), {"node_feats": x}) is None
    assert adapters.padded_rows(torch.nn.Identity(), (), {}, x) is x
    assert adapters.refreshed_output(torch.nn.Identity(), (), {}, x) is x


def test_rows_are_cut_and_padded(monkeypatch):
    plan = SimpleNamespace(n_owned=2, n_local=5)
    monkeypatch.setattr(adapters, "current_dd_context", lambda: SimpleNamespace(plan=plan))
    x, head = torch.arange(10.0).view(5, 2).requires_grad_(True), torch.arange(5)
    args, kwargs = adapters.owned_rows(
        torch.nn.Identity(), (x, head, None, 3), {"sc": x, "edges": torch.ones(7)}
    )
    assert [a.shape[0] for a in args[:2]] == [2, 2]
    assert args[2:] == (None, 3)
    assert (kwargs["sc"].shape[0], kwargs["edges"].shape[0]) == (2, 7)
    out = adapters.padded_rows(torch.nn.Identity(), (), {}, args[0] * 2)
    assert out.shape == (5, 2)
    assert not out[2:].any()
    out.sum().backward()
    assert x.grad[:2].eq(2).all()
    assert not x.grad[2:].any()


def test_features_are_refreshed_by_keyword_and_by_position(monkeypatch):
    monkeypatch.setattr(adapters, "refresh_neighbors", lambda x: x + 1)
    a, x = torch.zeros(2), torch.zeros(2)
    args, kwargs = adapters.refreshed_features(torch.nn.Identity(), (), {"node_attrs": a, "node_feats": x})
    assert args == ()
    assert kwargs["node_feats"].eq(1).all()
    assert kwargs["node_attrs"] is a
    args, kwargs = adapters.refreshed_features(torch.nn.Identity(), (a, x, a), {})
    assert args[1].eq(1).all()
    assert args[0] is args[2] is a
