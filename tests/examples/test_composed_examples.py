"""The example plugins put together with Lennard-Jones: exact on any number of ranks under every strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.runtime import DomainConfig
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind
from tests.cases.ranks import Result, System, assert_same, evaluate
from tests.examples.test_example_plugins import SYSTEMS, make

COMPOSED = "nvdd_lj.model:load+0.5*nvdd_toy2.model:load+nvdd_mpnn.model:load"
OPTIONS = {
    "load.epsilon": 1.0,
    "load.sigma": 1.0,
    "load.cutoff": 3.1,
    "load.shift": "none",
    "style": "rebind",
    "load3.cutoff": 2.2,
}


def run(system: System, config: DomainConfig) -> Result:
    for name in ("toy2-rebind", "mpnn"):
        make(name)  # which puts the example on the search path
    return evaluate(lambda: ModelSource(COMPOSED, OPTIONS).load(torch.float64), [system], config)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", list(StrategyKind))
def test_any_number_of_ranks_gives_the_same_numbers(
    world: int, strategy: StrategyKind, rank_pool: Any
) -> None:
    for label, system in SYSTEMS.items():
        right = run(system, DomainConfig())
        for found in rank_pool(world).run(run, system, DomainConfig(strategy=strategy, skin=0.2)):
            assert_same(found, right, f"{label} {strategy} {world}", edges=False)


def test_one_process_gives_the_sum() -> None:
    system = SYSTEMS["triclinic"]
    lj = ModelSource(
        "nvdd_lj.model:load", {k.removeprefix("load."): v for k, v in OPTIONS.items() if "load." in k}
    )
    mpnn = ModelSource("nvdd_mpnn.model:load", {"cutoff": 2.2})
    found = run(system, DomainConfig())
    parts = [
        (1.0, evaluate(lambda: lj.load(torch.float64), [system])),
        (0.5, evaluate(lambda: make("toy2-rebind"), [system])),
        (1.0, evaluate(lambda: mpnn.load(torch.float64), [system])),
    ]
    assert np.abs(found.forces - sum(w * part.forces for w, part in parts)).max() <= 1e-12
    assert np.abs(found.stress - sum(w * part.stress for w, part in parts)).max() <= 1e-12
