"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import pytest
import torch

from nvdd_core.testing import check_capturable, default_structures
from nvdd_lj.model import load

FAST = frozenset({"energy", "forces", "stress"})


@pytest.mark.parametrize("outputs", [FAST, FAST | {"node_energy", "node_virial"}], ids=len)
@pytest.mark.parametrize("symbols", ["Ar", ("Ar", "Kr")])
def test_one_process(symbols, outputs):
    model = load(dtype=torch.float64, device=torch.device("cpu"))
    structures = default_structures(model.cutoff, symbols)
    check_capturable(model, structures["crystal"], outputs)
    check_capturable(model, [structures["crystal"], structures["triclinic"]], outputs)
