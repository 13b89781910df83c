"""Toy models for the calculator: one that fails in every way, by the elements it is given, and one that has charges."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import LocalBatch, current_dd_context
from tests.validate.models import Pair

REFUSED, REFUSED_BY_ONE, BROKEN, GONE, SLOW, STRAY = 90, 91, 92, 93, 94, 95


class Moody(Pair):
    """A pair potential for argon; heavy elements are faults of several kinds."""

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        for atom in ids[numbers == REFUSED].tolist():
            raise InputError(f"atom {atom} is thorium")

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        first = batch.ids[: batch.n_owned].eq(0).any()  # on one rank only
        heavy = int(batch.numbers.max()) if batch.n_local else 0
        if heavy == REFUSED_BY_ONE and first:
            raise InputError("one rank refuses")
        if heavy == STRAY and first:
            raise InputError("one rank refuses after one collective more")
        if heavy == STRAY and (mesh := current_dd_context().mesh):
            mesh.counter.add("barrier", 0)
            raise InputError("the other ranks have done one collective more")
        if heavy == BROKEN:
            raise ZeroDivisionError("the model is broken")
        if heavy == GONE and first:
            os._exit(7)
        if heavy == SLOW:
            time.sleep(60)
        return super().forward(batch)


def slow_to_load(**given: Any) -> Moody:
    """Take longer to load than a test's limit of an evaluation."""
    time.sleep(7.0)
    return Moody(**given)


class Charged(Pair):
    """A pair potential and the square of each atom's charge; it has no stress."""

    outputs = frozenset({"energy", "forces", "node_energy"})

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        out = super().forward(batch)
        charges = batch.fields.get("initial_charges")
        if charges is None:
            return out
        return {"node_energy": out["node_energy"] + charges[: batch.n_local] ** 2}
