"""What becomes of the columns of a structure, and of the structure itself."""

from __future__ import annotations

import ase
import numpy as np
import pytest
import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DomainConfig, ShardedBatch
from nvdd_core.runtime.structures import constraint_names, read_structures
from nvdd_core.spec import StrategyKind
from tests.cases import oracle
from tests.cases.ranks import mesh


def atoms(n: int = 3, **columns: np.ndarray) -> ase.Atoms:
    made = ase.Atoms(f"Ar{n}", positions=np.arange(3.0 * n).reshape(n, 3), cell=[9.0] * 3, pbc=True)
    for name, values in columns.items():
        made.set_array(name, values)
    return made


CLASHING = ("velocities", "ids", "system", "numbers_", "positions_")


def _round_trip() -> dict[str, list[float]]:
    group = mesh()
    pos, cell = oracle.fcc(2, 2, 2)
    system = ase.Atoms(f"Ar{len(pos)}", positions=pos, cell=cell, pbc=True)
    for k, name in enumerate(CLASHING):
        system.set_array(name, np.arange(32) + 100.0 * k)
    sharded = ShardedBatch.scatter(Batch.from_ase(system) if group.rank == 0 else None, group)
    assert set(sharded.fields) == set(CLASHING)
    assert sharded.velocities.abs().max() == 0.0
    from nvdd_core.runtime import DistributedModel
    from tests.cases.models import TorchLJ

    seen = {}

    class Reads(TorchLJ):
        def node_energy(self, batch):
            for name in CLASHING:
                seen[name] = (batch.fields[name] - batch.ids).unique().tolist()
            return super().node_energy(batch)

    DistributedModel(Reads(), DomainConfig(), group)(sharded)
    back = sharded.gather()
    if back is not None:
        assert set(back.fields) == set(CLASHING)
        assert np.array_equal(back.to_ase()[0].arrays["ids"], np.arange(32) + 100.0)
        assert torch.equal(back.positions, torch.from_numpy(pos))
    return seen


def test_columns_called_like_rows_of_ours(rank_pool) -> None:
    for seen in [_round_trip(), *rank_pool(2).run(_round_trip)]:
        assert seen == {name: [100.0 * k] for k, name in enumerate(CLASHING)}


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("u1", torch.uint8),
        ("u2", torch.int64),
        ("u4", torch.int64),
        ("u8", torch.int64),
        ("longdouble", torch.float64),
        (">f4", torch.float32),
        (">i4", torch.int32),
        ("f2", torch.float16),
        ("?", torch.bool),
    ],
)
def test_dtypes_of_columns(given: str, dtype: torch.dtype) -> None:
    values = np.array([0, 1, 1]).astype(given)
    field = Batch.from_ase(atoms(x=values)).fields["x"]
    assert field.dtype == dtype
    assert field.tolist() == [0, 1, 1]


def test_whole_numbers_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"field 'x' holds 18446744073709551615: give at most"):
        Batch.from_ase(atoms(x=np.array([1, 2, 2**64 - 1], dtype=np.uint64)))


def test_columns_that_not_all_systems_have_alike() -> None:
    one = atoms(2, a=np.zeros(2), b=np.zeros((2, 3)), c=np.zeros(2), d=np.zeros(2, dtype=np.int8))
    two = atoms(3, a=np.ones(3), b=np.ones(3), d=np.ones(3))
    with pytest.warns(UserWarning, match=r"^b, c: not a column of every structure"):
        batch = Batch.from_ase([one, two])
    assert set(batch.fields) == {"a", "d"}
    assert batch.fields["d"].tolist() == [0, 0, 1, 1, 1]
    assert batch.fields["d"].dtype == torch.float64


def test_from_ase_leaves_its_source_alone() -> None:
    source = atoms(x=np.arange(3.0))
    before = {name: array.copy() for name, array in source.arrays.items()}
    batch = Batch.from_ase(source)
    batch.positions += 1.0
    batch.fields["x"] += 1.0
    batch.cell += 1.0
    assert all(np.array_equal(source.arrays[name], array) for name, array in before.items())
    assert np.array_equal(np.array(source.cell), 9.0 * np.eye(3))


def test_structures_of_a_file(tmp_path) -> None:
    path = tmp_path / "two.xyz"
    path.write_text("1\n\nAr 0 0 0\n2\n\nAr 0 0 0\nAr 1 1 1\n")
    assert [len(found) for found in read_structures(path, ":")] == [1, 2]
    assert [len(found) for found in read_structures(path, "0")] == [1]
    with pytest.raises(InputError, match="there is no system 5:"):
        read_structures(path, "5:")
    assert constraint_names(read_structures(path, ":")) == []


# -- configuration --


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"strategy": "halo"}, "strategy is 'halo': expected one of StrategyKind.HALO"),
        ({"grid_dims": [1, 1]}, "expected three whole numbers above zero"),
        ({"grid_dims": (2, 1, 0)}, "expected three whole numbers above zero"),
        ({"grid_dims": 4}, "expected three whole numbers above zero"),
        ({"skin": float("nan")}, "skin is nan"),
    ],
)
def test_absurd_configurations(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DomainConfig(**arguments)


def test_absurd_reach() -> None:
    config = DomainConfig(skin=1e7, strategy=StrategyKind.HALO)
    with pytest.raises(InputError, match=r"neighbour lists reach up to 1e\+06 A"):
        config.list_cutoff(2.5)
