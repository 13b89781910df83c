"""One structure and one pool for all validations; a model that fails on ranks costs the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ase
import pytest

from nvdd_core.runtime import WorkerPool
from nvdd_core.validate import ValidationReport, trace_and_validate
from tests.cases import oracle

Check = Callable[..., ValidationReport]


def bar() -> ase.Atoms:
    """144 atoms in a bar long enough that each of two ranks lacks some."""
    pos, cell = oracle.fcc(9, 2, 2)
    return ase.Atoms(f"Ar{len(pos)}", positions=pos, cell=cell, pbc=True)


@pytest.fixture(scope="package")
def atoms() -> ase.Atoms:
    """The bar."""
    return bar()


@pytest.fixture(scope="package")
def check(atoms: ase.Atoms) -> Iterator[Check]:
    """``check("Model", **flags)``: the report on one of the toy models, on two ranks."""
    pools: list[WorkerPool] = []

    def run(name: str, structure: Any = None, **flags: Any) -> ValidationReport:
        if not (pools and pools[-1].is_open):
            pools.append(WorkerPool(2, timeout_s=120.0))
        model = name if ":" in name else f"tests.validate.models:{name}"
        given = atoms if structure is None else structure
        return trace_and_validate(model, given, pool=pools[-1], timeout_s=120.0, **flags)

    yield run
    for pool in pools:
        pool.close()
