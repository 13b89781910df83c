"""O-40: rows of two uneven shardings are never paired, for either storage, also under ``python -O``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvdd_core.tensor import GatherMetadata, ShardTensor, StorageKind
from tests._spawn import RankPool, run_ranks
from tests.tensor._rows import Rules, caught, random, rows, spread

F = 3
SPLITS = ([1, 1, 1, 1, 1], [0, 0, 1, 1, 1])  # A: 0 + 5, B: 2 + 3


def shardings(storage: StorageKind) -> tuple[ShardTensor, ShardTensor]:
    """The same global (5, 3) tensor, spread in two ways."""
    made = []
    for owner in SPLITS:
        s = spread(owner, [[], []])
        t = random(5, F)[s.ids]
        if storage is StorageKind.HALO:
            made.append(rows(t, s.meta))
        else:
            directory = GatherMetadata.build(s.mesh, s.ids)
            made.append(ShardTensor.wrap(t, spec=Rules(storage=storage), gather_meta=directory))
    return made[0], made[1]


def _combined(storage: StorageKind) -> tuple[bool, dict[str, str], float]:
    x, y = shardings(storage)
    index = torch.zeros(y.shape[0], dtype=torch.int64)
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + y,
        "mul": lambda: torch.mul(x, y),
        "where": lambda: torch.where(x > 0, x, y),
        "cross": lambda: torch.cross(x, y, dim=1),
        "index_add": lambda: x.index_add(0, index, y),
        "index_add of an index": lambda: x.index_add(0, ShardTensor.promote(index, y), y.to_local()),
        "cat": lambda: torch.cat([x, y]),
        "cat columns": lambda: torch.cat([x, y], dim=1),
        "stack": lambda: torch.stack((x, y)),
        "less": lambda: x < y,
        "equal": lambda: torch.equal(x, y),
        "eq": lambda: x == y,
        "maximum": lambda: torch.maximum(input=x, other=y),
        "loss": lambda: torch.nn.functional.mse_loss(x, y),
        "add_": lambda: x.add_(y),
        "iadd": lambda: x.__iadd__(y),
        "mul_": lambda: x.mul_(y),
        "copy_": lambda: x.copy_(y),
        "addcmul_": lambda: x.addcmul_(x, y),
        "index_add_": lambda: x.index_add_(0, index, y),
        "scatter_add_": lambda: x.scatter_add_(0, index[:, None].expand(-1, F), y),
        "set": lambda: x.__setitem__(slice(None), y),
        "set by mask": lambda: x.__setitem__(x.to_local() > 0, y),
        "out": lambda: torch.add(x, 1.0, out=y),
    }
    said = {name: caught(call) for name, call in calls.items()}
    a, b = shardings(storage)
    untouched = float((x.to_local() - a.to_local()).abs().sum() + (y.to_local() - b.to_local()).abs().sum())
    return __debug__, said, untouched


@pytest.mark.parametrize("storage", [StorageKind.HALO, StorageKind.SHARDED])
def test_two_shardings_are_refused_on_all_ranks(
    rank_pool: Callable[..., RankPool], storage: StorageKind
) -> None:
    for _, said, changed in rank_pool(2).run(_combined, storage):
        check(said, changed)


def test_and_under_python_without_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    for debug, said, changed in run_ranks(_both, 2, fresh=True, timeout=60):
        assert not debug
        check(said, changed)


def _both() -> tuple[bool, dict[str, str], float]:
    found = [_combined(storage) for storage in (StorageKind.HALO, StorageKind.SHARDED)]
    said = {f"{i} {name}": text for i, (_, texts, _) in enumerate(found) for name, text in texts.items()}
    return __debug__, said, found[0][2] + found[1][2]


def check(said: dict[str, str], changed: float) -> None:
    wrong = {name: text for name, text in said.items() if not text.startswith("SpecError: ")}
    assert not wrong
    assert changed == 0.0
