"""Models in files, pools of ranks and structures for the tests of nvdd-mace."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # workers import mace_ranks, too

from nvdd_core.runtime import WorkerPool
from nvdd_core.testing import default_structures
from nvdd_mace.conformance import random_module


@pytest.fixture(scope="session")
def ranks():
    """``ranks(world, function, *args)``: call a function of mace_ranks on that many ranks of a pool of eight."""
    kept = []

    def call(world, function, *args, timeout=120):
        if not kept or not kept[-1].is_open:
            kept.append(WorkerPool(8))
        found = kept[-1].run("mace_ranks:on_some", world, function, *args, timeout_s=timeout)
        return found[:world]

    yield call
    for each in kept:
        each.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(interaction, **options of random_module)``: path of a file with that model, and the module."""
    folder, kept = tmp_path_factory.mktemp("mace"), {}

    def get(interaction="RealAgnosticResidualInteractionBlock", **options):
        key = repr((interaction, sorted(options.items(), key=str)))
        if key not in kept:
            module, path = random_module(interaction, **options), folder / f"{len(kept)}.model"
            torch.save(module, path)
            kept[key] = str(path), module
        return kept[key]

    return get


@pytest.fixture(scope="session")
def structures():
    """The kit's structures: crystal, triclinic (smaller than two cutoffs), slab, cluster, atom, rod; and more."""
    found = default_structures(3.0, ("O", "Si"), 1.9)
    left = found["triclinic"].copy()
    left.set_cell(np.asarray(left.cell)[[1, 0, 2]])
    return {**found, "left-handed": left}
