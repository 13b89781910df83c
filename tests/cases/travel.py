"""What ranks and spawned processes do in the tests of copies (O-37)."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import numpy as np
import torch

from nvdd_core.comm import Mesh
from nvdd_core.plugins import default_manager
from tests.cases import oracle
from tests.cases.ranks import System, evaluate, mesh

_POS, _CELL = oracle.fcc(3, 3, 3)
ARGON = System(3.4 * _POS, 3.4 * _CELL, (True,) * 3)


def load(name: str) -> Any:
    """Load a model as the command line does."""
    return default_manager().load_model(name, dtype=torch.float64, device=torch.device("cpu"))


def numbers(model: Any, group: Mesh | None = None) -> tuple[float, list[list[float]]]:
    """Energy and forces of one evaluation, by default on this process alone."""
    found = evaluate(lambda: model, [ARGON], group=group or Mesh.single())
    return float(found.energy[0]), found.forces.tolist()


def child(data: bytes, queue: Any) -> None:
    """Evaluate what was pickled, in a process that has no group."""
    queue.put((torch.distributed.is_initialized(), numbers(pickle.loads(data))))


def in_a_spawned_process(model: Any) -> tuple[bool, tuple[float, list[list[float]]]]:
    """Send a model to a new interpreter and return whether that has a group, and its numbers."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(pickle.dumps(model), queue))
    process.start()
    try:
        return queue.get(timeout=60)
    finally:
        process.join(10)
        process.kill()


def tensors(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Every tensor that hangs on an object."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return [t for item in inner for t in tensors(item, seen)]


def round_trips(name: str, spawned: bool) -> list[str]:
    """Copy a model in every way, before and after its first evaluation, on the ranks at hand; return what is wrong."""
    group = mesh()
    model = load(name)
    wrong: list[str] = []
    right = numbers(load(name), group)
    for when in ("before", "after"):
        data = pickle.dumps(model)
        if b"ProcessGroup" in data or b"HaloPlan" in data:
            wrong.append(f"{when}: a group travels along")
        for how, made in (("pickle", pickle.loads(data)), ("deepcopy", copy.deepcopy(model))):
            shared = {t.data_ptr() for t in tensors(model)} & {t.data_ptr() for t in tensors(made)} - {0}
            if shared:
                wrong.append(f"{when}, {how}: buffers are shared")
            if numbers(made, group) != right:
                wrong.append(f"{when}, {how}: other numbers")
            for t in tensors(made):
                t.zero_()
        if spawned and group.rank == 0:
            has_group, there = in_a_spawned_process(model)
            if has_group:
                wrong.append(f"{when}, spawn: the child has a group")
            if not np.allclose(there[1], right[1], rtol=0, atol=1e-9):
                wrong.append(f"{when}, spawn: other numbers")
        if numbers(model, group) != right:
            wrong.append(f"{when}: the original changed")
    return wrong
