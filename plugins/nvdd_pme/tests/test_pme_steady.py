"""Between two neighbour lists nothing waits for the host, so that a GPU can run a captured step."""

from __future__ import annotations

import mesh_ranks as on_rank
import pme_kit as kit
import pytest

from nvdd_core.testing import check_capturable
from nvdd_pme.model import load_ewald, load_pme

FAST = frozenset({"energy", "forces", "stress"})
ALL = FAST | {"node_energy", "charge_gradient"}
MODELS = {
    "ewald": lambda **options: load_ewald(**kit.CPU, cutoff=6.0, **options),
    "replicated": lambda **options: load_pme(**kit.CPU, cutoff=6.0, engine="replicated", **options),
    "sharded": lambda **options: load_pme(**kit.CPU, cutoff=6.0, engine="sharded", **options),
}


@pytest.mark.parametrize("outputs", [frozenset({"energy"}), FAST, ALL], ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_one_process(name: str, outputs: frozenset[str]) -> None:
    atoms = kit.disordered(4, skew=0.2, seed=3)
    check_capturable(MODELS[name](), atoms, outputs)
    check_capturable(MODELS[name](), [atoms, kit.rock_salt()], outputs)
    check_capturable(MODELS[name](charges="H=0.3"), atoms, outputs)


@pytest.mark.parametrize("outputs", [FAST, ALL], ids=len)
@pytest.mark.parametrize("engine", ["replicated", "sharded"])
def test_on_ranks(rank_pool, engine: str, outputs: frozenset[str]) -> None:
    assert rank_pool(3).run(on_rank.capturable, engine, outputs) == [True] * 3
