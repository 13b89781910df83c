"""The example plugins: exact on any number of ranks under every strategy, and as chatty as they say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvdd_core.runtime import DistributedModel, DomainConfig
from nvdd_core.spec import StrategyKind
from tests.cases import oracle
from tests.cases.ranks import Result, System, assert_same, evaluate, mesh, share

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STRATEGIES = list(StrategyKind)
ALL = (True,) * 3
SYSTEMS = {
    "crystal": System(*oracle.fcc(3, 3, 3), ALL),
    "rod": System(*oracle.fcc(1, 1, 4), ALL),
    "triclinic": System(*oracle.triclinic(), ALL),
    "droplet": System(oracle.fcc(2, 2, 2)[0] + 0.4, 40 * np.eye(3), ALL),
    "cluster": System(oracle.fcc(2, 2, 2)[0], np.eye(3), (False,) * 3),
}
STATED = {"crystal": 154.4582113790, "rod": 22.8803310748, "droplet": 4.9697462636}
MODELS = {
    "toy2-inplace": ("toy2", "nvdd_toy2.model", {"style": "inplace"}),
    "toy2-rebind": ("toy2", "nvdd_toy2.model", {"style": "rebind"}),
    "toy2-verbs": ("toy2", "nvdd_toy2.model", {"style": "verbs"}),
    "mpnn": ("mpnn", "nvdd_mpnn.model", {"cutoff": 2.5}),
    "warp": ("warp_kernel", "nvdd_warp_kernel.model", {}),
}


def make(name: str) -> Any:
    folder, module, options = MODELS[name]
    path = str(EXAMPLES / folder / "src")
    if path not in sys.path:
        sys.path.insert(0, path)
    load = importlib.import_module(module).load
    return load(dtype=torch.float64, device=torch.device("cpu"), **options)


def run(name: str, system: System, config: DomainConfig) -> Result:
    return evaluate(lambda: make(name), [system], config)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mpnn"])
def test_one_process_agrees_with_the_oracle(name: str) -> None:
    for label, energy in STATED.items():
        found = run(name, SYSTEMS[label], DomainConfig())
        assert abs(found.energy[0] - energy) < 1e-9
    crystal = SYSTEMS["crystal"]
    found = run(name, crystal, DomainConfig())
    assert abs(found.forces[7, 0] - (-0.0102654766)) < 1e-9  # open.md, O-16
    assert abs(np.trace(found.stress[0]) - (-12.2008643)) < 1e-6  # open.md, O-15


def test_forces_and_stress_of_mpnn_are_derivatives() -> None:
    system = SYSTEMS["triclinic"]

    def energy(pos: Any, cell: Any, pbc: Any) -> float:
        return float(run("mpnn", System(pos, cell, pbc), DomainConfig()).energy[0])

    found = run("mpnn", system, DomainConfig())
    for atom, axis in ((0, 0), (13, 1), (26, 2)):
        right = oracle.numerical_force(energy, system.pos, system.cell, system.pbc, atom, axis)
        assert found.forces[atom, axis] == pytest.approx(right, abs=1e-7)
    assert (
        np.abs(found.stress[0] - oracle.numerical_stress(energy, system.pos, system.cell, system.pbc)).max()
        < 1e-7
    )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(MODELS))
def test_any_number_of_ranks_gives_the_same_numbers(
    name: str, strategy: StrategyKind, world: int, rank_pool: Any
) -> None:
    for label, system in SYSTEMS.items():
        right = run(name, system, DomainConfig())
        for found in rank_pool(world).run(run, name, system, DomainConfig(strategy=strategy)):
            assert_same(found, right, f"{name} {label} {strategy} {world}", edges=False)


def traffic(name: str) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Calls and bytes of a steady evaluation, and how many ghosts this rank sends copies of."""
    group = mesh()
    sharded = share([SYSTEMS["crystal"]], group)
    model = DistributedModel(make(name), DomainConfig(skin=0.1), group)
    model(sharded)
    before = group.counter.snapshot()
    model(sharded)
    tally = group.counter.since(before)
    plan = model.domain.plan
    return dict(tally.calls), dict(tally.bytes), [len(plan.send_index), plan.n_ghost]


@pytest.mark.parametrize(
    ("name", "width"), [("toy2-inplace", 1), ("toy2-verbs", 1), ("mpnn", 8), ("warp", 1)]
)
def test_one_exchange_each_way_a_layer(name: str, width: int, rank_pool: Any) -> None:
    for calls, moved, (sent, received) in rank_pool(2).run(traffic, name):
        # forward: positions, then what the second layer reads; backward: the same two
        assert calls == {"exchange": 2, "reverse": 2, "all_reduce": 1}
        assert moved["exchange"] == 8 * sent * (3 + width)
        assert moved["reverse"] == 8 * received * (3 + width)


@pytest.mark.parametrize("folder", sorted({folder for folder, _, _ in MODELS.values()}))
def test_installed_example_is_found_and_runs(folder: str, tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"),
            *("--target", str(tmp_path), str(EXAMPLES / folder)),
        ],
        check=True,
        timeout=120,
    )
    (tmp_path / "x.xyz").write_text("2\npbc=F\nAr 0 0 0\nAr 0 0 1.2\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = "import sys; from nvdd_core.cli.main import main; sys.exit(main())"
    kit = subprocess.run(
        [sys.executable, "-m", "nvdd_core.testing", folder, "--quick"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert kit.returncode == 0, kit.stdout + kit.stderr
    for args in (("plugins", "check", folder), ("evaluate", "x.xyz", "--model", folder, "--ranks", "2")):
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert folder in done.stdout
