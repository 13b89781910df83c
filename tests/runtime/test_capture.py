"""What `Steady` makes of captures: when it asks for one, how often, and what it does when there is none.

A stand-in for CUDA graphs computes again what it was given and writes where the capture wrote, as a replay does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import DomainParallel, VelocityVerlet, initial_velocities
from nvdd_core.runtime import DistributedModel, DomainConfig, steady
from nvdd_core.runtime.outputs import Partial
from tests.cases.ranks import collect, mesh, share
from tests.runtime.test_steady import Near, systems

STEPS = 40


class Graphs:
    """Instead of `GraphPool`."""

    made: list[Graphs]
    fails = False

    def __init__(self, device: torch.device) -> None:
        self.captures = self.replays = 0
        Graphs.made.append(self)

    def capture(self, evaluate: Callable[[], Partial]) -> tuple[Any, Partial]:
        if self.fails:
            evaluate()
            raise RuntimeError("operation not permitted\nand more")
        self.captures += 1
        partial, counter = evaluate(), mesh_of_test().counter

        def replay() -> None:
            self.replays += 1
            before = counter.snapshot()
            again = evaluate()
            counter.restore(before)  # a graph's collectives are counted by who replays it
            for name in ("energy", "forces", "virial", "node_energy"):
                old, new = getattr(partial, name), getattr(again, name)
                if old is not None:
                    old.copy_(new)

        return mock.Mock(replay=replay), partial


class Timing:
    """Instead of `steady._Timing`: what each rank would have measured."""

    bound: tuple[bool, ...]

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def launch_bound(self, limit: float) -> bool:
        return self.bound[mesh_of_test().rank]


_MESHES: list[Mesh] = []


def mesh_of_test() -> Mesh:
    return _MESHES[-1]


@contextmanager
def as_on_gpus(*, fails: bool = False, bound: tuple[bool, ...] = (), room: bool = True) -> Iterator[Mesh]:
    _MESHES.append(mesh())
    Graphs.made, Graphs.fails, Timing.bound = [], fails, bound
    with (
        mock.patch.object(steady, "GraphPool", Graphs),
        mock.patch.object(steady, "_Timing", Timing),
        mock.patch.object(steady, "_plenty_of_memory", return_value=room),
        mock.patch.object(Mesh, "captures", property(lambda self: True)),
    ):
        yield mesh_of_test()


def _walk(capture: str, pads: bool, **what: Any) -> dict[str, Any]:
    with as_on_gpus(**what) as group, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sharded = share(systems()[:1], group)
        sharded.rows["velocities"] = initial_velocities(
            sharded.masses, sharded.ids, 900.0, 1, group.all_reduce_sum_
        )
        run = DistributedModel(Near(pads=pads), DomainConfig(skin=0.4), group)
        before = group.counter.snapshot()
        info = DomainParallel(VelocityVerlet(4.0), run, capture=capture).run(sharded, STEPS)
        return {
            "energy": info.energy,
            "positions": collect(sharded.positions, sharded.ids, sharded.n_global, group),
            "rebuilds": run.n_rebuilds,
            "captures": sum(one.captures for one in Graphs.made),
            "replays": sum(one.replays for one in Graphs.made),
            "reverses": group.counter.since(before).calls.get("reverse", 0),
            "told": [str(one.message) for one in told if "captured" in str(one.message)],
        }


_RIGHT: dict[int, dict[str, Any]] = {}


@pytest.fixture
def right(rank_pool: Any) -> dict[int, dict[str, Any]]:
    for world in {1, 2} - _RIGHT.keys():
        _RIGHT[world] = rank_pool(world).run(_walk, "off", True)[0]
    return _RIGHT


def _equal(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert abs(found["energy"] - right["energy"]) < 1e-9
    np.testing.assert_allclose(found["positions"], right["positions"], rtol=0, atol=1e-9)
    assert found["rebuilds"] == right["rebuilds"] > 4
    assert found["reverses"] == right["reverses"]


@pytest.mark.parametrize("world", [1, 2])
def test_one_capture_serves_padded_domains(rank_pool, right, world: int) -> None:
    for found in rank_pool(world).run(_walk, "on", True):
        _equal(found, right[world])
        assert 1 <= found["captures"] < 0.7 * found["rebuilds"]  # an eighth of edges more come in this melt
        assert found["replays"] > STEPS / 2


def test_a_model_that_calls_near_edges_without_pads_is_captured_for_each_domain(rank_pool, right) -> None:
    """The stand-in doesn't mind its `nonzero`."""
    for found in rank_pool(2).run(_walk, "on", False):
        _equal(found, right[2])
        assert found["rebuilds"] / 2 < found["captures"] <= found["rebuilds"]


@pytest.mark.parametrize("pads", [True, False])
def test_a_capture_that_fails_is_told_once_and_the_run_goes_on(rank_pool, right, pads: bool) -> None:
    for rank, found in enumerate(rank_pool(2).run(_walk, "on", pads, fails=True)):
        _equal(found, right[2])
        (told,) = found["told"]
        assert told.startswith(f"rank {rank}: an evaluation could not be captured")
        assert "(operation not permitted)" in told
        assert found["replays"] == 0


@pytest.mark.parametrize(
    ("bound", "room", "captures"),
    [((True, False), True, True), ((False, False), True, False), ((True, True), False, False)],
    ids=["one slow host", "kernels take the time", "no room"],
)
def test_the_ranks_decide_together(
    rank_pool, right, bound: tuple[bool, bool], room: bool, captures: bool
) -> None:
    for found in rank_pool(2).run(_walk, "auto", True, bound=bound, room=room):
        _equal(found, right[2])
        assert (found["captures"] > 0) is captures
