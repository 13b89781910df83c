"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import pytest
import torch
from dftd3_cases import structures

from nvdd_core.testing import check_capturable
from nvdd_dftd3.model import load

FAST = frozenset({"energy", "forces", "stress"})


@pytest.mark.parametrize("outputs", [FAST, FAST | {"node_energy"}], ids=len)
@pytest.mark.parametrize("names", [["skewed"], ["rod"], ["skewed", "rod"]], ids=str)
def test_one_process(names, outputs):
    model = load(dtype=torch.float64, device=torch.device("cpu"), functional="pbe", cutoff=12.0)
    check_capturable(model, [structures()[name] for name in names], outputs)
