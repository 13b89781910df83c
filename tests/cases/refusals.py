"""The refusal cases of open.md as one program, ``python [-O] -m tests.cases.refusals``, which prints them as JSON."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import NvddError
from nvdd_core.runtime import SPEC_MPNN_HALO, DistributedModel, DomainConfig, MLIPSpec
from nvdd_core.runtime.workers import WorkerPool
from tests.cases import oracle
from tests.cases.models import Raising, TorchLJ, Toy2
from tests.cases.ranks import System, evaluate, share
from tests.tensor._rows import rows, spread

ALL = (True,) * 3


def told(action: Callable[[], Any]) -> str:
    """Type and message of what an action raises."""
    try:
        action()
    except (NvddError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def tiny_cells(mesh: Mesh) -> list[float | str]:
    """O-03: the right number, or a refusal."""
    small = System(*oracle.fcc(1, 1, 1), ALL)
    lone = System(np.zeros((1, 3)), 1.2 * np.eye(3), ALL)
    found: list[float | str] = [
        round(float(evaluate(TorchLJ, [s], group=mesh).energy[0]), 9) for s in (small, lone)
    ]
    return [*found, told(lambda: evaluate(TorchLJ, [lone], DomainConfig(skin=1e5), group=mesh))]


def not_finite(mesh: Mesh) -> list[str]:
    """O-06: positions, a cell, and a position that went wrong later."""
    out = []
    for value in (np.nan, np.inf):
        pos, cell = oracle.fcc(3, 3, 3)
        pos[57, 1] = value
        out.append(told(lambda pos=pos, cell=cell: evaluate(TorchLJ, [System(pos, cell, ALL)], group=mesh)))
    pos, cell = oracle.fcc(3, 3, 3)
    bad = cell.copy()
    bad[1, 1] = np.nan
    out.append(told(lambda: evaluate(TorchLJ, [System(pos, bad, ALL)], group=mesh)))
    sharded = share([System(pos, cell, ALL)], mesh)
    model = DistributedModel(TorchLJ(), DomainConfig(skin=0.3), mesh)
    model(sharded)
    sharded.positions[sharded.ids == 57] = float("nan")
    return [*out, told(lambda: model(sharded))]


def described_models(mesh: Mesh, model: Toy2, spec: MLIPSpec) -> list[float | str | bool]:
    """O-16: a model and a spec that travelled here give the force of finite differences; a field can't get lost."""
    pos, cell = oracle.fcc(3, 3, 3)
    force = evaluate(lambda: model, [System(pos, cell, ALL)], group=mesh).forces[7, 0]
    data = spec.to_dict()
    lost = {key: value for key, value in data.items() if key != "version"}
    wrong = [lost, {**data, "version": 99}, {**data, "force_strategie": "autograd"}]
    wrong.append({**data, "force_strategy": "none"})
    return [
        round(float(force), 9),
        spec == SPEC_MPNN_HALO == MLIPSpec.from_dict(json.loads(json.dumps(data))),
        *(told(lambda d=d: MLIPSpec.from_dict(d)) for d in wrong),
    ]


def uneven_shardings(mesh: Mesh) -> list[str]:
    """O-40: rows split 0 + 5 against 2 + 3."""
    a, b = spread([1] * 5, [[], []]), spread([0, 0, 1, 1, 1], [[], []])
    g = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
    x, y = rows(g[a.ids], a.meta), rows(g[b.ids], b.meta)
    index = torch.zeros(y.shape[0], dtype=torch.int64)
    calls: list[Callable[[], Any]] = [
        lambda: x + y,
        lambda: torch.where(x > 0, x, y),
        lambda: torch.cross(x, y, dim=1),
        lambda: x.index_add(0, index, y),
        lambda: torch.cat([x, y]),
        lambda: x < y,
        lambda: x.add_(y),
    ]
    return [told(call) for call in calls]


def one_raises(mesh: Mesh, place: str) -> None:
    """O-21: rank 1 raises."""
    evaluate(lambda: Raising(place, 1), [System(*oracle.fcc(3, 3, 3), ALL)], group=mesh)


def main() -> None:
    """Print what every case says, on each rank."""
    found: dict[str, Any] = {}
    with WorkerPool(2, timeout_s=60.0) as pool:
        for case in (tiny_cells, not_finite, uneven_shardings):
            found[case.__name__] = pool.run(f"tests.cases.refusals:{case.__name__}")
        found["described_models"] = pool.run(
            "tests.cases.refusals:described_models", Toy2(), pickle.loads(pickle.dumps(SPEC_MPNN_HALO))
        )
    for place in ("setup", "backward"):
        with WorkerPool(2, timeout_s=60.0) as pool:
            found[place] = told(
                lambda pool=pool, place=place: pool.run("tests.cases.refusals:one_raises", place)
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
