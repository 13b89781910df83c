"""What `DistributedModel` returns for what was asked, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError, PluginValidationError
from nvdd_core.runtime import DistributedModel, MLIPSpec, Outputs
from nvdd_core.spec import OutputKind, OutputSpec
from nvdd_lj.model import load
from tests.cases import oracle
from tests.cases.models import TorchLJ
from tests.cases.ranks import System, collect, mesh, share


def lattice() -> System:
    pos, cell = oracle.fcc(3, 3, 3)
    return System(pos, cell, (True, True, True))


def direct() -> object:
    return load(dtype=torch.float64, device=torch.device("cpu"), epsilon=1.0, sigma=1.0, cutoff=2.5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("force", "no output 'force' (did you mean forces?); the outputs: energy, forces, stress"),
        ("charges", "there is no output 'charges'; the outputs"),
        ("node_virial", "this model gives no 'node_virial'; it gives: energy, forces, stress, node_energy"),
    ],
)
def test_outputs_that_are_refused(name: str, said: str) -> None:
    model = DistributedModel(TorchLJ())
    with pytest.raises(InputError) as caught:
        model(share([lattice()], Mesh.single()), {"energy", name})
    assert said in str(caught.value)
    assert model.n_rebuilds == 0


def test_a_model_without_energy_is_refused() -> None:
    model = TorchLJ()
    model.outputs = frozenset({"forces"})
    with pytest.raises(InputError, match="gives no 'energy'; it gives: forces"):
        DistributedModel(model)(share([lattice()], Mesh.single()), {"forces"})


def test_a_model_that_gives_less_than_it_declares() -> None:
    class Silent(TorchLJ):
        def forward(self, batch):
            return {"energies": batch.positions.sum(1)}

    with pytest.raises(
        PluginValidationError, match="gave no 'node_energy', which it declares; it gave: energies"
    ):
        DistributedModel(Silent())(share([lattice()], Mesh.single()))


@pytest.mark.parametrize("make", [TorchLJ, direct])
@pytest.mark.parametrize("asked", ["forces", "stress", "node_energy"])
def test_energy_is_right_whatever_was_asked(make, asked: str) -> None:
    sharded = share([lattice()], Mesh.single())
    right = float(DistributedModel(TorchLJ())(sharded, {"energy"}).energy)
    out = DistributedModel(make())(sharded, {asked})
    assert abs(float(out.energy) - right) < 1e-9
    assert right < -700
    for name in ("stress", "node_energy", "node_virial"):
        assert (getattr(out, name) is not None) == (name == asked)


def test_outputs_by_name() -> None:
    one = torch.ones(1)
    out = Outputs(one, None, None, 2 * one, None, {"charge": 3 * one})
    assert {name: float(value) for name, value in out.named().items()} == {
        "energy": 1.0, "node_energy": 2.0, "charge": 3.0
    }  # fmt: skip


def test_what_is_per_row() -> None:
    spec = MLIPSpec(
        outputs={"charge": OutputSpec(OutputKind.PER_NODE), "gap": OutputSpec(OutputKind.PER_GRAPH)}
    )
    names = ("energy", "stress", "gap", "unheard", "forces", "node_energy", "node_virial", "charge")
    assert [name for name in names if spec.per_row(name)] == list(names[4:])


def _node_virial() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Virials of rows in the file's order, their sum over the volume, and the stress."""
    group = mesh()
    system = lattice()
    sharded = share([system], group)
    out = DistributedModel(direct(), mesh=group)(sharded, {"node_virial", "stress"})
    rows = collect(out.node_virial, sharded.ids, sharded.n_global, group)
    return rows, rows.sum(0) / abs(np.linalg.det(system.cell)), out.stress[0].numpy()


def test_node_virial_works(rank_pool) -> None:
    alone, total, stress = _node_virial()
    assert np.abs(total - stress).max() < 1e-10
    assert np.abs(alone).max() > 0.1
    for rows, _, _ in rank_pool(2).run(_node_virial):
        assert np.abs(rows - alone).max() < 1e-9
