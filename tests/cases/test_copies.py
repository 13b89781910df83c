"""Objects of plugins can be copied and sent (O-37), inputs stay as they were (O-38), files run no code (O-36)."""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import pickle
from pathlib import Path

import ase
import numpy as np
import pytest
import torch

from nvdd_core.cli.main import main
from nvdd_core.comm import Mesh
from nvdd_core.dynamics import Checkpoint
from nvdd_core.errors import InputError
from nvdd_core.partition import Bisection, Box, Frame, Rows, segment_bounds
from nvdd_core.plugins import default_manager
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from tests._spawn import ROOT
from tests.cases.models import TorchLJ
from tests.cases.ranks import mesh
from tests.cases.travel import ARGON, round_trips

# -- O-37 --


def test_models_can_be_copied_and_sent() -> None:
    assert round_trips("lj", True) == []


@pytest.mark.distributed
def test_models_can_be_copied_and_sent_within_a_group(rank_pool) -> None:
    assert rank_pool(2).run(round_trips, "lj", True, timeout=90) == [[], []]


def test_declarations_can_be_copied_and_sent() -> None:
    manager = default_manager()
    for row in (*manager.models(), *manager.specs(), *manager.adapters()):
        assert pickle.loads(pickle.dumps(row)) == copy.deepcopy(row) == row
    for row in manager.specs():
        spec = row.decl.ref.resolve()
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


# -- O-38 --


def _hash(*tensors: torch.Tensor) -> list[str]:
    return [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors]


def _twice() -> list[bool]:
    group = mesh()
    atoms = ARGON.atoms()
    atoms.set_array("charges", np.arange(108.0))
    arrays = [atoms.cell.array, *atoms.arrays.values()]
    before = [array.tobytes() for array in arrays]
    info = dict(atoms.info)
    batch = Batch.from_ase([atoms, atoms])
    given = {**vars(batch), **batch.fields}
    held = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    hashes = _hash(*held.values())
    answers = []
    for _ in range(2):
        sharded = ShardedBatch.scatter(batch if group.rank == 0 else None, group)
        model = DistributedModel(TorchLJ(), DomainConfig(skin=0.3), group)
        outputs = model(sharded)
        again = model(sharded)
        forces, ids = sharded.positions.new_zeros(216, 3), sharded.ids
        forces[ids] = outputs.forces
        back = sharded.gather()
        answers.append((outputs.energy.tolist(), forces.tolist()))
        same = torch.equal(outputs.energy, again.energy) and torch.equal(outputs.forces, again.forces)
        if back is not None:
            same = same and torch.equal(back.positions, batch.positions)
            same = same and torch.equal(back.fields["charges"], batch.fields["charges"])
            same = same and all(np.array_equal(a.positions, atoms.positions) for a in back.to_ase())
    return [
        same,
        answers[0] == answers[1],
        hashes == _hash(*held.values()),
        before == [array.tobytes() for array in arrays],
        info == atoms.info,
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_given_is_changed(rank_pool, world: int) -> None:
    for found in rank_pool(world).run(_twice):
        assert found == [True] * 5


def test_partition_changes_no_row_it_is_given() -> None:
    positions = torch.from_numpy(ARGON.pos.copy())
    segment, ids = torch.zeros(108, dtype=torch.int64), torch.arange(108)
    cell, pbc = torch.from_numpy(ARGON.cell.copy())[None], torch.ones(1, 3, dtype=torch.bool)
    before = _hash(positions, segment, ids, cell, pbc)
    box = Box.from_cells(cell, pbc, "system")
    frame = Frame.from_bounds(box, *segment_bounds(box.fractional(positions, segment), segment, 1))
    frac, _ = frame.fold(positions, segment)
    rows = Rows(frame.unit(frac, segment), segment, ids)
    cuts = Bisection(108, 1, 1)
    for _ in range(2):
        cuts.fit(rows, frame.lengths(), Mesh.single())
        assert cuts.assign(rows).tolist() == [0] * 108
    assert before == _hash(positions, segment, ids, cell, pbc)


def test_options_stay_as_they_were() -> None:
    options = {"epsilon": {"Ar": 0.01}, "sigma": {"Ar": 3.4}}
    before = copy.deepcopy(options)
    for _ in range(2):
        default_manager().load_model("lj", dtype=torch.float64, device=torch.device("cpu"), **options)
        assert options == before


# -- O-36 --


class Planted:
    """An object whose unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _plant(folder: Path, kind: str) -> tuple[Path, Path]:
    marker, path = folder / "marker", folder / f"planted.{kind}"
    if kind == "pt":
        torch.save({"positions": Planted(marker)}, path)
    elif kind == "npz":
        np.savez(path, positions=np.array([Planted(marker)], dtype=object))
    elif kind == "trj":
        path.write_bytes(b"PickleTrajectory" + pickle.dumps(Planted(marker)))
    else:
        path.write_bytes(pickle.dumps(Planted(marker)))
    return path, marker


@pytest.mark.parametrize(
    "kind", ["pkl", "pt", "npz", "trj", "traj", "xyz", "safetensors", "py", "json", "db"]
)
def test_a_planted_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, marker = _plant(tmp_path, kind)
    assert main(["evaluate", str(path), "--model", "lj", "--device", "cpu"]) == 2
    with pytest.raises(InputError, match="is not a checkpoint that can be used"):
        Checkpoint(path)
    structure = tmp_path / "a.xyz"
    ase.Atoms("Ar", cell=[5.0] * 3, pbc=True).write(structure)
    assert main(["run", str(structure), "--model", "lj", "--device", "cpu", "--restart", str(path)]) == 2
    assert not marker.exists()


def test_a_planted_file_would_do_harm_elsewhere(tmp_path: Path) -> None:
    """The test above means something: whoever unpickles the file makes the marker."""
    path, marker = _plant(tmp_path, "pt")
    torch.load(path, weights_only=False)
    assert marker.is_dir()


def test_no_source_loads_pickled_models() -> None:
    for path in [*(ROOT / "nvdd_core").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name != "foreign.py":  # undoes what importing mace sets
            assert "NO_WEIGHTS_ONLY" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "torch.load",
                "np.load",
                "numpy.load",
            }:
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if ast.unparse(node.func) == "torch.load":
                    # the one place that runs a file's code, where the user said trust=true
                    asked = path.name == "checkpoint.py" and path.parent.name == "nvdd_mace"
                    safe = given.get("weights_only") == ("False" if asked else "True")
                else:
                    safe = given.get("allow_pickle", "False") == "False"
                assert safe, f"{path}:{node.lineno}"
