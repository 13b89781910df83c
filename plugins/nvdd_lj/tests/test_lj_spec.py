"""The spec: what it says, and that it survives the round trip."""

from __future__ import annotations

import json

import pytest
import torch

from nvdd_core.runtime.mlip_spec import ForceStrategy, MLIPSpec
from nvdd_core.spec import Reduce, StrategyKind
from nvdd_lj.model import load
from nvdd_lj.spec import SPEC_LJ_HALO


@pytest.mark.parametrize("strategy", list(StrategyKind))
def test_every_strategy(strategy):
    model = load(dtype=torch.float64, device=torch.device("cpu"))
    spec = model.distribution_spec(strategy)
    assert spec.strategy is strategy
    assert spec.force_strategy is ForceStrategy.DIRECT
    assert set(spec.outputs) == model.outputs
    assert spec.output("forces").combined is Reduce.OWNED_ONLY
    assert MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_halo_is_the_preset():
    assert SPEC_LJ_HALO.strategy is StrategyKind.HALO
    assert load(dtype=torch.float64, device="cpu").distribution_spec(StrategyKind.HALO) == SPEC_LJ_HALO
